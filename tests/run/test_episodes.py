"""Episodes against a literal player of one at a time; limits; the sampler's log-probs against the trainer's."""

from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain.engines.torch_engine import TorchEngine
from retrain.environments.contract import Limits
from retrain.environments.env_pool import EnvPool, Launch
from retrain.environments.env_process import Hello
from retrain.errors import EngineError, UserCodeError
from retrain.functional.seeds import derive_seed
from retrain.protocols import Sampler
from retrain.run.episodes import EpisodeRunner
from retrain.training.chat import Chat
from retrain.training.layout import Layout
from retrain.training.policy import TorchPolicy
from retrain.training.settings import PolicySettings
from retrain.types import Completion, Problem, Request, Sampling
from tests.engines.models import MODELS, tiny
from tests.run import talking_worlds
from tests.training.chat_templates import FAMILIES, chat

END = 1
SAMPLING = Sampling(stop_ids=(END,), seed=5)


class Letters:
    """A tokenizer of one letter each: a is 2. Token 1 ends a reply and is not shown."""

    chat_template, bos_token_id, eos_token_id = None, None, END
    added_tokens_decoder: dict[int, object] = {}  # noqa: RUF012 - it has none

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) - ord("a") + 2 for letter in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(token - 2 + ord("a")) for token in ids if token >= 2)


CHAT = Chat(Letters(), END)


class Dice(Sampler):
    """A sampler whose completions depend on (seed, stream, member) alone."""

    def __init__(self, max_model_len=inf):
        self.calls, self.max_model_len = [], max_model_len

    def load_weights(self, weights, version):
        """It has none."""

    def sample(self, requests, sampling):
        self.calls.append(requests)
        return [[dice(sampling.seed, one.stream, k, one.max_tokens) for k in range(one.count)] for one in requests]


def dice(seed, stream, member, most):
    rng = Random(derive_seed(seed, "dice", stream, member))
    ids = [rng.randrange(2, 28) for _ in range(rng.randrange(6))] + [END]
    logprobs = tuple(-rng.random() for _ in ids)
    return Completion(tuple(ids[:most]), logprobs[:most], "stop" if len(ids) <= most else "length", 7)


def world(name, limits, context=1000, workers=0, max_failed=1.0, traits=None, threads=1, **params):
    target = f"talking_worlds.{name}"
    hello = Hello(target, target, params, (str(Path(__file__).parent),), 600.0, limits, traits or {})
    launch = Launch({"": hello}, 0, in_processes=workers > 0, threads=threads)
    return EnvPool(launch, max(1, workers), context=context, max_failed=max_failed).start()


def roll(sampler, pool, rendered, requests, chat=CHAT):
    return EpisodeRunner(sampler, chat, SAMPLING, pool).roll(rendered, requests)


def asked(count, groups, limits, seed=0):
    """Problems with their requests."""
    rng = Random(seed)
    prompts = ["".join(rng.choice("abcd") for _ in range(rng.randrange(1, 7))) for _ in range(groups)]
    rendered = [(Problem(str(g), text, "x"), CHAT.prompt(text)) for g, text in enumerate(prompts)]
    return rendered, [
        Request(prompt.ids, count, limits.max_tokens, place) for place, (_, prompt) in enumerate(rendered)
    ]


def literal(problem, stream, member, limits, context):
    """One episode, played alone: everything that a rollout and its row of a batch hold."""
    game: Any = talking_worlds.chatty(problem.answer, Random(derive_seed(SAMPLING.seed, "environment", problem.id)))
    heard, prompt, ids, rows, given, ended = next(game), Letters()(problem.prompt)["input_ids"], [], [], [], ""
    prompt += Letters()(heard or "")["input_ids"]
    while not ended:
        left = limits.max_tokens - sum(len(reply.ids) for _, reply in rows)
        free = context - len(prompt) - len(ids)
        if free < 1:
            ended = "context"
            break
        turn_stream = derive_seed(stream, "turn", member, len(rows)) if rows else stream
        reply = dice(SAMPLING.seed, turn_stream, 0 if rows else member, min(limits.turn_tokens, left, free))
        rows.append((len(ids), reply))
        ids += reply.ids
        try:
            said = game.send(Letters().decode(reply.ids, True))
        except StopIteration as stop:
            given.append(0.0)
            return prompt, ids, rows, given, "done", stop.value
        given.append(said.reward)
        if len(rows) >= limits.max_turns:
            ended = "turns"
        elif left - len(reply.ids) <= 0:
            ended = "tokens"
        else:
            new = Letters()(said.text or "")["input_ids"]
            if context - len(prompt) - len(ids) - len(new) < 1:
                ended = "context"
            else:
                ids += new
    return prompt, ids, rows, given, ended, {"env": 0.0}


