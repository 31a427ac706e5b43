"""The reference signal: frozen, light to import, and proven unchanged on resume."""

import subprocess
import sys

import pytest
import torch

from retrain.errors import StorageError
from retrain.registry import find
from retrain.training.policy import TorchPolicy
from retrain.training.settings import PolicySettings
from tests.training.model.test_forward import own_logprobs
from tests.training.small_models import make_batch, make_model, make_objective

pytestmark = pytest.mark.numeric


def build(seed=0):
    policy = TorchPolicy(make_model(seed=seed), PolicySettings(lr=1e-2))
    return policy, find("signal", "ref_logprobs").bind({}).build({"policy": policy})


def call(reference, batch):
    return reference(*(batch.column(name) for name in find("signal", "ref_logprobs").reads))


def test_scores_stay_those_of_the_initial_weights():
    (policy, reference), batch = build(), make_batch()
    before = call(reference, batch)
    torch.testing.assert_close(before, own_logprobs(make_model(), batch), rtol=1e-4, atol=1e-5)
    policy.update(batch, make_objective())
    assert torch.equal(call(reference, batch), before)
    assert reference.before(batch) == reference.after(batch) == {}


def test_resume_with_another_initial_model_is_refused():
    (_, one), (_, same), (_, other) = build(), build(), build(seed=1)
    same.load_state_dict(one.state_dict())
    with pytest.raises(StorageError, match="initial model changed"):
        other.load_state_dict(one.state_dict())


def test_kl_to_the_reference_starts_at_zero_and_grows():
    (policy, reference), batch = build(), make_batch()
    objective = make_objective("ppo_clip", "kl")
    kl = [policy.update(batch.replace(ref_logprobs=call(reference, batch)), objective)["loss/kl"] for _ in range(3)]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[2] > 1e-4


def test_registration_does_not_import_torch():
    modules = "retrain.training.reference, retrain.training.prm"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
