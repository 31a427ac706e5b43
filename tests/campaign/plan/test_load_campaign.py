"""From a campaign's file to its runs: conditions, labels, grids, and every mistake at its line."""

import json
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from retrain.campaign.plan.declaration import history
from retrain.campaign.plan.is_campaign import is_campaign
from retrain.campaign.plan.load_campaign import load_campaign
from retrain.campaign.plan.plan_file import jobs, plan_of, read_plan
from retrain.campaign.verdict.run_facts import campaign_commands
from retrain.campaign.verdict.run_reader import read_campaign
from retrain.campaign.work.campaign_directory import create
from retrain.config.load import load
from retrain.errors import ConfigError, StorageError
from retrain.system.lock import exclusive
from tests.forks import PYTHON

ROOT = Path(__file__).parents[3]
CAMPAIGNS = sorted((ROOT / "campaigns").glob("*.toml"))
EVIDENCE = [file for file in sorted((ROOT / "benchmarks" / "evidence").glob("*.toml")) if is_campaign(file)]


@pytest.fixture
def campaign(tmp_path):
    """Load a campaign from its text: `campaign(text, *overrides)`."""

    def go(text, *overrides):
        (tmp_path / "sweep.toml").write_text(text)
        return load_campaign(tmp_path / "sweep.toml", overrides)

    return go


@pytest.fixture
def problems(campaign):
    """The mistakes of a campaign as "line:column key: problem; fix"."""

    def go(text, *overrides):
        with pytest.raises(ConfigError, match=r"sweep\.toml:|--set") as caught:
            campaign(text, *overrides)
        return [f"{p.line}:{p.column} {p.key}: {p.problem}; {p.fix}" for p in caught.value.problems]

    return go


def labels(loaded):
    return [condition.label for condition in loaded.conditions]


def test_the_documented_snippet_is_five_conditions_with_eight_seeds(campaign):
    loaded = campaign("[campaign]\nmax_steps = 500\n")
    assert labels(loaded) == ["grpo", "maxrl", "maxrl+gtpo", "maxrl+gtpo_hicra", "maxrl+gtpo_sepa"]
    assert loaded.settings.seed_list == list(range(8))
    assert loaded.baseline == "grpo"
    assert {config.config.training.max_steps for config in loaded.configs} == {500}
    assert [config.config.algorithm.transform_mode for config in loaded.configs][-1] == "gtpo_sepa"
    assert loaded.ladder == [
        ("maxrl", "grpo"),
        ("maxrl+gtpo", "maxrl"),
        ("maxrl+gtpo_hicra", "maxrl+gtpo"),
        ("maxrl+gtpo_sepa", "maxrl+gtpo"),
    ]


def test_a_condition_may_say_what_it_adds_to(campaign, problems):
    text = """[campaign]
conditions = [
    { advantage_mode = "grpo" },
    { advantage_mode = "maxrl" },
    { advantage_mode = "maxrl", "optimizer.lr" = 1e-3, against = "AGAINST" },
]
"""
    assert campaign(text.replace("AGAINST", "grpo")).ladder == [("maxrl", "grpo"), ("maxrl,lr=0.001", "grpo")]
    assert campaign(text.replace(', against = "AGAINST"', "")).ladder[1] == ("maxrl,lr=0.001", "maxrl")
    expected = '5:56 [[campaign.conditions]] against: no other condition is called "grop"'
    assert expected in "\n".join(problems(text.replace("AGAINST", "grop")))


@pytest.mark.parametrize("file", CAMPAIGNS, ids=lambda file: file.stem)
def test_every_shipped_campaign_is_valid(file):
    # What a GPU's runs need need not be installed here, and the real model is a download.
    others = {"ablation-gpu": ("rollout.engine=auto", "task.name=addition"), "smollm2": ("model.path=builtin:tiny",)}
    overrides = others.get(file.stem, ())
    loaded = load_campaign(file, overrides)
    # A penalty that is too strong is what campaigns/dca.toml is there to show.
    assert [warning.key for warning in loaded.warnings if "grpo_lp.gamma" not in warning.key] == []
    assert len(loaded.conditions) == 5
    assert is_campaign(file)


@pytest.mark.parametrize("file", EVIDENCE, ids=lambda file: file.stem)
def test_every_benchmark_of_evidence_is_valid_and_has_seeds_enough_to_tell(file):
    # The real model is a download.
    loaded = load_campaign(file, ("model.path=builtin:tiny",) if "model fetch" in file.read_text() else ())
    assert len(loaded.settings.seed_list) >= 5
    assert loaded.ladder


