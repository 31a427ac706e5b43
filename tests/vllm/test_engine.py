"""The vLLM engine against the trainer's model: what it computes, what it refuses, and what it leaves alone."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from retrain.engines.torch_engine import TorchEngine
from retrain.engines.vllm.in_process import VllmEngine
from retrain.errors import EngineError
from retrain.functional.draws import truncate
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from tests.engines.models import Asked, flat, sample
from tests.vllm.models import MODELS, PROMPTS, process_state, tiny, worst_error

pytestmark = pytest.mark.vllm
CPU = torch.device("cpu")
SAMPLING = Asked(group_size=3, max_tokens=12, stop_ids=(2, 5), seed=4)
DENSE = [name for name in MODELS if name != "qwen3-moe"]
ROUNDING = 2e-5


def pytest_generate_tests(metafunc):
    """Every architecture for the tests of log-probs; one for what does not depend on it, on the engine that runs."""
    if "served" in metafunc.fixturenames:
        names = DENSE[:1] if "pair" in metafunc.fixturenames else DENSE
        metafunc.parametrize("served", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def served(request, tmp_path_factory):
    """(model, engine with its weights, what starting it left changed)."""
    model = tiny(request.param)
    before = process_state()
    engine = VllmEngine(model, 0, CPU, tmp_path_factory.mktemp("run"), "float32")
    after = process_state()
    engine.load_weights(model.state_dict(), 7)
    yield model, engine, [name for name in before if before[name] != after[name]]
    engine.close()


@pytest.fixture
def pair(served):
    """(model, engine) for what does not depend on the architecture."""
    model, engine, _ = served
    engine.load_weights(model.state_dict(), 7)
    return model, engine


def moved(model, scale=0.02):
    """Weights some way off the model's, a tied head staying tied."""
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return other


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.2])
def test_logprobs_are_the_trainers_at_the_sampling_temperature(served, temperature):
    model, engine, _ = served
    groups = sample(engine, PROMPTS, replace(SAMPLING, temperature=temperature))
    assert [len(group) for group in groups] == [3] * len(PROMPTS)
    assert worst_error(model, PROMPTS, groups, temperature) < ROUNDING
    if temperature not in (0.0, 1.0):  # the two distributions differ by far more than rounding
        assert worst_error(model, PROMPTS, groups, 1.0) > 0.01


def test_logprobs_are_the_trainers_after_each_of_twenty_syncs(served):
    model, engine, _ = served
    trained = moved(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    for version in range(20):
        trained(torch.randint(0, 90, (4, 32)), labels=torch.randint(0, 90, (4, 32))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.load_weights(trained.state_dict(), version)
        groups = sample(engine, PROMPTS[:2], replace(SAMPLING, group_size=2, seed=version))
        assert worst_error(trained, PROMPTS[:2], groups, 1.0) < ROUNDING
        assert {row.weights_version for row in flat(groups)} == {version}
    engine.load_weights(model.state_dict(), 7)


def test_starting_it_changes_nothing_else_in_the_process(served):
    _, _, changed = served
    assert changed == []


def test_syncing_and_sampling_change_nothing_else_in_the_process(pair):
    model, engine = pair
    before = process_state()
    engine.load_weights(model.state_dict(), 1)
    loaded = process_state()
    # Only in tests beartype checks the lists of `LazyWeights`, whose items it draws with Python's generator.
    assert {name for name, value in loaded.items() if value != before[name]} <= {"python"}
    sample(engine, PROMPTS, SAMPLING)
    assert [name for name, value in process_state().items() if value != loaded[name]] == []


def test_a_completion_ends_like_the_torch_engines(pair):
    _, engine = pair
    rows = flat(sample(engine, PROMPTS * 4, SAMPLING))
    assert {row.finish_reason for row in rows} == {"stop", "length"}
    for row in rows:
        assert len(row.ids) == len(row.logprobs) <= SAMPLING.max_tokens
        assert not set(row.ids[:-1]) & {2, 5}
        assert (row.ids[-1] in {2, 5}) == (row.finish_reason == "stop")
    everything = flat(sample(engine, PROMPTS, replace(SAMPLING, stop_ids=())))
    assert {(len(row.ids), row.finish_reason) for row in everything} == {(12, "length")}


def test_the_models_own_end_of_sequence_does_not_decide(tmp_path, pair):
    model, engine = pair
    rows = flat(sample(engine, PROMPTS * 4, replace(SAMPLING, stop_ids=(), max_tokens=40)))
    assert model.config.eos_token_id is None
    assert {row.finish_reason for row in rows} == {"length"}
    assert any({2, 5} & set(row.ids) for row in rows)


def test_greedy_completions_are_the_torch_engines(pair):
    model, engine = pair
    greedy = replace(SAMPLING, temperature=0.0, top_p=0.5, top_k=3)
    ours = flat(sample(engine, PROMPTS, greedy))
    others = flat(sample(TorchEngine(model, dtype="float32"), PROMPTS, greedy))
    assert [row.ids for row in ours] == [row.ids for row in others]
    for row, other in zip(ours, others, strict=True):
        assert row.logprobs == pytest.approx(other.logprobs, abs=ROUNDING)


@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 8, "top_p": 0.7}])
def test_truncated_logprobs_are_those_of_the_truncated_distribution(pair, truncation):
    model, engine = pair
    sampling = replace(SAMPLING, temperature=0.8, **truncation)
    for prompt, group in zip(PROMPTS, sample(engine, PROMPTS, sampling), strict=True):
        for row in group:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *row.ids]])).logits[0, len(prompt) - 1 : -1] / 0.8
            expected = (
                truncate(logits, sampling.top_k, sampling.top_p)
                .log_softmax(-1)
                .gather(-1, torch.tensor(row.ids)[:, None])[:, 0]
            )
            assert row.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_seed_repeats_another_differs_and_no_two_completions_share_draws(pair):
    _, engine = pair
    sampling = replace(SAMPLING, stop_ids=(), max_tokens=24, group_size=4)
    first = sample(engine, PROMPTS, sampling)
    assert sample(engine, PROMPTS, sampling) == first
    assert sample(engine, PROMPTS, replace(sampling, seed=5)) != first
    same = sample(engine, [PROMPTS[1]] * 4, sampling)
    assert len({row.ids for row in flat(same)}) == 16