@pytest.mark.slow
@given(st.data())
def test_episodes_are_those_of_a_literal_player(data):
    limits = Limits(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8)), 50, data.draw(st.integers(1, 25)))
    count, groups, context = (data.draw(st.integers(*ends)) for ends in ((1, 4), (1, 4), (9, 60)))
    rendered, requests = asked(count, groups, limits, data.draw(st.integers(0, 99)))
    rollouts = roll(Dice(), world("chatty", limits, context), rendered, requests)
    batch = Layout(0, "cpu", limits.max_tokens).batch(
        [r if r.reward is not None else replace(r, reward=0.0) for r in rollouts], 0
    )
    for row, rollout in enumerate(rollouts):
        problem = rendered[rollout.group][0]
        prompt, ids, turns, given, ended, value = literal(problem, rollout.group, row % count, limits, context)
        assert (list(rollout.prompt_ids), list(rollout.completion_ids), rollout.ended) == (prompt, ids, ended)
        assert [turn.reward for turn in rollout.turns][: len(given)] == given
        parts = value if isinstance(value, dict) or value is None else {"env": value}
        total = None if parts is None else sum(parts.values()) + sum(given)
        assert rollout.reward == total
        mask, scores, number, earned = ([0.0] * batch.input_ids.shape[1] for _ in range(4))
        for place, (start, reply) in enumerate(turns):
            for offset, logprob in enumerate(reply.logprobs):
                column = len(prompt) + start + offset
                mask[column], scores[column], number[column] = 1, logprob, place
            earned[len(prompt) + start + len(reply.ids) - 1] = given[place]
        if turns:
            earned[len(prompt) + turns[-1][0] + len(turns[-1][1].ids) - 1] += (total or 0.0) - sum(given)
            assert batch.turn_rewards[row].tolist() == pytest.approx(earned)
        assert batch.response_mask[row].tolist() == mask
        assert batch.sampler_logprobs[row].tolist() == pytest.approx(scores)
        assert batch.turn_ids[row].tolist() == number
        assert int(batch.lengths[row]) == sum(mask)


@pytest.mark.parametrize(("workers", "threads"), [(2, 1), (3, 1), (0, 2), (1, 4), (2, 4)])
def test_shares_of_the_groups_are_played_as_the_whole_is(workers, threads):
    limits = Limits(4, 6, 50, 20)
    rendered, requests = asked(3, 5, limits)
    expected = roll(Dice(), world("chatty", limits), rendered, requests)
    shared = world("chatty", limits, workers=workers, threads=threads)
    assert roll(Dice(), shared, rendered, requests) == expected
    shared.close()


