"""No combination of methods is warned of, and corrections are made once."""

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError

TWO_REWARDS = 'rewards=[{name="exact"}, {name="overlong"}]'
TRANSFORMS = "[algorithm] transform_mode"
TWO_UPDATES = "training.minibatches=2"
IPO = 'loss=[{name="ipo"}]'


def chain(*names):
    return f"algorithm.transform_mode=[{', '.join(map(repr, names))}]"


SOUND: list[tuple[str, ...]] = [
    (chain("opsm"), "rollout.engine=torch", 'source=[{name="replay"}]'),
    ('loss=[{name="sapo"}]', TWO_UPDATES),
    ("algorithm.advantage_mode=gdpo", "gdpo.batch_norm=false", TWO_REWARDS, chain("whiten")),
    (chain("opsm", "tis"), "rollout.overlap=1"),
    (chain("opsm"), IPO, "rollout.overlap=1"),
    (chain("turn_returns"), TWO_REWARDS),
    ("algorithm.algorithm_mode=prime", "prime.every=epoch", "training.epochs=2"),
]


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[training]\ngroup_size = 4\n")
    return lambda *overrides: load("run.toml", overrides)


@pytest.mark.parametrize("overrides", SOUND, ids=" ".join)
def test_it_is_in_order(loaded, overrides):
    assert loaded(*overrides).warnings == ()


@pytest.mark.parametrize("correction", ["tis", "mis"])
@pytest.mark.parametrize("loss", ["ipo", "dppo", "topr", "vespo"])
def test_a_loss_that_corrects_for_the_sampler_takes_no_weights_beside_it(loaded, loss, correction):
    with pytest.raises(ConfigError, match="corrects twice") as caught:
        loaded(f'loss=[{{name="{loss}"}}]', chain(correction), "rollout.overlap=1")
    (found,) = caught.value.problems
    assert found.key == TRANSFORMS
    assert f'"{correction}" corrects twice: "{loss}" compares with the sampler' in found.problem
    assert found.fix == f"remove {correction}, or use a loss that reads old_logprobs"


def corrections(loaded, *overrides):
    return [one.name for one in loaded(*overrides).components.objective(exact=False).corrections]


def test_a_correction_that_drops_tokens_stands_beside_one_that_weighs(loaded):
    assert corrections(loaded, chain("opsm", "mis"), "rollout.overlap=1") == ["opsm", "mis"]
    assert corrections(loaded, chain("opsm"), "rollout.overlap=1") == ["opsm", "tis"]
    assert corrections(loaded, chain("opsm"), IPO, "rollout.overlap=1") == ["opsm"]


@pytest.mark.parametrize("later", ["otb", "gtpo_paper", "turn_returns"])
def test_a_transform_that_starts_anew_undoes_no_other(loaded, later):
    with pytest.raises(ConfigError, match=f'"{later}" replaces the advantages, so it would undo whiten'):
        loaded(chain("whiten", later))
