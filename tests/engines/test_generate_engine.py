"""transformers' generate behind the same contract."""

from dataclasses import replace

import pytest

from retrain.engines.generate_engine import GenerateEngine
from retrain.engines.torch_engine import TorchEngine
from retrain.errors import EngineError
from tests.engines.models import PROMPTS, Asked, flat, sample, scored, tiny

pytestmark = pytest.mark.numeric

SAMPLING = Asked(group_size=3, max_tokens=12, stop_ids=(2, 5), seed=4)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.2])
def test_logprobs_are_the_trainers(name, temperature):
    model = tiny(name)
    groups = sample(GenerateEngine(model, max_rows=7), PROMPTS, replace(SAMPLING, temperature=temperature))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len(group) == 3
        for row in group:
            assert scored(model, prompt, row.ids, temperature).tolist() == pytest.approx(row.logprobs, abs=1e-4)
            assert (row.finish_reason == "stop") == (row.ids[-1] in {2, 5})
            assert not set(row.ids[:-1]) & {2, 5}


def test_the_models_generation_config_decides_nothing():
    model = tiny("qwen3")
    plain = sample(GenerateEngine(model), PROMPTS, replace(SAMPLING, stop_ids=()))
    model.generation_config.update(eos_token_id=[3, 4, 6], top_k=1, temperature=0.1, repetition_penalty=3.0)
    model.config.eos_token_id = 7
    assert sample(GenerateEngine(model), PROMPTS, replace(SAMPLING, stop_ids=())) == plain
    assert {len(row.ids) for row in flat(plain)} == {12}


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}])
def test_both_engines_agree_where_nothing_is_random(changes):
    model = tiny("qwen2")
    sampling = replace(SAMPLING, **changes)
    ours = flat(sample(TorchEngine(model, dtype="float32"), PROMPTS, sampling))
    theirs = flat(sample(GenerateEngine(model), PROMPTS, sampling))
    for one, other in zip(ours, theirs, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_weights_are_loaded_by_name_and_requests_checked():
    model, other = tiny("qwen3"), tiny("qwen3", initializer_range=0.1)
    engine = GenerateEngine(model)
    assert "Qwen3ForCausalLM" in engine.describe()
    engine.load_weights(other.state_dict(), 2)
    row = sample(engine, [[3, 4]], SAMPLING)[0][0]
    assert row.weights_version == 2
    assert scored(other, [3, 4], row.ids, 1.0).tolist() == pytest.approx(row.logprobs, abs=1e-4)
    with pytest.raises(EngineError, match="is missing"):
        engine.load_weights({}, 3)
    with pytest.raises(EngineError, match="positions"):
        sample(engine, [[3] * 60], SAMPLING)
