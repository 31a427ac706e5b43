"""A run is not resumed with another tokenizer, model configuration or LoRA base than it began with."""

import json

import pytest
from safetensors.torch import load_file, save_file

from retrain.errors import ConfigError
from retrain.run.reopen import reopen
from retrain.run.session import Resume
from tests.make_checkpoint import make_checkpoint

QUIET = ("warmup.steps=0", "eval.problems=0", "model.chat=off")


@pytest.fixture
def begun(stopped, tmp_path):
    """Begin a run on a model of its own, which `begun(*overrides)` returns with the overrides."""

    def go(*overrides):
        base = make_checkpoint(tmp_path / "base", "llama")
        options = (f'model.path="{base}"', *QUIET, *overrides)
        stopped(*options, steps=2)
        return base, options

    return go


def swap_digits(base):
    file = base / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    file.write_text(json.dumps(tokenizer))


def change_config(base):
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-2}))


def change_template(base):
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}!")


def shift_weights(base):
    file = base / "model.safetensors"
    save_file({name: value + 0.05 for name, value in load_file(file).items()}, file, {"format": "pt"})


CHANGES = [
    (swap_digits, "model.tokenizer", ()),
    (change_config, "model.configuration", ()),
    (change_template, "model.tokenizer", ()),
    (shift_weights, "model.weights", ("model.lora={r=2}",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "key", "options"), CHANGES, ids=[one[0].__name__ for one in CHANGES])
def test_another_model_is_refused_unless_it_is_allowed(begun, train, change, key, options):
    base, options = begun(*options)
    change(base)
    with pytest.raises(ConfigError, match=f"{key}.*differs from the run to be resumed") as caught:
        train(*options, resume=Resume("auto"))
    assert [problem.fix for problem in caught.value.problems] == [f"--allow-change {key}, or change it back"]
    said = []
    train(*options, resume=Resume("auto", allow_change=("model",)), observe=lambda event, details: said.append(details))
    assert any(f"resuming with {key}: " in one.get("text", "") for one in said)


@pytest.mark.slow
@pytest.mark.parametrize("ended", [False, True])
def test_an_adapter_that_is_opened_on_another_base_is_named(begun, train, tmp_path, ended):
    base, options = begun("model.lora={r=2}")
    if ended:
        train(*options, resume=Resume("auto"))

    def warnings():
        said = []
        reopen(tmp_path / "runs" / "run", (), lambda event, details: said.append(details["text"]), "weights")
        return [text for text in said if "since the run was trained on it" in text]

    assert not warnings()
    shift_weights(base)
    assert warnings()[0].startswith(f"{base}: weights changed since")


def test_weights_that_are_trained_come_from_the_checkpoint_and_may_change(begun, train):
    base, options = begun()
    shift_weights(base)
    train(*options, resume=Resume("auto"))
