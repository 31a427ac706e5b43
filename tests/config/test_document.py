import pytest

from retrain.config.document import read
from retrain.config.load import load
from retrain.errors import ConfigError


def write(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.seed=3", ("training", "seed"), 3),
        ("training.lr=1e-4", ("optimizer", "lr"), 1e-4),
        ("model.path=/some/where", ("model", "path"), "/some/where"),
        ("algorithm.transform_mode=['gtpo']", ("algorithm", "transform_mode"), ["gtpo"]),
        ("rewards.0.weight=2", ("rewards", 0, "weight"), 2),
        ("model.lora.r=4", ("model", "lora", "r"), 4),
        ("model.revision=a\nb=1", ("model", "revision"), "a\nb=1"),
    ],
)
def test_an_override_lays_its_value_over_the_file(tmp_path, override, path, value):
    document = read(write(tmp_path, '[[rewards]]\nname = "exact"\n[training]\nseed = 1\n'), [override])
    assert not document.problems
    node = document.data
    for part in path:
        node = node[part]
    assert node == value
    assert document.at(path, "", "").file == f"--set {override}"


def test_an_override_replaces_a_key_that_the_file_sets_by_its_other_name(tmp_path):
    file = write(tmp_path, "[training]\nlr = 1.0\n")
    assert load(file, ["optimizer.lr=0.5"]).config.optimizer.lr == 0.5
    assert load(file, ["training.lr=0.25"]).config.optimizer.lr == 0.25


@pytest.mark.parametrize("table", ["hicra", "planning"])
def test_an_override_replaces_a_key_that_excludes_it(tmp_path, table):
    grams, path = f'{table}.strategic_grams=["let me check"]', f"{table}.strategic_grams_path=g1.json"
    written = {"strategic_grams": '["so"]', "strategic_grams_path": '"g0.json"'}
    for key, value in written.items():
        file = write(tmp_path, f"[{table}]\n{key} = {value}\n")
        assert read(file, [path]).data["planning"] == {"strategic_grams_path": "g1.json"}
        assert read(file, [path, grams]).data["planning"] == {"strategic_grams": ["let me check"]}
        assert ("planning", "strategic_grams") not in read(file, [path]).places


def test_the_last_of_two_overrides_counts(tmp_path):
    assert load(write(tmp_path, ""), ["training.seed=1", "training.seed=2"]).config.training.seed == 2


def test_aliases_reach_the_table_that_reads_them(tmp_path):
    loaded = load(write(tmp_path, '[training]\nlr = 3e-4\n[hicra]\nstrategic_grams = "wait, so"\n'))
    assert loaded.config.optimizer.lr == 3e-4
    assert loaded.signal("planning_mask").params["strategic_grams"] == "wait, so"


def test_a_mistake_below_an_unwritten_table_is_shown_at_the_nearest_one(tmp_path):
    document = read(write(tmp_path, "\n[model]\npath = 'x'\n"))
    problem = document.at(("model", "lora", "r"), "p", "f")
    assert (problem.line, problem.key) == (2, "[model.lora] r")
    assert document.at(("eval", "every"), "p", "f").line == 1


def test_a_file_extends_another_and_every_value_keeps_its_place(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "root.toml").write_text('[training]\nlr = 1e-4\nseed = 3\n[[loss]]\nname = "kl"\n')
    (tmp_path / "sub" / "base.toml").write_text('extends = "root.toml"\n[training]\nseed = 4\nminibatches = 3\n')
    file = write(tmp_path, 'extends = "sub/base.toml"\n[training]\nbatch_size = 2\n[[loss]]\nname = "ppo_clip"\n')
    document = read(file, ["training.max_steps=1"])
    assert document.data == {
        "training": {"seed": 4, "minibatches": 3, "batch_size": 2, "max_steps": 1},
        "optimizer": {"lr": 1e-4},
        "loss": [{"name": "ppo_clip"}],
    }
    places = {key: document.at(("training", key), "", "") for key in ("seed", "minibatches", "batch_size")}
    found = {key: (one.file.rpartition("/")[2], one.line) for key, one in places.items()}
    assert found == {"seed": ("base.toml", 3), "minibatches": ("base.toml", 4), "batch_size": ("run.toml", 3)}
    with pytest.raises(ConfigError, match=r"base\.toml:4:1: \[training\] minibatches: 16 completions"):
        load(file)
    alone = tmp_path / "alone.toml"
    alone.write_text(document.text)
    assert read(alone, ["training.max_steps=1"]).data == document.data


@pytest.mark.parametrize("typed", ["83e2010", "true", "2026-11-28", "0x10", "007", "1e5"])
def test_a_key_of_text_takes_what_was_typed(tmp_path, typed):
    file = tmp_path / "run.toml"
    file.write_text("")
    assert load(file, [f"logging.name={typed}"]).config.logging.name == typed
    with pytest.raises(ConfigError, match=f'no advantage named "{typed}"'):
        load(file, [f"algorithm.advantage_mode={typed}"])
