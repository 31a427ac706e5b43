"""Campaigns with looks: which runs they start, in every executor, after interruptions, and what they say."""

import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from retrain.campaign.driver import run_campaign, work
from retrain.campaign.plan.load_campaign import load_campaign
from retrain.campaign.plan.plan_file import read_plan
from retrain.campaign.schedule import Schedule, Status
from retrain.campaign.verdict.run_reader import read_campaign
from retrain.campaign.work.campaign_directory import CampaignDirectory, create
from retrain.display.campaign_display import picture
from retrain.errors import Preempted

SWEEP = """
model = { path = "builtin:tiny" }
training = { max_steps = 4 }
warmup = { steps = 0 }
eval = { problems = 512 }
[campaign]
seeds = 16
looks = [8, 12]
executor = "tests.campaign.test_looks.Instant"
conditions = [
    { label = "base" },
    { label = "strong", "optimizer.lr" = 5e-5 },
    { label = "null", "optimizer.lr" = 3e-4 },
]
"""
EFFECTS = {"base": 0.0, "strong": 0.3, "null": 0.0}
begun: list[str] = []
"""Ids of the runs that `Instant` began, in order."""


def finish(campaign: CampaignDirectory, job, status: str = "done") -> None:
    """Write what a run leaves: an effect of its condition, a share of its seed, and noise."""
    run = campaign.run(job)
    accuracy = 0.4 + EFFECTS[job.condition] + random.Random(job.seed).gauss(0, 0.05)
    accuracy += random.Random(f"{job.id} noise").gauss(0, 0.01)
    rows = [{"step": step, "rollout/completions": 8.0, "tokens/sampled": 64.0, "time/step_s": 0.1} for step in range(4)]
    evals = [{"step": step, "accuracy": value, "problems": 512} for step, value in ((0, 0.2), (4, accuracy))]
    for name, lines in (("metrics.jsonl", rows), ("eval.jsonl", evals)):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.resolved.json").write_text("{}")
    (run / "status.json").write_text('{"outcome": "finished"}')
    campaign.finish(job, {"status": status, "exit_code": 0})


class Instant:
    """An executor of one's own: each run ends at once. `stop_at` runs are begun at most."""

    stop_at = 1000

    def __init__(self, campaign: CampaignDirectory) -> None:
        self._campaign = campaign

    def run(self, jobs, observe) -> None:
        for job in jobs:
            if len(begun) == self.stop_at:
                raise KeyboardInterrupt
            begun.append(job.id)
            finish(self._campaign, job)


@pytest.fixture
def sweep(cwd):
    begun.clear()
    (cwd / "sweep.toml").write_text(SWEEP)

    def load(*overrides):
        return load_campaign("sweep.toml", overrides)

    return load


def run(loaded) -> list[str]:
    """Run the campaign and return its messages."""
    messages: list[str] = []
    run_campaign(loaded, lambda event, details: messages.append(details["text"]) if event == "message" else None)
    return messages


EXPECTED = {"base": 16, "strong": 8, "null": 16}


def counts() -> dict[str, int]:
    return {label: sum(name.startswith(f"{label}/") for name in begun) for label in EFFECTS}


def test_a_decided_condition_gets_no_further_runs(sweep):
    messages = run(sweep())
    assert counts() == EXPECTED
    assert begun[:24] == [f"{label}/s{seed}" for seed in range(8) for label in EFFECTS], "look by look, seed by seed"
    assert messages == [
        "look 1 of 3: 8 of 16 seeds; strong: better, stopped; null: continues",
        "look 2 of 3: 12 of 16 seeds; strong: better, stopped at 8; null: continues",
        "look 3 of 3: 16 of 16 seeds; strong: better, stopped at 8; null: inconclusive, all seeds",
    ]
    campaign = CampaignDirectory(Path("runs/sweep"))
    assert not Schedule(campaign).failed(), "what looks have saved has not failed"
    assert Schedule(campaign).due() == []


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("stop_at", [24, 23, 25, 39, 1, 31, 32])
def test_an_interrupted_campaign_continues_with_the_same_decisions(sweep, monkeypatch, stop_at):
    monkeypatch.setattr(Instant, "stop_at", stop_at)
    with pytest.raises(KeyboardInterrupt):
        run(sweep())
    assert len(begun) == stop_at
    monkeypatch.setattr(Instant, "stop_at", 1000)
    run(sweep())
    assert counts() == EXPECTED
    assert len(set(begun)) == len(begun), "no run twice"


