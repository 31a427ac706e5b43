"""Combinations that cannot do what they are for are refused before anything loads; odd ones are warned of."""

import re

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError

DCA = "algorithm.advantage_mode=dca"
PRIME = 'algorithm.transform_mode=["process_rloo"]'
STATEFUL = """
from retrain import transform

class Twice:
    def __call__(self, advantages):
        return advantages

@transform("summed")
def summed(advantages, rewards):
    return advantages + rewards[:, None]
"""
CORRECTIONS = """
from retrain import transform

@transform("remembering", correction=True)
class Remembering:
    def __call__(self, advantages, old_logprobs):
        return advantages

@transform("elsewhere", correction=True, writes="uncertainty")
def elsewhere(uncertainty, old_logprobs):
    return uncertainty

@transform("trained", correction=True)
def trained(advantages, logprobs):
    return advantages
"""
INVALID: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("a pooling that nobody reads", ('algorithm.transform_mode=["sepa"]',),
     ("[algorithm] transform_mode", '"sepa" changes uncertainty', "put it before a stage that reads uncertainty")),
    ("a pooling behind its reader", ('algorithm.transform_mode=["gtpo", "sepa", "hicra"]',),
     ("[algorithm] transform_mode", "no later stage reads it", "or remove it")),
    ("two corrections of the sampler", ('algorithm.transform_mode=["tis", "mis"]',),
     ("[algorithm] transform_mode", "tis and mis correct for the sampler", "keep one")),
    ("a correction with a memory", ("algorithm.transform_mode=corrections.Remembering",),
     ("[algorithm] transform_mode", "correction=True but is not a function of columns", "remove correction=True")),
    ("a correction of something else", ('algorithm.transform_mode=["corrections.elsewhere", "gtpo"]',),
     ("[algorithm] transform_mode", "changes uncertainty, not advantages", "remove correction=True")),
    ("a stateful stage twice", ('algorithm.transform_mode=["state.Twice", "state.Twice"]',),
     ("[algorithm] transform_mode", 'with state have the name "state.Twice"', "use it once")),
    ("a signal as a stage", ('algorithm.transform_mode=["process_rewards"]',),
     ("[algorithm] transform_mode[0]", 'no transform named "process_rewards"', 'did you mean "process_rloo"?')),
    ("an empty band", ("algorithm.filter=accuracy_band", "accuracy_band.low=0.8", "accuracy_band.high=0.2"),
     ("[algorithm] filter", "between low = 0.8 and high = 0.2", "widen [accuracy_band] low and high")),
    ("process rewards that stay 0", (PRIME, "prime.update=none"),
     ("[prime] update", "is not trained gives reward 0", "name a trained model in [prime] path")),
    ("a process reward model beside adapters", (PRIME, "model.lora={r = 2}", "prime.path=org/prm"),
     ("[prime] path", "an adapter on the policy's base", "train without LoRA")),
    ("a process reward model from nowhere", (PRIME, 'prime.path="./nowhere"'),
     ("[prime] path", 'there is no directory "./nowhere"', "or a name on the hub")),
]  # fmt: skip
"""(what, overrides, the parts of the message: key, reason, fix)"""

SOUND = [
    ('loss=[{name="cispo"}, {name="kl", weight=0.1}]', "training.epochs=2"),
    (PRIME, "prime.update=none", "prime.reference=policy"),
    (PRIME, "prime.update=none", "prime.path=org/prm"),
    (PRIME, "prime.delay=199"),
    (DCA, 'rewards=[{name="exact"}, {name="overlong"}]', "algorithm.transform_mode=state.summed"),
    (
        "algorithm.filter=accuracy_band",
        "accuracy_band.low=0.5",
        "accuracy_band.high=0.5",
        "accuracy_band.inclusive=true",
    ),
    ("algorithm.filter=accuracy_band", "training.group_size=2"),
]


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "expert.jsonl").write_text('{"prompt": "1+1?", "completion": "so 2"}\n')
    (tmp_path / "state.py").write_text(STATEFUL)
    (tmp_path / "corrections.py").write_text(CORRECTIONS)
    (tmp_path / "missing.py").write_text(
        "from retrain import transform\n@transform('of_nobody')\ndef stage(proces_rewards):\n    return 0\n"
    )
    (tmp_path / "prm").mkdir()
    (tmp_path / "prm" / "config.json").touch()
    (tmp_path / "run.toml").write_text("")
    return lambda *overrides: load("run.toml", overrides)


@pytest.mark.parametrize(("what", "overrides", "says"), INVALID, ids=[row[0] for row in INVALID])
def test_it_is_refused_with_key_and_fix(loaded, what, overrides, says):
    with pytest.raises(ConfigError, match=re.escape(says[0])) as caught:
        loaded(*overrides)
    assert caught.value.exit_code == 2
    (found,) = caught.value.problems
    assert found.key == says[0]
    assert all(part in str(found) for part in says), found
    assert found.fix


@pytest.mark.parametrize("overrides", SOUND, ids=" ".join)
def test_it_is_in_order(loaded, overrides):
    assert loaded(*overrides).warnings == ()
