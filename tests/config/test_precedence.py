"""Layers of a configuration: what the higher layer names outranks what the lower one sets."""

import json
import tempfile
from pathlib import Path

import pytest
import tomli

from retrain.campaign.plan.is_campaign import is_campaign
from retrain.campaign.plan.load_campaign import load_campaign
from retrain.config.load import load
from retrain.errors import ConfigError

ROOT = Path(__file__).parents[2]
METHODS = Path(__file__).with_name("methods.jsonl")
"""[shipped file, condition ("" of a run), [kind, name, parameters], ...], a line each."""
BASE = '[task]\nname = "strategy"\n'
PLAIN = BASE + '[algorithm]\nadvantage_mode = "grpo"\ntransform_mode = "none"\n'
MINE = '[algorithm]\nadvantage_mode = "maxrl"\ntransform_mode = "gtpo"\n[gtpo]\nbeta = 0.7\n'


def method(loaded):
    """Advantage, transforms, and the parameters that the layers of these tests set."""
    clip = next(term for term in loaded.all("loss") if term.name == "ppo_clip").params
    gtpo = next((transform.params["beta"] for transform in loaded.all("transform") if transform.name == "gtpo"), None)
    return loaded.method(), clip["eps_high"], gtpo


@pytest.fixture
def condition(tmp_path):
    """The configuration of one condition: base file, campaign file without its head, `--set`."""

    def load_condition(base, entry, grid="", overrides=()):
        (tmp_path / "base.toml").write_text(base)
        (tmp_path / "mine.toml").write_text(MINE)
        axes = f"grid = {{{grid}}}\n" if grid else ""
        text = f'[campaign]\nbase = "base.toml"\nseeds = 3\n{axes}[[campaign.conditions]]\n{entry}\n'
        (tmp_path / "sweep.toml").write_text(text)
        campaign = load_campaign(tmp_path / "sweep.toml", overrides)
        stored = tmp_path / "cell" / "config.toml"
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(campaign.cell_toml(campaign.conditions[0], 0))
        assert method(load(stored)) == method(campaign.configs[0]), "the file of a run trains the same"
        return method(campaign.configs[0])

    return load_condition


LAYERS = tomli.loads(Path(__file__).with_name("layers.toml").read_text())["layers"]


@pytest.mark.parametrize("layers", LAYERS, ids=lambda layers: layers["about"])
def test_a_higher_layer_wins(layers, condition):
    trained, clip, *beta = layers["method"]
    assert condition(layers["base"], layers["condition"]) == (trained, clip, *(beta or [None]))


def test_a_grid_is_above_the_conditions(condition):
    grid = '"algorithm.algorithm_mode" = ["sepa"], "gtpo.beta" = [0.6]'
    assert condition(PLAIN, "optimizer.lr = 1e-3", grid) == ("maxrl, sepa > gtpo, loss ppo_clip", 0.2, 0.6)


@pytest.mark.parametrize("order", [1, -1])
def test_the_command_line_is_above_all_in_any_order(order, condition):
    overrides = ["gtpo.beta=0.8", "algorithm.algorithm_mode=sepa"][::order]
    assert condition(PLAIN, "optimizer.lr = 1e-3", "", overrides) == ("maxrl, sepa > gtpo, loss ppo_clip", 0.2, 0.8)


def test_a_file_outranks_the_one_that_it_extends_and_stands_alone_when_it_is_stored(tmp_path):
    (tmp_path / "root.toml").write_text(PLAIN + "[ppo_clip]\neps_high = 0.4\n[gtpo]\nbeta = 0.9\n")
    (tmp_path / "middle.toml").write_text('extends = "root.toml"\n[algorithm]\nalgorithm_mode = "sepa"\n')
    (tmp_path / "run.toml").write_text('extends = "middle.toml"\n[ppo_clip]\neps_high = 0.5\n')
    loaded = load(tmp_path / "run.toml")
    assert method(loaded) == ("maxrl, sepa > gtpo, loss ppo_clip", 0.5, 0.1)
    assert [key_path for key_path in loaded.preset.outranked] == [
        ("algorithm", "advantage_mode"),
        ("algorithm", "transform_mode"),
        ("gtpo", "beta"),
    ]
    (tmp_path / "stored.toml").write_text(loaded.text)
    assert method(load(tmp_path / "stored.toml")) == method(loaded)


def name(file):
    return file.relative_to(ROOT).as_posix()


def shipped():
    """Configurations and campaigns of the repository."""
    files = [*(ROOT / "configs").rglob("*.toml"), *(ROOT / "campaigns").glob("*.toml")]
    files += [file for file in (ROOT / "benchmarks" / "evidence").glob("*.toml") if is_campaign(file)]
    return sorted(files)


def trained(file, overrides=()):
    """(condition, what it trains with all parameters of advantage, transforms and loss terms) of a file."""
    if is_campaign(file):
        campaign = load_campaign(file, overrides)
        pairs = [
            (condition.label, config) for condition, config in zip(campaign.conditions, campaign.configs, strict=True)
        ]
    else:
        pairs = [("", load(file, overrides))]
    kinds = ("algorithm", "advantage", "transform", "loss")
    return [
        (label, [[kind, part["name"], part["params"]] for kind in kinds for part in parts.get(kind, [])])
        for label, parts in ((label, config.resolved()["components"]) for label, config in pairs)
    ]


ANYWHERE = ("model.path=builtin:tiny", "task.name=strategy", "rollout.engine=auto", "tasks=[]", "eval.sets=[]")
"""Overrides with which a file loads without its model, its data set and a GPU."""


def rows(file, folder):
    """Lines of METHODS for a file, with its own model and data if they are here; `folder` becomes a teacher's."""
    try:
        methods = trained(file)
    except ConfigError:
        text = file.read_text()
        (folder / "config.json").touch()
        expert = [f"expert.path={ROOT / 'configs/data/addition_expert.jsonl'}"] if "[expert]" in text else []
        teacher = [f"teacher.model={folder}"] if "[teacher]" in text else []
        methods = trained(file, (*ANYWHERE, *expert, *teacher))
    return [json.dumps([name(file), label, *parts]) for label, parts in methods]


@pytest.mark.parametrize("file", shipped(), ids=name)
def test_a_shipped_file_trains_what_its_label_says(file, tmp_path):
    """`python -m tests.config.test_precedence` writes the table anew; read the difference before you commit it."""
    assert rows(file, tmp_path) == [row for row in METHODS.read_text().splitlines() if json.loads(row)[0] == name(file)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        METHODS.write_text("".join(f"{row}\n" for file in shipped() for row in rows(file, Path(folder))))