def test_tokens_follow_the_models_distribution(pair):
    model, engine = pair
    rows = flat(sample(engine, [PROMPTS[1]], replace(SAMPLING, group_size=4000, max_tokens=1, temperature=0.8)))
    counts = torch.bincount(torch.tensor([row.ids[0] for row in rows]), minlength=96) / 4000
    with torch.no_grad():
        expected = (model(torch.tensor([PROMPTS[1]])).logits[0, -1] / 0.8).softmax(-1)
    assert 0.5 * (counts - expected).abs().sum() < 0.06


def test_keys_of_older_weights_are_never_used(pair, monkeypatch):
    """Without the reset the cached prompt would answer for the old weights."""
    model, engine = pair
    sample(engine, PROMPTS, SAMPLING)
    other = moved(model)
    engine.load_weights(other.state_dict(), 8)
    assert worst_error(other, PROMPTS, sample(engine, PROMPTS, SAMPLING), 1.0) < ROUNDING
    engine.load_weights(model.state_dict(), 9)
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
    assert worst_error(model, PROMPTS, sample(engine, PROMPTS, SAMPLING), 1.0) > 0.01


def test_a_cache_that_cannot_be_emptied_is_an_error(pair, monkeypatch):
    model, engine = pair
    engine.load_weights(model.state_dict(), 8)
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(EngineError, match="prefix cache"):
        sample(engine, PROMPTS, SAMPLING)


def test_named_parameters_of_a_tied_model_are_refused(pair):
    """vLLM would take them, keep the old head, and be 0.1 nats off without a word."""
    model, engine = pair
    with pytest.raises(EngineError, match=r"lm_head\.weight is missing"):
        engine.load_weights(dict(model.named_parameters()), 8)
    assert worst_error(model, PROMPTS, sample(engine, PROMPTS, SAMPLING), 1.0) < ROUNDING
    other = moved(model)
    engine._expected = {name: shape for name, shape in engine._expected.items() if name != "lm_head.weight"}
    try:
        engine.load_weights(dict(other.named_parameters()), 8)
        assert worst_error(other, PROMPTS, sample(engine, PROMPTS, SAMPLING), 1.0) > 0.01
    finally:
        engine._expected["lm_head.weight"] = engine._expected["model.embed_tokens.weight"]