def test_conditions_set_any_key_and_name_themselves_after_what_they_set(campaign):
    loaded = campaign("""
gtpo = { beta = 0.1 }
[campaign]
seeds = [3, 1]
baseline = "mine"
conditions = [
    { advantage_mode = "maxrl", transform_mode = "gtpo", "gtpo.beta" = 0.2 },
    { label = "mine", advantage_mode = "maxrl", transform_mode = "gtpo", gtpo.beta = 0.3, training.lr = 1e-4 },
    { transform_mode = ["gtpo", "hicra"] },
    { advantage_mode = "grpo" },
]
""")
    assert labels(loaded) == ["maxrl+gtpo,beta=0.2", "mine", "gtpo+hicra", "grpo"]
    assert [config.tables["gtpo"]["beta"] for config in loaded.configs] == [0.2, 0.3, 0.1, 0.1]
    assert [config.config.optimizer.lr for config in loaded.configs] == [2e-4, 1e-4, 2e-4, 2e-4]
    assert loaded.baseline == "mine"
    assert loaded.settings.seed_list == [3, 1]
    assert dict(loaded.conditions[1].overrides)["training.lr"] == 1e-4


def test_a_grid_crosses_the_conditions(campaign):
    loaded = campaign("""
[campaign.grid]
"optimizer.lr" = [1e-4, 2e-4]
training.group_size = [4, 8]
[[campaign.conditions]]
advantage_mode = "grpo"
[[campaign.conditions]]
advantage_mode = "maxrl"
""")
    assert len(loaded.conditions) == 8
    assert labels(loaded)[:3] == [
        "grpo,lr=0.0001,group_size=4",
        "grpo,lr=0.0001,group_size=8",
        "grpo,lr=0.0002,group_size=4",
    ]
    pairs = {(config.config.optimizer.lr, config.config.training.group_size) for config in loaded.configs}
    assert pairs == {(1e-4, 4), (1e-4, 8), (2e-4, 4), (2e-4, 8)}


def test_a_campaign_extends_the_run_that_it_names(campaign, tmp_path):
    (tmp_path / "run.toml").write_text("[training]\nmax_steps = 9\nlr = 1e-5\n[optimizer]\nweight_decay = 0.1\n")
    loaded = campaign('[campaign]\nbase = "run.toml"\n[optimizer]\nlr = 3e-5\n')
    optimizer, training = loaded.configs[0].config.optimizer, loaded.configs[0].config.training
    assert (optimizer.lr, optimizer.weight_decay, training.max_steps) == (3e-5, 0.1, 9)


def test_overrides_apply_to_every_run_and_to_the_campaign(campaign):
    loaded = campaign("[campaign]\nseeds = 5\nmax_steps = 7\n", "training.max_steps=2", "campaign.seeds=[4]")
    assert {config.config.training.max_steps for config in loaded.configs} == {2}
    assert loaded.settings.seed_list == [4]


def test_a_cells_file_is_the_whole_run(campaign, tmp_path):
    loaded = campaign(
        '[campaign]\nseeds = 2\n[logging]\ntrackers = ["wandb"]\ndir = "out"\n[task]\nname = "addition"\n'
    )
    condition = loaded.conditions[2]
    file = tmp_path / "cell.toml"
    file.write_text(loaded.cell_toml(condition, 1))
    run = load(file)
    assert run.config.training.seed == 1
    assert (run.config.logging.dir, run.config.logging.name) == ("out/sweep/cells/maxrl+gtpo", "s1")
    assert "campaign" not in tomllib.loads(file.read_text())
    wandb = run.tables["wandb"]
    assert (wandb["name"], wandb["group"]) == ("maxrl+gtpo_s1", "maxrl+gtpo")
    assert wandb["tags"] == ["sweep", "maxrl+gtpo"]


def test_two_conditions_with_one_seed_differ_in_what_they_set_only(campaign):
    loaded = campaign("[campaign]\nseeds = 1\n")
    first, second = (loaded.cell_config(condition, 0) for condition in loaded.conditions[:2])
    assert first.pop("algorithm") != second.pop("algorithm")
    assert first.pop("logging") != second.pop("logging")
    assert first == second