def test_status_names_the_look_and_the_runs_that_it_saved(sweep, monkeypatch):
    monkeypatch.setattr(Instant, "stop_at", 26)
    create(sweep())
    assert Status(Path("runs/sweep")).facts()["looks"] == "look 1 of 3 is at 8 of 16 seeds"
    with pytest.raises(KeyboardInterrupt):
        run(sweep())
    facts = Status(Path("runs/sweep")).facts()
    assert facts["looks"] == "look 1 of 3: 8 of 16 seeds; strong: better, stopped; null: continues"
    assert (facts["done"], facts["total"]) == (26, 40)
    assert {row["id"] for row in facts["runs"] if row["state"] == "not needed"} == {
        f"strong/s{n}" for n in range(8, 16)
    }
    console = Console(width=160, record=True)
    console.print(picture(facts))
    shown = console.export_text()
    assert "look 1 of 3: 8 of 16 seeds; strong: better, stopped; null: continues" in shown
    assert "26 of 40 runs done" in shown


def test_a_failed_run_of_a_look_that_is_repeated_is_tested_again(sweep):
    run(sweep())
    campaign = CampaignDirectory(Path("runs/sweep"))
    schedule = Schedule(campaign)
    assert schedule.state().passed == 3
    (campaign.run(campaign.jobs[1]) / "outcome.json").unlink()
    assert [job.id for job in schedule.due()] == ["strong/s0"]
    assert schedule.state().passed == 0
    finish(campaign, campaign.jobs[1])
    assert schedule.due() == []


def test_a_worker_of_a_batch_system_is_started_again_before_a_look(sweep, monkeypatch):
    """All runs of the look are taken by others: the task goes back into the queue, and is not done."""
    monkeypatch.setattr("retrain.campaign.work.campaign_worker.LEASE_S", 0.0)
    monkeypatch.setattr("retrain.campaign.work.lease.LeaseWatch.take", lambda *_: None)
    campaign = create(sweep())
    with pytest.raises(Preempted, match="no run is free before the next look"):
        work(campaign.path, lambda event, details: None, limit=1)
    for job in campaign.jobs:
        if job.seed < 12 and not (job.condition == "strong" and job.seed >= 8):
            finish(campaign, job)
    assert not work(campaign.path, lambda event, details: None, limit=1), "no later look follows"


@pytest.mark.parametrize(
    ("looks", "seeds", "sizes"),
    [
        ('"auto"', 16, [8, 12, 16]),
        ('"auto"', 18, [8, 12, 16, 18]),
        ('"auto"', 8, []),
        ("[7]", 9, [7, 9]),
        ("[]", 9, []),
    ],
)
def test_looks_are_numbers_of_seeds(sweep, looks, seeds, sizes):
    loaded = sweep(f"campaign.looks={looks}", f"campaign.seeds={seeds}")
    assert [*loaded.settings.look_sizes] == sizes
    assert [*create(loaded).plan.look_sizes] == sizes, "plan.json declares them"
    assert any("has no effect with 8 seeds" in str(warning) for warning in loaded.warnings) is (seeds == 8)


def test_looks_that_change_after_runs_have_started_are_late(sweep):
    def declared(*overrides):
        return create(sweep(*overrides)).plan.looks_declared

    first = declared()
    assert first["after"] == 0
    assert declared("campaign.looks=[9]")["after"] == 0, "before the first run"
    campaign = create(sweep())
    assert declared() == campaign.plan.looks_declared
    finish(campaign, campaign.jobs[0])
    assert declared()["after"] == 0
    assert (declared("campaign.looks=[9]")["after"], declared("campaign.looks=[9]")["runs"]) == (1, 48)
    assert declared("campaign.looks=[]")["after"] == 1, "a withdrawal is a change"
    late = "The looks were declared or changed late, after 1 of 48 runs had started."
    assert read_campaign(campaign.path).late == late
    assert declared("campaign.seeds=12", "campaign.looks=[8]")["after"] == 1
    assert create(sweep("campaign.looks=[]", "campaign.name=other")).plan.looks_declared is None


def test_seeds_added_after_a_report_of_fewer_without_looks_are_recorded(sweep):
    def reported(seeds, *overrides):
        return create(sweep("campaign.looks=[]", f"campaign.seeds={seeds}", *overrides)).plan.seeds_reported

    assert reported(3) is None
    assert reported(4) is None, "there was no report"
    page = Path("runs/sweep/report.html")
    page.write_text("")
    assert reported(4) is None
    assert reported(8) == 4
    assert reported(12) == 4
    assert read_plan(Path("runs/sweep")).seeds_reported == 4
    assert read_campaign(Path("runs/sweep")).late == "Seeds were added after a look, the report of 4 seeds."
    loaded = sweep("campaign.looks=[]", "campaign.seeds=12")
    assert create(loaded, fresh=True).plan.seeds_reported is None
    assert not page.exists()