@pytest.mark.parametrize("mistake", ["missing", "unknown", "shape"])
def test_weights_of_another_model_are_refused_and_the_old_ones_stay(pair, mistake):
    model, engine = pair
    weights = dict(moved(model).state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    value = weights.pop(name)
    weights |= {"missing": {}, "unknown": {name: value, "extra": value}, "shape": {name: value[1:]}}[mistake]
    with pytest.raises(EngineError, match="these weights do not fit the sampler"):
        engine.load_weights(weights, 8)
    rows = sample(engine, PROMPTS, SAMPLING)
    assert worst_error(model, PROMPTS, rows, 1.0) < ROUNDING
    assert {row.weights_version for row in flat(rows)} == {7}


def failing(monkeypatch, times):
    """Make vLLM's own loading fail in the middle of a layer, so many times."""
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    load, left = Qwen3ForCausalLM.load_weights, [times]

    def half(self, weights):
        if left[0]:
            left[0] -= 1
            some = [(name, value[:1] if "layers.1.mlp" in name else value) for name, value in weights]
            return load(self, some)
        return load(self, weights)

    monkeypatch.setattr(Qwen3ForCausalLM, "load_weights", half)


def test_after_a_failed_reload_the_engine_is_built_anew(pair, monkeypatch):
    model, engine = pair
    other = moved(model)
    failing(monkeypatch, 1)
    first = engine._llm
    engine.load_weights(other.state_dict(), 8)
    assert engine._llm is not first
    rows = sample(engine, PROMPTS, SAMPLING)
    assert worst_error(other, PROMPTS, rows, 1.0) < ROUNDING
    assert {row.weights_version for row in flat(rows)} == {8}


def test_a_reload_that_fails_again_is_an_error_and_nothing_is_sampled_before_one_succeeds(pair, monkeypatch):
    model, engine = pair
    failing(monkeypatch, 2)
    with pytest.raises(EngineError, match=r"step 8 .*exceeds dimension"):
        engine.load_weights(model.state_dict(), 8)
    with pytest.raises(EngineError, match="no weights"):
        sample(engine, PROMPTS, SAMPLING)
    engine.load_weights(model.state_dict(), 9)
    assert worst_error(model, PROMPTS, sample(engine, PROMPTS, SAMPLING), 1.0) < ROUNDING


def test_what_vllm_would_shorten_or_change_is_refused(pair):
    _, engine = pair
    assert "512 tokens" in engine.describe()
    with pytest.raises(EngineError, match="need 513 positions"):
        sample(engine, [[5] * 501], SAMPLING)
    with pytest.raises(EngineError, match="no tokens"):
        sample(engine, [[]], SAMPLING)
    with pytest.raises(EngineError, match="temperature"):
        sample(engine, PROMPTS, replace(SAMPLING, temperature=0.001))


def test_weights_that_are_not_numbers_are_an_error_and_spoil_nothing_after_them(pair):
    model, engine = pair
    weights = {name: torch.full_like(value, torch.nan) for name, value in model.state_dict().items()}
    engine.load_weights(weights, 8)
    with pytest.raises(EngineError, match="version 8 are not finite"):
        sample(engine, PROMPTS, SAMPLING)
    engine.load_weights(model.state_dict(), 9)
    assert worst_error(model, PROMPTS, sample(engine, PROMPTS, SAMPLING), 1.0) < ROUNDING


class Dozing:
    """Sleep as on a GPU, around a vLLM that has none: what is in memory is lost, and level 1 brings back a copy.

    The copy is of the weights that were in force as vLLM fell asleep. What is loaded before it wakes is overwritten.
    """

    def __init__(self, llm, patch):
        self._reload, self._weights, self._copy = llm.collective_rpc, [], None
        for name, method in {"collective_rpc": self.load, "sleep": self.sleep, "wake_up": self.wake_up}.items():
            patch.setattr(llm, name, method, raising=False)

    def load(self, method, kwargs):
        self._weights = [(name, value.clone()) for name, value in kwargs["weights_iterator"]]
        self._reload(method, kwargs=kwargs)

    def sleep(self, level):
        assert self._copy is None, "asleep already"
        self._copy = self._weights if level == 1 else []
        lost = [(name, torch.full_like(value, torch.nan)) for name, value in self._weights]
        self._reload("reload_weights", kwargs={"weights_iterator": lost})

    def wake_up(self):
        self._reload("reload_weights", kwargs={"weights_iterator": self._copy})
        self._copy = None


def test_weights_in_force_outlast_sleep_and_new_ones_are_loaded_into_an_engine_that_is_awake(pair, monkeypatch):
    model, engine = pair
    Dozing(engine._llm, monkeypatch)
    engine.load_weights(model.state_dict(), 7)
    monkeypatch.setattr(engine, "_sleeps", True)
    for version in (7, 8, 9):
        for _ in range(2):
            rows = sample(engine, PROMPTS, SAMPLING)
            assert worst_error(model, PROMPTS, rows, 1.0) < ROUNDING
            assert {row.weights_version for row in flat(rows)} == {version}
        model = moved(model)
        engine.load_weights(model.state_dict(), version + 1)
    sample(engine, PROMPTS, SAMPLING)
    assert engine._asleep
    engine._wake()


def test_merged_adapters_are_what_is_sampled(pair):
    pytest.importorskip("peft")
    _, engine = pair
    settings = PolicySettings(dtype="float32", lora=LoraSettings(r=4))
    policy = TorchPolicy(tiny("qwen3"), settings)
    with torch.no_grad():
        for name, parameter in policy.adapter.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    engine.load_weights(policy.weights(), 3)
    groups = sample(engine, PROMPTS, SAMPLING)
    assert worst_error(policy.adapter, PROMPTS, groups, 1.0) < ROUNDING
    with policy.adapter.disable_adapter():
        assert worst_error(policy.adapter, PROMPTS, groups, 1.0) > 0.01


def test_two_processes_share_a_model(tmp_path):
    model = tiny("qwen3", num_attention_heads=4, num_key_value_heads=2)
    with closing(VllmEngine(model, 0, CPU, tmp_path, "float32", tensor_parallel_size=2)) as engine:
        for version in range(2):
            with torch.no_grad():
                model.model.norm.weight.mul_(1.1)
            engine.load_weights(model.state_dict(), version)
            assert worst_error(model, PROMPTS, sample(engine, PROMPTS, replace(SAMPLING, stop_ids=())), 1.0) < ROUNDING