def test_a_file_in_the_place_of_the_directory_is_a_storage_error(campaign, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/sweep").write_text("mine")
    with pytest.raises(StorageError, match="runs/sweep is not a directory") as caught:
        create(campaign(f"[campaign]\n[logging]\ndir = '{tmp_path}/runs'\n"))
    assert caught.value.exit_code == 6
    assert (tmp_path / "runs/sweep").read_text() == "mine"


SECOND = """
import sys
from retrain.campaign.plan.load_campaign import load_campaign
from retrain.campaign.work.campaign_directory import create

loaded = load_campaign(sys.argv[1])
print("loaded", flush=True)
create(loaded)
"""


def test_a_second_driver_waits_while_the_first_writes_the_plan(campaign, tmp_path):
    loaded = campaign(f"[campaign]\n[logging]\ndir = '{tmp_path}/runs'\n")
    loaded.directory.mkdir(parents=True)
    with exclusive(loaded.directory / "lock", waiting=lambda: None):
        command = [PYTHON, "-c", SECOND, loaded.file]
        second = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert second.stdout.readline() == "loaded\n"
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(0.3)
    assert second.communicate() == ("", "")
    assert second.returncode == 0
    assert create(loaded).plan.baseline == "grpo"


def test_the_command_that_repeats_a_campaign_means_the_same_runs(campaign, tmp_path):
    text = '[campaign]\nseeds = 2\n[campaign.grid]\n"optimizer.lr" = [1e-4, 2e-4]\n'
    created = create(campaign(text, f"logging.dir='{tmp_path}/my runs'", "campaign.name=again", "task.name=rare"))
    again = shlex.split(campaign_commands(created.path, read_campaign(created.path))[1])
    assert (again[:3], again[3::2]) == (["retrain", "campaign", str(tmp_path / "sweep.toml")], ["--set"] * 3)
    repeated = load_campaign(again[2], again[4::2])
    plan = plan_of(repeated, **history(created.path, repeated))
    assert json.loads(json.dumps(plan)) == json.loads((created.path / "plan.json").read_text())


def test_a_campaign_is_no_base_and_no_run(problems, campaign, tmp_path):
    (tmp_path / "other.toml").write_text("[campaign]\nseeds = 2\n")
    said = problems('[campaign]\nbase = "other.toml"\n')
    assert [text.partition("other.toml is ")[2] for text in said] == ["a campaign; give the file of a run"]
    with pytest.raises(ConfigError, match="makes this a campaign, not a run; retrain campaign"):
        load(tmp_path / "other.toml")
    (tmp_path / "broken.toml").write_text("[campaign")
    assert not is_campaign(tmp_path / "broken.toml")


SHARED = """
prime = { beta = 0.1, gamma = 0.9 }
[campaign]
name = "shared"
seeds = 2
conditions = [
    { label = "plain" },
    { label = "prime", transform_mode = ["process_rloo"] },
]
"""


def test_what_one_condition_reads_may_stand_in_the_base_and_is_left_out_of_the_others_runs(campaign, tmp_path):
    loaded = campaign(SHARED)
    assert loaded.warnings == ()
    plain, prime = loaded.conditions
    assert not loaded.cell_config(plain, 0)["prime"]
    assert loaded.cell_config(prime, 0)["prime"] == {"beta": 0.1, "gamma": 0.9}
    for condition in loaded.conditions:
        (tmp_path / "cell.toml").write_text(loaded.cell_toml(condition, 1))
        assert load(tmp_path / "cell.toml").unread == {}


ON_TASKS = """
[campaign]
seeds = 2
tasks = ["strategy", "noisy"]
baseline = "grpo"
conditions = [
    { advantage_mode = "grpo" },
    { label = "mine", advantage_mode = "maxrl", against = "grpo" },
]
"""


def test_a_condition_with_a_seed_offset_is_the_baseline_with_other_seeds(campaign):
    loaded = campaign(
        """
        [campaign]
        seeds = 2
        conditions = [{advantage_mode = "grpo"}, {advantage_mode = "grpo", label = "again", seed_offset = 100}]
        """
    )
    grpo, again = (loaded.cell_config(one, 1) for one in loaded.conditions)
    assert (grpo["training"]["seed"], again["training"]["seed"]) == (1, 101)
    assert [job.seed for job in jobs(loaded)] == [0, 0, 1, 1]


def test_every_seed_may_have_a_warm_start_of_its_own(campaign, problems):
    text = """[campaign]
seeds = [3, 5, 7, 9]
warm_starts = {0}
conditions = [{{advantage_mode = "grpo"}}, {{advantage_mode = "maxrl"}}]
[warmup]
steps = {1}
seed = 10
"""
    loaded = campaign(text.format(4, 100))
    starts = [loaded.cell_config(loaded.conditions[1], seed)["warmup"]["seed"] for seed in (3, 5, 7, 9)]
    assert starts == [10, 11, 12, 13]
    assert not loaded.warnings
    two = campaign(text.format(2, 100))
    assert [two.settings.start(seed) for seed in (3, 5, 7, 9)] == [0, 1, 0, 1]
    (warning,) = two.warnings
    assert (warning.line, warning.fix) == (3, "use 4, one for each seed, or at least 6")
    (warning,) = campaign(text.format(4, 0)).warnings
    assert "no run has a warm-up" in warning.problem
    assert problems(text.format(5, 100)) == [
        "3:1 [campaign] warm_starts: fewer seeds than warm starts; use at most 4, one for each seed"
    ]


def test_every_condition_is_run_on_every_task_with_its_settings(campaign, tmp_path):
    loaded = campaign(ON_TASKS + f'[logging]\ndir = "{tmp_path}/runs"\n')
    assert labels(loaded) == ["strategy: grpo", "strategy: mine", "noisy: grpo", "noisy: mine"]
    assert [config.config.rewards[0].name for config in loaded.configs] == ["exact", "exact", "flipped", "flipped"]
    assert (loaded.baseline, loaded.ladder) == ("grpo", [("mine", "grpo")])
    directory = create(loaded)
    assert [job.path for job in directory.jobs][:2] == ["cells/strategy-grpo/s0", "cells/strategy-mine/s0"]
    assert tomllib.loads((directory.path / "cells/noisy-mine/s1/config.toml").read_text())["task"]["name"] == "noisy"
    premise = read_plan(directory.path).model_extra["premises"]["strategy"]
    assert premise["about"].startswith("Greedy decoding is wrong, a rarer answer is right")
    assert premise["bounds"]["accuracy"] == [0.15, 0.45]
