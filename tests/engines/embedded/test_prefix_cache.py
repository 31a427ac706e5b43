"""Keys and values that requests share, within a call and beyond it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain.engines.embedded.decoder import SlotRows
from retrain.engines.embedded.prefix_cache import PrefixCache
from retrain.engines.torch_engine import TorchEngine
from retrain.types import Completion, Request, Sampling
from tests.engines.models import FUSED, MODELS, PROMPTS, flat, tiny

pytestmark = pytest.mark.numeric

PATHS = [(name, False) for name in MODELS] + [(name, True) for name in FUSED]
TURNS = Sampling(stop_ids=(2, 5), seed=4, continued=True)
FIRST = [Request(tuple(prompt), 3, 8, stream) for stream, prompt in enumerate(PROMPTS)]


def next_turn(requests, groups, turn):
    """Most episodes go on: replies of several lengths are answered with 0 to 3 tokens, and budgets differ."""
    rows = [(*r.ids, *row.ids) for r, group in zip(requests, groups, strict=True) for row in group]
    return [
        Request((*ids, *range(6, 6 + n % 4)), 1, 4 + n % 3, 100 * turn + n)
        for n, ids in enumerate(rows)
        if n % 5 != turn
    ]


def played(engine, sampling, first=FIRST, turns=4):
    """Requests and completions of some turns, each of which extends the last."""
    requests, waves = first, []
    for turn in range(turns):
        waves.append((requests, engine.sample(requests, sampling)))
        requests = next_turn(requests, waves[-1][1], turn)
    return waves


@pytest.mark.parametrize(("name", "fused"), PATHS)
def test_turns_are_sampled_as_from_contexts_that_are_computed_again(name, fused):
    waves = [
        played(TorchEngine(tiny(name), dtype="float32", fused=fused), replace(TURNS, continued=continued))
        for continued in (True, False)
    ]
    for (kept_requests, kept), (again_requests, again) in zip(*waves, strict=True):
        assert kept_requests == again_requests
        for one, other in zip(flat(kept), flat(again), strict=True):
            assert one.ids == other.ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=5e-5)


@pytest.fixture
def watched():
    """An engine, and the shapes that it has computed."""
    engine, computed = TorchEngine(tiny("qwen3"), dtype="float32", fused=False), []
    decoder: Any = engine._decoder
    decoder._model.register_forward_pre_hook(
        lambda module, inputs, named: computed.append(named["input_ids"].shape), with_kwargs=True
    )
    return engine, computed


def test_only_what_is_new_is_computed(watched):
    engine, computed = watched
    first = [Request((7, 8, 9) * 6, 2, 3, 0)]
    groups = engine.sample(first, TURNS)
    computed.clear()
    turn = [Request((*first[0].ids, *row.ids, 6, 7), 1, 3, 1 + n) for n, row in enumerate(groups[0])]
    engine.sample(turn, TURNS)
    lengths = [len(row.ids) for row in groups[0]]
    # The last token of a reply was never an input; the longest row pads the others, which compute more again.
    assert computed[0] == (2, 3)
    assert max(lengths) - min(lengths) < 3


ONCE = replace(TURNS, continued=False)


def middles(engine, count=3):
    """Requests to continue every completion of three groups from each of its tokens, as an audit does."""
    whole = [(r.ids, row.ids) for r, group in zip(FIRST, engine.sample(FIRST, ONCE), strict=True) for row in group]
    contexts = dict.fromkeys((*prompt, *ids[:cut]) for prompt, ids in whole for cut in range(len(ids)))
    return [Request(ids, count, 5, stream) for stream, ids in enumerate(contexts)]


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("memory_mb", [1, 2048])
@pytest.mark.parametrize(("name", "fused"), PATHS)
def test_prefixes_of_completions_are_continued_as_if_each_was_computed_alone(name, fused, memory_mb):
    engine = TorchEngine(tiny(name), dtype="float32", fused=fused, memory_mb=memory_mb)
    requests = middles(engine)
    alone = [engine.sample([one], ONCE)[0] for one in requests]
    for one, other in zip(flat(engine.sample(requests, ONCE)), flat(alone), strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=5e-5)


def test_prefixes_of_a_completion_are_computed_once(watched):
    engine, computed = watched
    requests = [Request((7, 8, 9, 6) * 5 + (6,) * cut, 2, 1, cut) for cut in range(4)]
    engine.sample(requests, ONCE)
    assert computed == [(1, 23), (4, 1)], "the longest of them, and the last token of each"


def test_new_weights_take_none_of_the_old_keys():
    old, new = tiny("qwen3"), tiny("qwen3", initializer_range=0.2)
    engine, fresh = TorchEngine(old, dtype="float32"), TorchEngine(new, dtype="float32")
    [(requests, groups)] = played(engine, TURNS, turns=1)
    engine.load_weights(new.state_dict(), 0)
    again = next_turn(requests, groups, 0)
    assert engine.sample(again, TURNS) == fresh.sample(again, TURNS)


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


def part(rows):
    return SlotRows([torch.zeros(len(rows), 1, 1, 4)], [torch.zeros(len(rows), 1, 4, 1)], rows, [0] * len(rows))


def left(kept, contexts, sampling=TURNS):
    """A call that samples one token of each of these contexts; kept are the contexts."""
    requests = [Request(ids, 1, 1, 0) for ids in contexts]
    kept.begin(sampling)
    kept.add([part([*range(len(contexts))])], requests, [[Completion((9,), (0.0,), "length")]] * len(contexts))
    kept.end([])


@given(st.lists(IDS, min_size=1, max_size=8), IDS)
def test_what_shares_most_is_found(contexts, ids):
    kept = PrefixCache(10**6)
    left(kept, contexts)
    shared = [max(n for n in range(len(ids) + 1) if one[:n] == ids[:n] and n <= len(one)) for one in contexts]
    found = kept.find(Request(ids, 1, 1, 0))
    assert (found is None) == (2 * max(shared) < len(ids))
    if found is not None:
        assert found[1] == max(shared)
        assert contexts[found[0].row][: found[1]] == ids[: found[1]]


def test_a_call_leaves_no_more_than_its_budget():
    whole, small = PrefixCache(32), PrefixCache(31)  # one row of four columns, key and value, in float32
    for kept in (whole, small):
        left(kept, [(1, 2)])
    assert whole.find(Request((1, 2, 3), 1, 1, 0)) is not None
    assert small.find(Request((1, 2, 3), 1, 1, 0)) is None


def test_a_call_takes_the_place_of_those_that_it_extends_and_of_no_others():
    kept = PrefixCache(10**6)
    left(kept, [(1, 2)])
    left(kept, [(3, 4)])
    request = Request((1, 2, 7), 1, 1, 0)
    found = kept.find(request)
    assert found
    kept.begin(TURNS)
    kept.add([part([0])], [request], [[Completion((8,), (0.0,), "length")]])
    kept.end([found[0]])
    assert kept.find(Request((1, 2, 7, 8), 1, 1, 0))[1] == 3
    assert kept.find(Request((3, 4, 5), 1, 1, 0)) is not None
    assert len(kept._calls) == 2
