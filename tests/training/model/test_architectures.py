"""The trainer's log-probs are those of the model's own forward, for tiny random models of many architectures.

The model is tested for shortcuts while its weights are those of an untrained model, and compared after they have grown
tenfold: a cap or a leak between rows that was hidden by rounding then shows.
"""

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from retrain.errors import ComponentError
from retrain.training.model.forward import Forward
from retrain.training.model.loading import with_capped_attention
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from tests.training.model.test_forward import own_logprobs
from tests.training.small_models import make_batch, make_objective

pytestmark = pytest.mark.numeric

TABLE = tomli.loads(Path(__file__).with_name("architectures.toml").read_text())
ARCHITECTURES: dict[str, dict[str, Any]] = {**{name: {} for name in TABLE["plain"]}, **TABLE["own"]}


def tiny(name: str) -> Any:
    """Build the model with random weights, as transformers initialises them."""
    kind = CONFIG_MAPPING[name.split(" ")[0]]
    keys = {field.name for field in dataclasses.fields(kind)} | kind.attribute_map.keys()
    changes = {key: value for key, value in TABLE["small"].items() if key in keys} | ARCHITECTURES.get(name, {})
    config = kind(
        **{
            key: None if value == "none" else value
            for key, value in changes.items()
            if (key, value) != ("head_dim", "none")
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return with_capped_attention(AutoModelForCausalLM.from_config(config)).eval()


def grown(name: str, dtype: str, lora: bool) -> TorchPolicy:
    model = tiny(name)
    if lora:
        model.to(getattr(torch, dtype))
    policy = TorchPolicy(model, PolicySettings(dtype=dtype, lora=LoraSettings(r=4) if lora else None))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for key, p in policy.model.named_parameters():
            if "lora_B" in key:
                p.normal_(0, 0.05)
            elif p.ndim > 1 and "norm" not in key:
                p.mul_(10)
    return policy


def errors(name: str, dtype: str, lora: bool) -> tuple[float, float]:
    """Mean absolute errors, in nats a token, of the trainer's log-probs and of the model's own in `dtype`."""
    policy, batch = grown(name, dtype, lora), make_batch(seed=1, longest=14)
    found, scored = policy.logprobs(batch)["old_logprobs"], batch.response_mask
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        rounded = own_logprobs(policy.model, batch)
    exact = own_logprobs(copy.deepcopy(policy.model).float(), batch)
    return float((found - exact)[scored].abs().mean()), float((rounded - exact)[scored].abs().mean())


def _slow(names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in TABLE["fast"] else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _slow(ARCHITECTURES))
def test_logprobs_are_those_of_the_models_own_forward(name):
    for dtype in ("float32", "bfloat16"):
        for lora in (False, True):
            error, rounding = errors(name, dtype, lora)
            # A router that rounds to another expert makes some tokens' errors larger than others'.
            assert error <= 3 * rounding + 2e-5, (dtype, lora)


@pytest.mark.parametrize("name", _slow(TABLE["not_causal"]))
def test_a_model_that_sees_later_tokens_is_refused(name):
    with pytest.raises(ComponentError, match="is not causal: later tokens change the logits of earlier ones"):
        Forward(tiny(name), PolicySettings())


@pytest.mark.parametrize("name", _slow(TABLE["packed"]))
def test_these_architectures_are_packed(name):
    for lora in (False, True):
        assert grown(name, "bfloat16", lora).forward.packed_limit > 0


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("qwen3_moe", "mlp.experts.gate_up_proj, model.layers.*.mlp.experts.down_proj, model.layers.*.mlp.gate.weight"),
        ("mixtral", "model.layers.*.mlp.experts.gate_up_proj"),
        ("deepseek_v3", "model.layers.*.mlp.shared_experts.gate_proj.weight"),
        ("qwen3_next", "model.layers.*.mlp.experts.gate_up_proj"),
        ("llama4_text", "model.layers.*.feed_forward.router.weight (61% of the weights)"),
        ("mamba", "backbone.layers.*.mixer.out_proj.weight"),
        ("nemotron_h", "mixer.out_proj.weight"),
        ("llama", ""),
    ],
)
def test_default_adapters_leave_out_experts_and_routers_and_say_so(name, left_out, caplog):
    with caplog.at_level(logging.WARNING):
        policy = grown(name, "float32", lora=True)
    assert left_out in caplog.text
    assert bool(caplog.text) == bool(left_out)
    assert policy.update(make_batch(), make_objective())["update/changed"] == 1
    assert policy.weights().keys() == tiny(name).state_dict().keys()
