"""`retrain campaign` and its company on a small real campaign."""

import json
import tomllib

import pytest

from tests.forks import run_command
from tests.small_runs import TOML, digest, rows

pytestmark = pytest.mark.xdist_group("campaign")

PLUGIN = """
def flipped(rewards):
    mean = sum(rewards) / len(rewards)
    return [mean - reward for reward in rewards]

def broken(rewards):
    raise ValueError("I do not like these rewards")
"""

SWEEP = """
[campaign]
seeds = 1
max_steps = 3
conditions = [
    { advantage_mode = "grpo" },
    { advantage_mode = "mine.flipped" },
    { advantage_mode = "mine.broken" },
]
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a campaign that has ended, and what the command said."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "mine.py").write_text(PLUGIN)
    (folder / "sweep.toml").write_text(SWEEP + TOML)
    return folder, run_command("campaign", "sweep.toml", "--plain", cwd=folder)


def test_a_plug_in_that_raises_fails_its_own_run_and_no_other(swept):
    folder, result = swept
    assert result.returncode == 1, result.stderr
    cells = folder / "runs/sweep/cells"
    ends = {path.parent.parent.name: json.loads(path.read_text()) for path in cells.glob("*/*/outcome.json")}
    assert {name: (end["status"], end["exit_code"], end["attempts"]) for name, end in ends.items()} == {
        "grpo": ("done", 0, 1),
        "flipped": ("done", 0, 1),
        "broken": ("failed", 1, 1),
    }
    assert "I do not like these rewards" in ends["broken"]["reason"]
    assert "broken/s0  failed" in result.stdout
    assert result.stdout.endswith("Curves and tables: runs/sweep/report.html\n")
    assert (folder / "runs/sweep/report.html").exists()


def test_runs_are_paired_and_their_files_repeat_them_alone(swept):
    folder, _ = swept
    cells = folder / "runs/sweep/cells"
    first, second = (rows(cells / name / "s0/eval.jsonl")[0] for name in ("grpo", "flipped"))
    assert first == second, "they start from the same weights"
    run_command("train", "runs/sweep/cells/grpo/s0/config.toml", "--set", "logging.name=again", cwd=folder, code=0)
    assert digest(cells / "grpo/again") == digest(cells / "grpo/s0")
    stored = tomllib.loads((cells / "grpo/s0/config.toml").read_text())
    assert (stored["training"]["seed"], stored["training"]["max_steps"]) == (0, 3)


def test_status_shows_campaigns_and_runs(swept, cli, monkeypatch):
    folder, _ = swept
    monkeypatch.chdir(folder)
    shown = cli("status").stdout
    assert "runs/sweep" in shown
    assert "2 of 3 runs done, 1 failed" in shown
    facts = json.loads(cli("status", "runs/sweep", "runs/sweep/cells/grpo/s0", "--json").stdout)
    assert [row["state"] for row in facts[0]["runs"]] == ["done", "done", "failed"]
    assert facts[1]["state"] == "finished"
    assert "2 of 3 runs done" in cli("status", "runs/sweep", "--watch").stdout
    assert cli("status", "runs/nothing").exit_code == 2
    assert [one["path"] for one in json.loads(cli("status", "runs/sweep/cells/grpo", "--json").stdout)] == [
        f"runs/sweep/cells/grpo/{name}" for name in ("again", "s0")
    ]


def test_validate_explain_and_schema_know_campaigns(swept, cli, monkeypatch):
    folder, _ = swept
    monkeypatch.chdir(folder)
    assert "valid: 3 conditions x 1 seeds = 3 runs" in cli("validate", "sweep.toml").stdout
    explained = cli("explain", "sweep.toml").stdout
    assert "3 conditions x 1 seeds" in explained
    assert "A run of grpo:" in explained
    assert json.loads(cli("explain", "sweep.toml", "--json").stdout)["run"]["batch"]
    tasks = cli("explain", "sweep.toml", "--set", 'campaign.tasks=["strategy", "rare"]')
    assert "A run of grpo:" in tasks.stdout
    assert "conditions" in json.loads(cli("schema").stdout)["properties"]["campaign"]["properties"]
    wrong = cli("validate", "sweep.toml", "--json", "--set", "campaign.seeds=0", code=2)
    assert json.loads(wrong.stdout)["problems"][0]["key"] == "[campaign] seeds"


def test_the_live_matrix_says_what_the_numbers_of_a_running_run_are():
    from rich.console import Console

    from retrain.display.campaign_display import picture

    row = {"condition": "a", "seed": 0, "state": "running", "accuracy": 0.578, "steps": 75, "max_steps": 100}
    facts = {
        "runs": [row],
        "done": 0,
        "total": 1,
        "running": 1,
        "failed": 0,
        "unreadable": 0,
        "left_s": None,
        "looks": "",
    }
    console = Console(width=100, record=True)
    console.print(picture(facts))
    assert "75% 57.8%" in (text := console.export_text())
    assert "the share of its steps that are done, then its accuracy so far" in text


def test_the_live_matrix_shows_conditions_by_seeds(swept, monkeypatch):
    from rich.console import Console
    from rich.live import Live

    from retrain.display.campaign_display import Matrix

    folder, _ = swept
    console = Console(width=100, record=True, force_terminal=True)
    with Live(console=console, auto_refresh=False) as live:
        matrix = Matrix(live)
        matrix("message", {"text": "computing", "level": "info"})
        matrix("campaign", {"path": folder / "runs/sweep"})
        matrix("job", {"id": "broken/s0", "event": "failed", "text": "ValueError"})
        matrix("tick", {})
    text = console.export_text()
    assert "broken/s0 failed: ValueError" in text
    assert "2 of 3 runs done, 1 failed" in text
    assert "cell: accuracy" not in text, "no run goes on"
    line = next(line for line in text.splitlines() if line.startswith("flipped"))
    assert "%" in line


def test_a_dry_run_prints_the_matrix_and_writes_nothing(folder, cli):
    (folder / "sweep.toml").write_text("[campaign]\nseeds = 3\n" + TOML)
    result = cli("campaign", "sweep.toml", "--dry-run", "--no-probe", "--set", "training.max_steps=2", code=0)
    assert "15, 30 steps in all" in result.stdout
    assert "3 paired seeds: the t test, which assumes roughly normal differences, detects" in result.stdout
    assert json.loads(cli("campaign", "sweep.toml", "--dry-run", "--no-probe", "--json").stdout)["runs"] == 15
    assert not (folder / "runs").exists()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("seeds", "array", "limit"), [(3, "0-14%4", 1), (200, "0-999%4", 1), (201, "0-502%4", 2), (300, "0-749%4", 2)]
)
def test_a_slurm_script_has_a_task_per_run_within_the_limit_of_arrays(folder, cli, seeds, array, limit):
    (folder / "sweep.toml").write_text(f"[campaign]\nseeds = {seeds}\nslots = 4\n" + TOML)
    script = cli("campaign", "sweep.toml", "--slurm").stdout
    assert f"#SBATCH --array={array}\n" in script
    assert f"-m retrain worker {folder}/runs/sweep --slots 1 --limit {limit} " in script
    assert (f"the next free run, {limit} in turn, because" in script) is (limit > 1)
    import subprocess

    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
