import dataclasses
from typing import Any

import pytest
import torch

from retrain.errors import DataError, DivergedError
from retrain.training.model.loading import Loaded, load_model
from retrain.training.tensor_cache import cache_root
from retrain.training.warmup import WarmupSettings, demonstrations, warm_start
from retrain.types import Problem
from tests.make_checkpoint import make_checkpoint

pytestmark = pytest.mark.numeric

WORDS = ["one", "two", "three", "four"]
PROBLEMS = [Problem(id=word, prompt=f"{word}?\n", answer=word, solution=f"so {word}") for word in WORDS]
SETTINGS = WarmupSettings(steps=30, batch_size=4, lr=5e-3, warmup_steps=5)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RETRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def loaded() -> Loaded:
    return load_model("builtin:tiny", problems=PROBLEMS)


class Watch(list):
    def __call__(self, event, details):
        self.append((event, dict(details)))


def answer(loaded: Loaded, prompt: str) -> str:
    ids = loaded.tokenizer(prompt, return_tensors="pt")["input_ids"]
    model: Any = loaded.model
    out = model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=2, pad_token_id=0)
    return str(loaded.tokenizer.decode(out[0, ids.shape[1] :]))


def weights(loaded: Loaded):
    return {name: value.clone() for name, value in loaded.model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_model_imitates_the_solutions_and_ends_after_them(loaded):
    watch = Watch()
    assert not warm_start(loaded, PROBLEMS, SETTINGS, watch)
    assert [answer(loaded, problem.prompt) for problem in PROBLEMS] == [f"so {word}<eos>" for word in WORDS]
    assert [event for event, _ in watch] == ["warmup"] * 30
    first, last = watch[0][1], watch[-1][1]
    assert (last["step"], last["steps"], last["left_s"]) == (30, 30, 0.0)
    assert last["loss"] < 0.1 < first["loss"]
    assert first["left_s"] > 0
    assert not loaded.model.training
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def test_second_run_takes_equal_weights_from_the_cache(loaded):
    settings, watch = dataclasses.replace(SETTINGS, steps=2), Watch()
    warm_start(loaded, PROBLEMS, settings, watch)
    again = load_model("builtin:tiny", problems=PROBLEMS)
    assert warm_start(again, PROBLEMS, settings, watch)
    assert same(weights(loaded), weights(again))
    assert len(watch) == 2


@pytest.mark.parametrize("change", [{"steps": 3}, {"lr": 1e-3}, {"batch_size": 2}, {"seed": 1}])
def test_other_settings_are_computed_anew(loaded, change):
    settings = dataclasses.replace(SETTINGS, steps=2)
    start = weights(loaded)
    warm_start(loaded, PROBLEMS, settings, Watch())
    loaded.model.load_state_dict(start)
    assert not warm_start(loaded, PROBLEMS, dataclasses.replace(settings, **change), Watch())


def test_other_texts_or_weights_are_computed_anew(loaded):
    settings = dataclasses.replace(SETTINGS, steps=2)
    start = weights(loaded)
    warm_start(loaded, PROBLEMS, settings, Watch())
    assert not warm_start(loaded, PROBLEMS, settings, Watch())  # it goes on from the weights it has
    loaded.model.load_state_dict(start)
    assert not warm_start(loaded, PROBLEMS[::-1], settings, Watch())


def test_with_an_empty_cache_the_result_is_the_same_and_the_global_generator_untouched(loaded, tmp_path, monkeypatch):
    settings = dataclasses.replace(SETTINGS, steps=2)
    again = load_model("builtin:tiny", problems=PROBLEMS)
    before = torch.random.get_rng_state()
    assert not warm_start(loaded, PROBLEMS, settings, Watch())
    assert torch.equal(before, torch.random.get_rng_state())
    monkeypatch.setenv("RETRAIN_CACHE", str(tmp_path / "empty"))
    assert not warm_start(again, PROBLEMS, settings, Watch())
    assert same(weights(loaded), weights(again))


def test_a_base_held_in_bfloat16_keeps_its_rotary_frequencies(loaded):
    base = load_model("builtin:tiny", problems=PROBLEMS, dtype="bfloat16")
    warm_start(base, PROBLEMS, dataclasses.replace(SETTINGS, steps=2), Watch())
    assert {p.dtype for p in base.model.parameters()} == {torch.bfloat16}
    kept, expected = dict(base.model.named_buffers()), dict(loaded.model.named_buffers())
    assert same(kept, expected), "float32, as from_pretrained leaves them"


def test_problems_without_solutions_are_refused(loaded):
    with pytest.raises(DataError, match=r"problem 'x' has no solution.*steps = 0"):
        warm_start(loaded, [Problem("x", "1?", "1")], SETTINGS, Watch())


def test_loss_that_is_not_finite_ends_the_run_and_leaves_no_cache_entry(loaded):
    settings = dataclasses.replace(SETTINGS, lr=1e30, warmup_steps=0)
    with pytest.raises(DivergedError, match="step 1 is not finite"):
        warm_start(loaded, PROBLEMS, settings, Watch())
    assert not list(cache_root().rglob("facts.json"))


def test_demonstration_is_prompt_solution_and_end(loaded):
    tokenizer = loaded.tokenizer
    row, *_ = demonstrations(loaded.chat, PROBLEMS)
    assert tokenizer.decode(row.prompt_ids) == "one?\n"
    assert tokenizer.decode(row.ids[len(row.prompt_ids) :]) == "so one<eos>"


def test_chat_model_is_shown_the_template_as_it_will_be_sampled(tmp_path):
    loaded = load_model(str(make_checkpoint(tmp_path / "chat", chat=True)))
    messages = Problem("m", [{"role": "user", "content": "1+1?"}], "2", "2")
    [row] = demonstrations(loaded.chat, [messages])
    [off] = demonstrations(dataclasses.replace(loaded, mode="off").chat, PROBLEMS[:1])
    assert loaded.tokenizer.decode(row.prompt_ids) == "<|user|>1+1?<|end|><|assistant|>"
    assert loaded.tokenizer.decode(row.ids[len(row.prompt_ids) :]) == "2<|end|>"
    assert loaded.tokenizer.decode(off.ids) == "one?\nso one<|end|>"
