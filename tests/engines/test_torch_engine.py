"""The embedded engine against the model's own forward."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrain.engines.embedded.decoder import Slots
from retrain.engines.embedded.static import StaticSlots
from retrain.engines.generate_engine import GenerateEngine
from retrain.engines.torch_engine import TorchEngine
from retrain.errors import EngineError
from retrain.registry import ParameterError, find
from tests.engines.models import EVEN, FUSED, MODELS, PROMPTS, VOCABULARY, Asked, flat, sample, scored, tiny

pytestmark = pytest.mark.numeric

SAMPLING = Asked(group_size=3, max_tokens=12, stop_ids=(2, 5), seed=4)
PATHS = [(name, False) for name in MODELS] + [(name, True) for name in FUSED]


def worst_error(engine, model, prompts, sampling):
    groups = sample(engine, prompts, sampling)
    assert [len(group) for group in groups] == [sampling.group_size] * len(prompts)
    return max(
        (scored(model, prompt, row.ids, sampling.temperature) - torch.tensor(row.logprobs)).abs().max().item()
        for prompt, group in zip(prompts, groups, strict=True)
        for row in group
    )


@pytest.mark.parametrize(("name", "fused"), PATHS)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.2])
def test_logprobs_are_the_trainers(name, fused, temperature):
    model = tiny(name)
    engine = TorchEngine(model, dtype="float32", fused=fused)
    assert ("fused" in engine.describe()) == fused
    for prompts in (PROMPTS, EVEN):
        assert worst_error(engine, model, prompts, replace(SAMPLING, temperature=temperature)) < 1e-4


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])
@pytest.mark.parametrize("fused", [True, False])
def test_bfloat16_products_stay_within_tolerance(name, fused):
    model = tiny(name, initializer_range=0.1)
    engine = TorchEngine(model, dtype="bfloat16", fused=fused)
    error = worst_error(engine, model, PROMPTS, SAMPLING)
    assert 1e-5 < error < engine.tolerance


def test_a_large_head_multiplies_in_bfloat16(monkeypatch):
    model = tiny("qwen3", initializer_range=0.1)
    errors = []
    for size in (1 << 20, 0):
        monkeypatch.setattr("retrain.engines.embedded.fused._SMALL", size)
        engine = TorchEngine(model, dtype="bfloat16")
        errors.append(worst_error(engine, model, PROMPTS, SAMPLING))
        assert 1e-5 < errors[-1] < engine.tolerance
        exact = TorchEngine(model, dtype="float32")
        assert worst_error(exact, model, PROMPTS, SAMPLING) < 1e-4
    assert errors[0] != errors[1]


def test_a_completion_ends_with_its_first_stop_id_or_at_the_limit():
    rows = flat(sample(TorchEngine(tiny("qwen3")), PROMPTS * 4, SAMPLING))
    assert {row.finish_reason for row in rows} == {"stop", "length"}
    for row in rows:
        assert len(row.ids) == len(row.logprobs)
        assert not set(row.ids[:-1]) & {2, 5}
        if row.finish_reason == "stop":
            assert row.ids[-1] in {2, 5}
        else:
            assert row.ids[-1] not in {2, 5}
            assert len(row.ids) == SAMPLING.max_tokens


@pytest.mark.parametrize("fused", [True, False])
def test_compaction_does_not_change_what_is_sampled(fused, monkeypatch):
    model = tiny("qwen3")
    engine = TorchEngine(model, dtype="float32", fused=fused)
    prompts = PROMPTS * 5
    compacted = sample(engine, prompts, SAMPLING)
    monkeypatch.setattr(Slots, "compact_below", -1.0)
    whole = sample(engine, prompts, SAMPLING)
    assert [row.ids for row in flat(compacted)] == [row.ids for row in flat(whole)]


class Steps(TorchDispatchMode):
    """The operations of decode steps, each with its shapes and numbers, in the order of the steps."""

    def __init__(self, decoder):
        super().__init__()
        self.steps, self.open = [], False
        compute = decoder._next

        def recorded(tokens, positions):
            self.steps.append([])
            self.open = True
            logits = compute(tokens, positions)
            self.open = False
            return logits

        decoder._next = recorded

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.open:
            leaves = tree_leaves((args, kwargs))
            facts = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in leaves]
            self.steps[-1].append((str(func), facts))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("prompts", [PROMPTS, EVEN], ids=["padded", "even"])
def test_steps_that_a_graph_can_replay_sample_the_same(name, prompts, monkeypatch):
    """A graph repeats operations with their shapes and numbers, so that only contents of tensors may differ."""
    monkeypatch.setattr("retrain.engines.embedded.static._COLUMNS", 8)
    model, found = tiny(name), []
    for kind in (StaticSlots, Slots):
        engine = TorchEngine(model, dtype="float32")
        engine._decoder.kind = kind
        with Steps(engine._decoder) as recorded:
            rows = flat(sample(engine, prompts * 4, SAMPLING))
        found.append((rows, recorded.steps))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    static, growing = (steps for _, steps in found)
    assert len(static) == len(growing) > 8
    alike = [one == other for one, other in pairwise(static)]
    assert alike.count(False) <= 4  # another number of rows, or another block of columns
    assert not any(one == other for one, other in pairwise(growing))
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & {
        name for step in static for name, _ in step
    }


def test_chunks_do_not_change_what_is_sampled(monkeypatch):
    engine = TorchEngine(tiny("qwen3"), dtype="float32")
    at_once = sample(engine, PROMPTS * 3, SAMPLING)
    monkeypatch.setattr(engine, "_budget", 1)
    one_by_one = sample(engine, PROMPTS * 3, SAMPLING)
    assert [row.ids for row in flat(at_once)] == [row.ids for row in flat(one_by_one)]


@pytest.mark.parametrize("made", [TorchEngine, GenerateEngine])
def test_a_seed_repeats_and_another_differs_and_the_global_state_stays(made):
    engine = made(tiny("qwen3"))
    before = torch.get_rng_state()
    first = sample(engine, PROMPTS, SAMPLING)
    assert sample(engine, PROMPTS, SAMPLING) == first
    assert sample(engine, PROMPTS, replace(SAMPLING, seed=5)) != first
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_follow_the_models_distribution():
    model = tiny("qwen3")
    rows = sample(TorchEngine(model, dtype="float32"), [[7, 8]], Asked(group_size=4000, max_tokens=1, temperature=1.2))[
        0
    ]
    counts = torch.bincount(torch.tensor([row.ids[0] for row in rows]), minlength=VOCABULARY)
    with torch.no_grad():
        expected = (model(torch.tensor([[7, 8]])).logits[0, -1] / 1.2).softmax(-1)
    deviation = (counts / 4000 - expected).abs() / (expected * (1 - expected) / 4000).sqrt()
    assert deviation[expected > 1e-3].max() < 4.5


def test_greedy_is_the_models_argmax_and_all_of_a_group_agree():
    model = tiny("mistral")
    group = sample(TorchEngine(model, dtype="float32"), [[7, 8]], Asked(group_size=2, max_tokens=6, temperature=0.0))[0]
    ids = [7, 8]
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert [row.ids for row in group] == [tuple(ids[2:])] * 2


@pytest.mark.parametrize("fused", [True, False])
def test_the_trainers_updates_wait_for_load_weights(fused):
    model = tiny("qwen3")
    engine = TorchEngine(model, dtype="float32", fused=fused)
    before = sample(engine, PROMPTS, SAMPLING)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert sample(engine, PROMPTS, SAMPLING) == before
    engine.load_weights(model.state_dict(), 7)
    assert worst_error(engine, model, PROMPTS, SAMPLING) < 1e-4
    assert {row.weights_version for row in flat(sample(engine, PROMPTS, SAMPLING))} == {7}


def test_the_trainers_model_is_left_as_it_was():
    model = tiny("gpt2")
    implementation, state = model.config._attn_implementation, {k: v.clone() for k, v in model.state_dict().items()}
    sample(TorchEngine(model), PROMPTS, SAMPLING)
    assert model.config._attn_implementation == implementation
    assert model.config.pad_token_id == 0
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_wrong_weights_are_refused_whole(fused):
    model = tiny("llama")
    engine = TorchEngine(model, dtype="float32", fused=fused)
    before = sample(engine, PROMPTS, SAMPLING)
    weights = {name: value * 2 for name, value in model.state_dict().items()}
    weights["lora"] = weights.pop("lm_head.weight")
    weights["model.norm.weight"] = torch.ones(3)
    with pytest.raises(EngineError, match=r"lm_head.weight is missing; lora is unknown; .* shape \[3\], not \[32\]"):
        engine.load_weights(weights, 1)
    assert sample(engine, PROMPTS, SAMPLING) == before


def test_weights_that_are_not_finite_are_reported():
    model = tiny("qwen3")
    engine = TorchEngine(model)
    engine.load_weights({name: value * float("nan") for name, value in model.state_dict().items()}, 3)
    with pytest.raises(EngineError, match="version 3 are not finite"):
        sample(engine, PROMPTS, SAMPLING)


def test_requests_beyond_the_model_are_refused():
    engine = TorchEngine(tiny("gpt2"))
    with pytest.raises(EngineError, match="7 tokens and max_tokens = 58 need 65 positions, but the model has 64"):
        sample(engine, PROMPTS, replace(SAMPLING, max_tokens=58))
    sample(engine, PROMPTS, replace(SAMPLING, max_tokens=57, stop_ids=()))
    with pytest.raises(EngineError, match="no tokens"):
        sample(engine, [[1], []], SAMPLING)
    assert sample(engine, [], SAMPLING) == []


def test_adapters_are_sampled_merged_and_only_after_loading():
    import peft

    plain = tiny("qwen3")
    adapted = peft.get_peft_model(tiny("qwen3"), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for fused in (True, False):
        engine = TorchEngine(adapted, dtype="float32", fused=fused)
        with pytest.raises(EngineError, match="no weights"):
            sample(engine, PROMPTS, SAMPLING)
        engine.load_weights(plain.state_dict(), 1)
        assert worst_error(engine, plain, PROMPTS, SAMPLING) < 1e-4


def test_built_by_name_with_a_checked_table():
    component = find("engine", "torch")
    engine = component.bind({"dtype": "float32", "memory_mb": 1}).build({"model": tiny("gpt2")})
    assert engine.describe() == "torch engine, general decoder, float32 products on cpu"
    with pytest.raises(ParameterError, match="memory_mb"):
        component.bind({"memory_mb": 0})
