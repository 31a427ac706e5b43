"""Layers of a configuration: what the higher layer names outranks what the lower one sets."""

import json
import tempfile
from pathlib import Path

import pytest

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
    bound = loaded.components.bound
    clip = next(term for term in bound["loss"] if term.name == "ppo_clip").params
    gtpo = next(
        (transform.params["beta"] for transform in bound.get("transform", ()) if transform.name == "gtpo"), None
    )
    return loaded.components.method(), clip["eps_high"], gtpo


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


LAYERS = [
    ("defaults", BASE, "optimizer.lr = 1e-3", ("grpo, loss ppo_clip", 0.28, None)),
    (
        "base's preset",
        BASE + '[algorithm]\nalgorithm_mode = "maxrl"\n',
        "optimizer.lr = 1e-3",
        ("maxrl, loss ppo_clip", 0.2, None),
    ),
    (
        "base's keys",
        BASE + '[algorithm]\nalgorithm_mode = "maxrl"\nadvantage_mode = "rloo"\n[ppo_clip]\neps_high = 0.3\n',
        "optimizer.lr = 1e-3",
        ("rloo, loss ppo_clip", 0.3, None),
    ),
    (
        "condition's preset",
        PLAIN + "[ppo_clip]\neps_high = 0.3\n",
        'algorithm_mode = "sepa"',
        ("maxrl, sepa > gtpo, loss ppo_clip", 0.2, 0.1),
    ),
    ("of maxrl", PLAIN, 'algorithm_mode = "maxrl"', ("maxrl, loss ppo_clip", 0.2, None)),
    ("of hicra", PLAIN, 'algorithm_mode = "hicra"', ("grpo, hicra, loss ppo_clip", 0.2, None)),
    (
        "of a table",
        PLAIN + "[gtpo]\nbeta = 0.9\n",
        'algorithm_mode = "sepa"',
        ("maxrl, sepa > gtpo, loss ppo_clip", 0.2, 0.1),
    ),
    (
        "of a table alone",
        BASE + "[gtpo]\nbeta = 0.9\n",
        'algorithm_mode = "sepa"',
        ("maxrl, sepa > gtpo, loss ppo_clip", 0.2, 0.1),
    ),
    ("of the user", PLAIN, 'algorithm_mode = "mine.toml"', ("maxrl, gtpo, loss ppo_clip", 0.28, 0.7)),
    (
        "instead of the base's preset",
        BASE + '[algorithm]\nalgorithm_mode = "dapo"\n',
        'algorithm_mode = "maxrl"',
        ("maxrl, loss ppo_clip", 0.2, None),
    ),
    (
        "instead of the base's losses",
        PLAIN + '[[loss]]\nname = "cispo"\n[[loss]]\nname = "ppo_clip"\nweight = 0.5\n',
        'algorithm_mode = "maxrl"',
        ("maxrl, loss ppo_clip", 0.2, None),
    ),
    (
        "condition's keys",
        PLAIN,
        'algorithm_mode = "sepa"\nadvantage_mode = "rloo"\n"gtpo.beta" = 0.4\n"ppo_clip.eps_high" = 0.5',
        ("rloo, sepa > gtpo, loss ppo_clip", 0.5, 0.4),
    ),
    (
        "advantage over an algorithm",
        BASE + '[algorithm]\nalgorithm_mode = "oracle"\n',
        'advantage_mode = "maxrl"',
        ("maxrl, loss ppo_clip", 0.28, None),
    ),
    ("an algorithm over the advantage", PLAIN, 'algorithm_mode = "oracle"', ("oracle, loss ppo_clip", 0.28, None)),
]


@pytest.mark.parametrize(("base", "entry", "expected"), [row[1:] for row in LAYERS], ids=[row[0] for row in LAYERS])
def test_a_higher_layer_wins(base, entry, expected, condition):
    assert condition(base, entry) == expected


def test_a_grid_is_above_the_conditions(condition):
    grid = '"algorithm.algorithm_mode" = ["sepa"], "gtpo.beta" = [0.6]'
    assert condition(PLAIN, "optimizer.lr = 1e-3", grid) == ("maxrl, sepa > gtpo, loss ppo_clip", 0.2, 0.6)


@pytest.mark.parametrize("order", [1, -1])
def test_the_command_line_is_above_all_in_any_order(order, condition):
    overrides = ["gtpo.beta=0.8", "algorithm.algorithm_mode=sepa"][::order]
    assert condition(PLAIN, "optimizer.lr = 1e-3", "", overrides) == ("maxrl, sepa > gtpo, loss ppo_clip", 0.2, 0.8)


@pytest.mark.parametrize(
    ("entry", "grid", "overrides", "problem"),
    [
        (
            'advantage_mode = "maxrl"',
            '"algorithm.algorithm_mode" = ["sepa"]',
            (),
            r'preset "sepa" \(.*\) replaces \[algorithm\] advantage_mode',
        ),
        (
            '"ppo_clip.eps_high" = 0.5',
            "",
            ("algorithm.algorithm_mode=dapo",),
            r'preset "dapo" \(--set\) replaces \[ppo_clip\] eps_high',
        ),
    ],
)
def test_a_preset_does_not_replace_what_a_label_names(entry, grid, overrides, problem, condition):
    with pytest.raises(ConfigError, match=problem):
        condition(PLAIN, entry, grid, overrides)


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


def test_an_algorithm_and_an_advantage_in_one_layer_contradict_each_other(tmp_path):
    (tmp_path / "run.toml").write_text(BASE + '[algorithm]\nalgorithm_mode = "oracle"\nadvantage_mode = "maxrl"\n')
    with pytest.raises(ConfigError, match="advantage_mode: algorithm_mode replaces it"):
        load(tmp_path / "run.toml")


def test_conditions_that_train_the_same_under_two_names_are_a_mistake(tmp_path):
    (tmp_path / "base.toml").write_text(BASE + "[ppo_clip]\neps_low = 0.2\neps_high = 0.2\n")
    entries = '{ label = "a", algorithm_mode = "grpo" }, { label = "b", advantage_mode = "grpo" }'
    (tmp_path / "sweep.toml").write_text(f'[campaign]\nbase = "base.toml"\nseeds = 3\nconditions = [{entries}]\n')
    with pytest.raises(ConfigError, match="condition 'b' is the same run as 'a'"):
        load_campaign(tmp_path / "sweep.toml")


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
        for label, parts in ((label, config.components.described()) for label, config in pairs)
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
