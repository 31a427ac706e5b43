"""Checks of what plug-ins return: completions of engines and rows of sources."""

from dataclasses import replace
from math import nan

import pytest

from retrain.errors import UserCodeError
from retrain.registry import method_checks
from retrain.registry.call import Call
from retrain.types import Completion, ExpertRow, Request, Rollout, Sampling, Turn

REQUEST, SAMPLING = Request((1, 2), 1, 4, 0), Sampling(stop_ids=(0,), vocabulary=8)
GOOD = Completion((5, 7, 0), (-1.0, -2, -0.5), "stop", 3)
ROW = Rollout("p", "1+1=", "2", (1, 2), (5, 0), (-1.0, -0.5), "2", (Turn(0, 2, "stop", 3, 0.5),), 0, 1.0, {"r": 1.0})
BAD_COMPLETIONS = {
    "log-probs": replace(GOOD, logprobs=(-1.0, nan, -0.5)),
    "too few log-probs": replace(GOOD, logprobs=(-1.0,)),
    "too many tokens": replace(GOOD, ids=(5, 5, 5, 5, 0), logprobs=(-1.0,) * 5),
    "beyond the vocabulary": replace(GOOD, ids=(5, 8, 0)),
    "another reason": replace(GOOD, finish_reason="eos"),
    "stopped without a stop id": replace(GOOD, ids=(5, 7, 7)),
    "cut at a stop id": replace(GOOD, finish_reason="length"),
    "continued after a stop id": replace(GOOD, ids=(5, 0, 0)),
    "version": replace(GOOD, weights_version="3"),
}


BAD_ROWS = {
    "id": replace(ROW, problem_id=3),
    "token ids": replace(ROW, completion_ids=(5, 0.0)),
    "too few log-probs": replace(ROW, sampler_logprobs=(-1.0,)),
    "group": replace(ROW, group="first"),
    "reward": replace(ROW, reward="1"),
    "no reward": replace(ROW, reward=None),
    "reward of a turn": replace(ROW, turns=(replace(ROW.turns[0], reward=nan),)),
    "turn past the end": replace(ROW, turns=(Turn(0, 3, "stop", 3),)),
    "expert's ids": ExpertRow((1, "2"), ((1, 2),)),
    "expert without a prompt": ExpertRow((1, 2), ((0, 2),)),
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