class EachAsItComes(Dice):
    """An engine that takes every request as it comes."""

    async def generate(self, request, sampling):
        self.calls.append([request])
        return [dice(sampling.seed, request.stream, k, request.max_tokens) for k in range(request.count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_engine_that_takes_requests_as_they_come_draws_the_same(workers):
    limits, engine = Limits(4, 6, 50, 20), EachAsItComes()
    rendered, requests = asked(3, 5, limits)
    expected = roll(Dice(), world("chatty", limits), rendered, requests)
    pool = world("chatty", limits, workers=workers)
    assert roll(engine, pool, rendered, requests) == expected
    pool.close()
    assert {len(call) for call in engine.calls} == {1}
    assert len(engine.calls) > len(requests)


def test_with_threads_no_episode_waits_for_the_tool_of_another(tmp_path):
    """The first episode is answered for the first time when the second has ended, after three turns."""
    limits = Limits(4, 6, 50, 60)
    rendered, requests = asked(1, 2, limits)
    shared = world("waits_for_the_other", limits, workers=1, threads=2, file=str(tmp_path / "over"))
    rollouts = roll(Dice(), shared, rendered, requests)
    shared.close()
    assert [(one.ended, len(one.turns)) for one in rollouts] == [("done", 1), ("done", 3)]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_sampler_that_fails_ends_every_share(threads):
    limits = Limits(99, 6, 50, 10**6)
    rendered, requests = asked(1, 2, limits)

    class Broken(Dice):
        def sample(self, requests, sampling):
            super().sample(requests, sampling)
            if len(self.calls) > 3:
                raise EngineError("the sampler is gone")
            return [[dice(0, one.stream, 0, one.max_tokens)] for one in requests]

    shared, sampler = world("endless", limits, workers=2, threads=threads), Broken()
    with pytest.raises(EngineError, match="gone"):
        roll(sampler, shared, rendered, requests)
    assert len(sampler.calls) <= 5
    shared.close()


def test_an_engine_that_takes_less_than_the_model_ends_episodes_at_its_own_limit():
    limits = Limits(99, 6, 50, 500)
    rendered, requests = asked(2, 2, limits)
    rollouts = roll(Dice(max_model_len=30), world("endless", limits, 1000), rendered, requests)
    assert {one.ended for one in rollouts} == {"context"}
    assert {len(one.prompt_ids) + len(one.completion_ids) for one in rollouts} <= set(range(26, 31))
    [short] = roll(Dice(max_model_len=1), world("endless", limits, 1000), *asked(1, 1, limits))
    assert (short.ended, short.completion_ids, short.reward) == ("context", (), 0.0)


def test_without_an_environment_there_is_one_request_for_each_prompt_and_one_turn():
    limits, dice_sampler = Limits(9, 9, 9, 9), Dice()
    rendered, requests = asked(4, 3, limits)
    rollouts = roll(dice_sampler, None, rendered, requests)
    assert dice_sampler.calls == [requests]
    assert [(len(r.turns), r.ended, r.reward, r.status) for r in rollouts] == [(1, "", None, "ok")] * 12


@pytest.mark.parametrize(
    ("limits", "context", "ended"),
    [
        (Limits(3, 6, 50, 500), 1000, "turns"),
        (Limits(99, 6, 50, 20), 1000, "tokens"),
        (Limits(99, 6, 50, 500), 40, "context"),
    ],
)
def test_what_limits_end_is_a_rollout_without_reward_at_its_end(limits, context, ended):
    rendered, requests = asked(2, 2, limits)
    rollouts = roll(Dice(), world("endless", limits, context), rendered, requests)
    assert {(one.ended, one.reward, one.correct, one.status) for one in rollouts} == {(ended, 0.0, False, "ok")}
    assert [one.truncated for one in rollouts] == [ended != "turns"] * 4
    for one in rollouts:
        assert one.turns[-1].end == len(one.completion_ids)  # nothing said that nobody answers
        assert one.length <= limits.max_tokens
        assert len(one.prompt_ids) + len(one.completion_ids) <= context
    if ended == "context":
        assert {len(one.prompt_ids) + len(one.completion_ids) for one in rollouts} & {39, 40}
    scored = roll(Dice(), world("endless", limits, context, traits={"rewards": False}), rendered, requests)
    assert {(one.ended, one.reward, one.status) for one in scored} == {(ended, None, "ok")}


def test_a_long_observation_is_cut_in_its_middle():
    limits, said = Limits(3, 6, 10, 100), "a" * 10 + "b" * 80 + "c" * 10
    rendered, requests = asked(1, 1, limits)

    class Words(Letters):
        """The note that text is left out is one token."""

        def __call__(self, text, add_special_tokens=True):
            head, note, tail = text.partition("\n[... 90 tokens left out ...]\n")
            ids = [super(Words, self).__call__(part)["input_ids"] for part in (head, tail)]
            return {"input_ids": [*ids[0], *([40] if note else []), *ids[1]]}

    [one] = roll(Dice(), world("endless", limits, says=said), rendered, requests, Chat(Words(), END))
    assert list(one.completion_ids[one.turns[0].end : one.turns[1].start]) == [2] * 5 + [40] + [4] * 5


@pytest.mark.parametrize(
    ("family", "what", "ended", "word"),
    [
        (None, "half a surrogate pair", "done", "a\ufffdb"),
        (None, "two halves", "done", "a\U0001f600b"),
        (None, "raises with a surrogate", "error", "ValueError: a\ufffdb"),
        ("gemma 3", "opens with a tool's message", "error", "no tools"),
        (None, "counts turns", "error", "the run reports env/turns itself"),
        (None, "rewards too much", "error", "not between -1e15 and 1e15"),
    ],
)
def test_what_no_tokenizer_template_or_sum_takes_costs_its_episode_at_most(family, what, ended, word):
    """Its text comes as far as it can be told, and every row can be written as UTF-8."""
    limits, model = Limits(5, 2, 200, 100), chat(FAMILIES[family] if family else None)
    problem, prompt = Problem("0", "one?", "x"), model.prompt("one?")

    class Brief(Dice):
        def sample(self, requests, sampling):
            return [[Completion((40, model.end_id), (0.0, 0.0), "stop")] for _ in requests]

    def played(max_failed):
        pool = world("odd", limits, max_failed=max_failed, what=what)
        return roll(Brief(), pool, [(problem, prompt)], [Request(prompt.ids, 1, 100, 0)], model)

    [one] = played(1.0)
    said = model.tokenizer.decode([*one.prompt_ids, *one.completion_ids])
    assert (one.ended, word in said) == (ended, ended == "done")
    f"{said}{one.text}{one.prompt}".encode()
    if ended == "error":
        with pytest.raises(UserCodeError, match=word):
            played(0.0)


def test_a_reply_that_is_cut_gets_its_end_from_the_environment():
    """It stands in the history, and is not trained on."""
    model, limits = chat(FAMILIES["chatml"]), Limits(3, 2, 50, 100)
    problem = Problem("0", "one?", "x")
    rendered, requests = [(problem, model.prompt("one?"))], [Request(model.prompt("one?").ids, 1, 100, 0)]

    class Cut(Dice):
        def sample(self, requests, sampling):
            return [[Completion((40, 41), (0.0, 0.0), "length")] for _ in requests]

    [one] = roll(Cut(), world("endless", limits, says="two?"), rendered, requests, model)
    first, second, _ = one.turns
    said = model.tokenizer.decode(list(one.completion_ids[first.end : second.start]))
    assert said == "<|im_end|>\n<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"
    assert one.length == 6


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "threads"), [(2, 1), (1, 8)])
def test_an_episode_with_a_dead_member_draws_what_it_would(workers, threads):
    limits = Limits(4, 6, 50, 60)
    rendered, requests = asked(8, 6, limits)
    lively = world("dies_once", limits, workers=workers, threads=threads)
    rollouts = roll(Dice(), lively, rendered, requests)
    lively.close()
    dead = [one.group for one in rollouts if one.status == "error"]
    assert dead
    assert len(dead) < len(rollouts)
    for place, one in enumerate(rollouts):
        assert one.completion_ids[: one.turns[0].end] == dice(5, one.group, place % 8, 6).ids
        assert (one.reward is None) is (one.group in dead)


@pytest.mark.parametrize("name", MODELS)
def test_the_sampler_scores_episodes_as_the_trainer_does(name):
    torch.manual_seed(0)
    model, limits = tiny(name), Limits(4, 5, 20, 16)
    rendered, requests = asked(4, 3, limits)
    rollouts = roll(TorchEngine(model, dtype="float32"), world("chatty", limits, 60), rendered, requests)
    assert any(len(one.turns) > 1 and one.turns[1].start > one.turns[0].end for one in rollouts)
    batch = Layout(0, "cpu", 16).batch([replace(one, reward=0.0) for one in rollouts], 0)
    found = TorchPolicy(model, PolicySettings(dtype="float32")).logprobs(batch)["old_logprobs"]
    difference = (found - batch.sampler_logprobs)[batch.response_mask].abs()
    assert len(difference) > 30
    assert difference.max() < 1e-4
