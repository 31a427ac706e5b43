"""What cannot be done beside the trainer is refused before anything loads."""

import pytest

from retrain import registry
from retrain.config.load import load
from retrain.config.rules.credit_rules import check_engine
from retrain.errors import ComponentError, ConfigError

PLUGINS = """
from retrain import filter

def own(ctx):
    return ctx

@filter("remembering")
class Remembering:
    def __call__(self, correct):
        return correct
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "plugins_for_overlap.py").write_text(PLUGINS)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text("[rollout]\noverlap = 1\n")
    return path


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["rollout.engine=transformers"], 'engine "transformers" does not declare'),
        (["reward_pool.workers=0"], "workers = 0"),
        (["rollout.resample=uninformative"], "reads scores of the policy"),
        (["algorithm.filter=plugins_for_overlap.Remembering"], "its state would depend on timing"),
    ],
)
def test_what_would_share_state_with_the_trainer_is_refused(file, options, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        load(file, options)
    assert "[rollout] overlap: " in str(caught.value)
    load(file, [*options, "rollout.overlap=0"])


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["algorithm.transform_mode=mis"],
        ["algorithm.algorithm_mode=plugins_for_overlap.own"],
        ["algorithm.filter=accuracy_band", "rollout.resample=uninformative"],
    ],
)
def test_what_leaves_the_trainer_alone_is_not(file, options):
    loaded = load(file, options)
    assert loaded.config.rollout.overlap == 1
    assert len(loaded.components.objective(exact=False).corrections) == 1


def test_only_engines_that_say_so_sample_beside_the_trainer():
    check_engine(registry.find("engine", "torch"))
    check_engine(registry.find("engine", "vllm-server"))
    for name in ("transformers", "vllm"):
        with pytest.raises(ComponentError, match=name):
            check_engine(registry.find("engine", name))
