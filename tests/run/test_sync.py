"""The sampler gets the policy's weights in one place: whole, or a frozen base and then adapters."""

from contextlib import closing

import pytest
import torch

from retrain.engines.torch_engine import TorchEngine
from retrain.errors import ComponentError
from retrain.run.evaluate import measure
from retrain.run.reopen import reopen
from tests.small_runs import rows

pytestmark = pytest.mark.numeric

LORA = ("model.dtype=float32", "model.lora={r=4}", "training.lr=1e-2", "rollout.parity_every=1")

ENGINE = '''
from safetensors.torch import load_file

from retrain.engines.torch_engine import TorchEngine

CALLS = []


class Apart(TorchEngine):
    """Adds what is in an adapter's file to the base itself."""

    takes_adapters = True

    def __init__(self, model):
        if not hasattr(model, "peft_config"):
            self.takes_adapters = False
        self.scale = 32.0 / 4
        super().__init__(model, dtype="float32")

    def load_weights(self, weights, version):
        CALLS.append(("base" if self.takes_adapters else "whole", version))
        self.base = {name: value.clone() for name, value in weights.items()}
        if not self.takes_adapters:
            super().load_weights(weights, version)

    def load_adapter(self, folder, version):
        CALLS.append(("adapter", version))
        low = load_file(folder / "adapter_model.safetensors")
        weights = dict(self.base)
        for name, b in low.items():
            if ".lora_B." in name:
                key = name.removeprefix("base_model.model.").replace(".lora_B.weight", ".weight")
                weights[key] = weights[key] + self.scale * b @ low[name.replace("lora_B", "lora_A")]
        super().load_weights(weights, version)
'''


@pytest.fixture
def apart(tmp_path, monkeypatch):
    """The module of an engine that takes adapters, imported anew."""
    (tmp_path / "apart_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    import apart_engine

    return apart_engine


@pytest.mark.slow
def test_an_engine_that_takes_adapters_gets_the_base_once_and_then_adapters(train, apart):
    run = train(*LORA, "rollout.engine=apart_engine.Apart")
    expected = [("base", 0), *(("adapter", version) for version in range(5))]
    assert expected == apart.CALLS
    assert all(row["parity/logp_diff_max"] < 1e-4 for row in rows(run / "metrics.jsonl"))


@pytest.mark.slow
def test_a_run_opened_again_gives_adapters_from_a_checkpoint_and_from_its_final_model(train, apart):
    run = train(*LORA, "rollout.engine=apart_engine.Apart", "eval.every=4")
    apart.CALLS.clear()
    last = rows(run / "eval.jsonl")[-1]
    for target, calls in (
        (run / "checkpoints" / "step-000004", [("base", 4), ("adapter", 4)]),
        (run, [("base", 0), ("adapter", 0)]),
    ):
        with closing(reopen(target, (), lambda event, details: None, trust=True)) as parts:
            assert measure(parts, 4).row["accuracy"] == last["accuracy"]
        assert calls == apart.CALLS
        apart.CALLS.clear()


@pytest.mark.slow
def test_every_other_engine_gets_full_weights_that_are_merged_as_they_are_read(train, monkeypatch):
    loaded = []
    real = TorchEngine.load_weights

    def records(self, weights, version):
        loaded.append((version, {name: value.clone() for name, value in weights.items()}))
        real(self, weights, version)

    monkeypatch.setattr(TorchEngine, "load_weights", records)
    run = train(*LORA)
    assert [version for version, _ in loaded] == [0, 1, 2, 3, 4]
    moved = {name for name, value in loaded[0][1].items() if not torch.equal(value, loaded[4][1][name])}
    assert moved
    assert all("proj" in name for name in moved)
    assert not (run / "adapter").exists()


def test_adapters_that_there_are_none_of_end_the_run(train, apart, monkeypatch):
    monkeypatch.setattr(apart.Apart, "__init__", lambda self, model: TorchEngine.__init__(self, model))
    with pytest.raises(ComponentError, match=r"trains all weights; set \[model\] lora"):
        train("rollout.engine=apart_engine.Apart")
