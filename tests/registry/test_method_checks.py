"""Checks of what plug-ins return: completions of engines and rows of sources."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch

from retrain.errors import UserCodeError
from retrain.registry import method_checks
from retrain.registry.call import Call
from retrain.types import Completion, ExpertRow, Request, Rollout, Sampling, Turn

REQUEST, SAMPLING = Request((1, 2), 1, 4, 0), Sampling(stop_ids=(0,), vocabulary=8)
GOOD = Completion((5, 7, 0), (-1.0, -2, -0.5), "stop", 3)
ROW = Rollout("p", "1+1=", "2", (1, 2), (5, 0), (-1.0, -0.5), "2", (Turn(0, 2, "stop", 3, 0.5),), 0, 1.0, {"r": 1.0})
BAD_COMPLETIONS = {
    "log-probs": replace(GOOD, logprobs=(-1.0, nan, -0.5)),
    "infinite": replace(GOOD, logprobs=(-1.0, -inf, -0.5)),
    "tensor of log-probs": replace(GOOD, logprobs=torch.tensor([-1.0, -2.0, -0.5])),
    "positive log-prob": replace(GOOD, logprobs=(-1.0, 5.0, -0.5)),
    "truth as log-prob": replace(GOOD, logprobs=(-1.0, True, -0.5)),
    "too few log-probs": replace(GOOD, logprobs=(-1.0,)),
    "no tokens": replace(GOOD, ids=(), logprobs=()),
    "too many tokens": replace(GOOD, ids=(5, 5, 5, 5, 0), logprobs=(-1.0,) * 5),
    "beyond the vocabulary": replace(GOOD, ids=(5, 8, 0)),
    "negative": replace(GOOD, ids=(5, -1, 0)),
    "huge": replace(GOOD, ids=(5, 10**30, 0)),
    "fraction": replace(GOOD, ids=(5, 7.0, 0)),
    "text": replace(GOOD, ids=(5, "7", 0)),
    "truth": replace(GOOD, ids=(5, True, 0)),
    "tensor": replace(GOOD, ids=torch.tensor([5, 7, 0])),
    "another reason": replace(GOOD, finish_reason="eos"),
    "stopped without a stop id": replace(GOOD, ids=(5, 7, 7)),
    "cut at a stop id": replace(GOOD, finish_reason="length"),
    "continued after a stop id": replace(GOOD, ids=(5, 0, 0)),
    "version": replace(GOOD, weights_version="3"),
    "versions": replace(GOOD, versions=(3, 3)),
}


BAD_ROWS = {
    "id": replace(ROW, problem_id=3),
    "prompt": replace(ROW, prompt=None),
    "no prompt ids": replace(ROW, prompt_ids=()),
    "token ids": replace(ROW, completion_ids=(5, 0.0)),
    "log-probs": replace(ROW, sampler_logprobs=(-1.0, nan)),
    "too few log-probs": replace(ROW, sampler_logprobs=(-1.0,)),
    "no turns": replace(ROW, turns=()),
    "turns": replace(ROW, turns=((0, 2),)),
    "group": replace(ROW, group="first"),
    "huge group": replace(ROW, group=10**30),
    "reward": replace(ROW, reward="1"),
    "no reward": replace(ROW, reward=None),
    "large reward": replace(ROW, reward=1e20),
    "parts": replace(ROW, parts=None),
    "a part": replace(ROW, parts={"r": "high"}),
    "name of a part": replace(ROW, parts={1: 1.0}),
    "correct": replace(ROW, correct="no"),
    "status": replace(ROW, status=None),
    "metrics": replace(ROW, metrics={"m": inf}),
    "greedy": replace(ROW, greedy="0"),
    "reason of a turn": replace(ROW, turns=(replace(ROW.turns[0], finish_reason="eos"),)),
    "reward of a turn": replace(ROW, turns=(replace(ROW.turns[0], reward=nan),)),
    "state of a turn": replace(ROW, turns=(replace(ROW.turns[0], state=5),)),
    "version of a turn": replace(ROW, turns=(replace(ROW.turns[0], weights_version="3"),)),
    "versions of a turn": replace(ROW, turns=(replace(ROW.turns[0], versions=(3,)),)),
    "turn past the end": replace(ROW, turns=(Turn(0, 3, "stop", 3),)),
    "expert's ids": ExpertRow((1, "2"), ((1, 2),)),
    "expert's spans": ExpertRow((1, 2), ((1, 2, 3),)),
    "expert without a prompt": ExpertRow((1, 2), ((0, 2),)),
    "another type": {"ids": (1, 2)},
}
CALL = Call("plug-in", "mine")


@pytest.mark.parametrize("found", [GOOD, replace(GOOD, ids=[5, 7], logprobs=[-1, -2], finish_reason="length")])
def test_a_completion_of_the_request_passes(found):
    method_checks.completions(CALL, [[found]], [REQUEST], SAMPLING)


@pytest.mark.parametrize("found", BAD_COMPLETIONS.values(), ids=BAD_COMPLETIONS)
def test_a_completion_that_the_model_cannot_have_sampled_is_refused(found):
    with pytest.raises(UserCodeError, match=r'plug-in "mine": sample returned Completion'):
        method_checks.completions(CALL, [[found]], [REQUEST], SAMPLING)


@pytest.mark.parametrize("row", [ROW, replace(ROW, correct=True, greedy=1), ExpertRow((1, 2, 0), ((1, 3),))])
def test_a_row_of_a_source_passes(row):
    method_checks.source_rows(CALL, [row], 0, [])


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_that_cannot_be_trained_on_is_refused(row):
    with pytest.raises(UserCodeError, match=r'plug-in "mine": take returned'):
        method_checks.source_rows(CALL, [row], 0, [])


def test_a_row_that_the_source_was_given_is_not_examined_again():
    given = replace(ROW, reward=None)
    method_checks.source_rows(CALL, [given], 0, [given])
