"""A declaration keeps its record while its terms are the same; a change after a run has started is late and listed."""

import hashlib
import json

import pytest

from retrain.campaign.plan.load_campaign import load_campaign
from retrain.campaign.plan.plan_file import read_plan
from retrain.campaign.verdict import sentences
from retrain.campaign.verdict.analysis import analyze
from retrain.campaign.verdict.run_reader import read_campaign
from retrain.campaign.verdict.verdict_page import write_report
from retrain.campaign.work.campaign_directory import create

TEXT = """
[campaign]
seeds = 6
baseline = "grpo"
primary = "std"
alpha = 0.05
[[campaign.conditions]]
label = "grpo"
advantage_mode = "grpo"
[[campaign.conditions]]
label = "maxrl"
advantage_mode = "maxrl"
[[campaign.conditions]]
label = "std"
advantage_mode = "grpo_std"
"optimizer.lr" = 2e-4
"""


@pytest.fixture
def plan(tmp_path):
    """Write the plan of a campaign: `plan((old, new), ...)` with replacements in its file."""

    def go(*changes):
        text = TEXT + f'[logging]\ndir = "{tmp_path}/runs"\n'
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "c.toml").write_text(text)
        return create(load_campaign(tmp_path / "c.toml"))

    return go


def start(directory, index=0):
    run = directory.run(directory.jobs[index])
    (run / "config.resolved.json").write_text("{}")


def dated(directory):
    """Set the time of the declaration to the past, and return the declaration."""
    stored = json.loads((directory.path / "plan.json").read_text())
    stored["declared"]["at"] = "2026-01-01T00:00:00+00:00"
    (directory.path / "plan.json").write_text(json.dumps(stored))
    return stored["declared"]


def test_a_declaration_keeps_its_time_until_it_changes(plan):
    first = plan()
    known = dated(first)
    assert (known["after"], known["runs"], known["changed"]) == (0, 18, [])
    assert known["sha256"] == hashlib.sha256((first.path / "campaign.toml").read_bytes()).hexdigest()
    assert plan().plan.declared == known
    start(first)
    same = plan(("[logging]", "[checkpoint]\nevery = 7\n[logging]"), ('label = "maxrl"', 'label = "other"'))
    assert same.plan.declared == known, "neither free tables nor other conditions are part of a declaration"
    assert read_campaign(first.path).claimed == ("", "std", "grpo")


def test_a_default_that_is_written_out_changes_nothing(plan):
    first = plan()
    known = dated(first)
    start(first)
    written_out = ("2e-4", '2e-4\n"optimizer.weight_decay" = 0.0\n"training.epochs" = 1\n"ppo_clip.eps_low" = 0.2')
    assert plan(written_out).plan.declared == known
    assert plan().plan.declared == known
    changed = plan((written_out[0], written_out[1].replace("0.0", "0.5"))).plan.declared["changed"]
    assert "primary: optimizer.weight_decay unset -> 0.5" in changed


def test_a_change_before_the_first_run_leaves_no_mark(plan):
    known = dated(plan())
    changed = plan(("alpha = 0.05", "alpha = 0.1")).plan.declared
    assert (changed["after"], changed["changed"]) == (0, [])
    assert changed["at"] > known["at"]
    assert plan(('primary = "std"\n', "")).plan.declared is None


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ('baseline = "grpo"', 'baseline = "maxrl"', 'baseline "grpo" -> "maxrl"'),
        ('primary = "std"', 'primary = "maxrl"', 'primary "std" -> "maxrl"'),
        ("alpha = 0.05", "alpha = 0.2", "alpha 0.05 -> 0.2"),
        ("seeds = 6", "seeds = 8", "seeds [0, 1, 2, 3, 4, 5] -> [0, 1, 2, 3, 4, 5, 6, 7]"),
        ("2e-4", "3e-4", "primary: optimizer.lr 0.0002 -> 0.0003"),
        ('label = "std"', 'label = "std"\nseed_offset = 100', "primary: training.seed 0 -> 100"),
    ],
)
def test_every_change_of_the_terms_after_a_start_is_late_and_listed(plan, old, new, change):
    first = plan()
    known = dated(first)
    start(first, 1)  # a run of maxrl, whose configuration does not change
    directory = plan((old, new))
    late = directory.plan.declared
    assert (late["after"], late["runs"], late["changed"]) == (1, len(directory.jobs), [change])
    assert late["at"] > known["at"]
    assert late["sha256"] == hashlib.sha256((directory.path / "campaign.toml").read_bytes()).hexdigest()
    assert read_campaign(directory.path).claimed is None


@pytest.mark.parametrize("mark", ["lease", "outcome"])
def test_runs_that_have_started_count_and_not_those_that_have_ended(plan, mark):
    directory = plan(('primary = "std"\n', ""))
    job = directory.jobs[0]
    if mark == "lease":
        (directory.path / "leases" / job.id).mkdir(parents=True)
        (directory.path / "leases" / job.id / "1.json").write_text("{}")
    else:
        directory.finish(job, {"status": "failed"})
    assert plan().plan.declared["after"] == 1


def test_runs_of_a_removed_seed_still_count(plan):
    directory = plan(("seeds = 6", "seeds = 8"))
    start(directory, len(directory.jobs) - 1)
    assert plan(('primary = "std"\n', "")).plan.declared["after"] == 1
    late = plan().plan.declared
    assert (late["after"], late["runs"]) == (1, 19)
    assert late["changed"] == [
        'primary "std" -> unset',
        'primary unset -> "std"',
        "seeds [0, 1, 2, 3, 4, 5, 6, 7] -> [0, 1, 2, 3, 4, 5]",
    ]


def test_a_claim_on_another_task_is_late_without_the_settings_of_the_tasks(plan):
    tasks = ("seeds = 6", 'seeds = 6\ntasks = ["rare", "decoy"]\nclaim = "rare"')
    start(plan(tasks))
    late = plan(tasks, ('claim = "rare"', 'claim = "decoy"')).plan.declared
    assert late["changed"] == ['claim "rare" -> "decoy"']


def test_a_withdrawn_declaration_is_reported_and_its_return_is_late(plan):
    start(plan())
    withdrawn = plan(('primary = "std"\n', ""))
    assert withdrawn.plan.declared["changed"] == ['primary "std" -> unset']
    assert plan(('primary = "std"\n', "")).plan.declared == withdrawn.plan.declared
    text = sentences.text(analyze([read_campaign(withdrawn.path)]))
    assert "The declaration of a primary comparison was withdrawn at " in text
    back = plan(("alpha = 0.05", "alpha = 0.1")).plan.declared
    assert back["changed"] == ['primary "std" -> unset', 'primary unset -> "std"', "alpha 0.05 -> 0.1"]
    assert plan().plan.declared["changed"] == [*back["changed"], "alpha 0.1 -> 0.05"]


def test_the_verdict_says_in_every_output_that_a_declaration_is_late(plan):
    start(plan())
    directory = plan(('baseline = "grpo"', 'baseline = "maxrl"'))
    declared = read_plan(directory.path).declared
    report = write_report(directory.path)
    said = (
        f"The primary comparison, std against maxrl, was declared late, at {declared['at']}, after 1 of 18 runs had "
        f"started (sha256 of the file: {declared['sha256'][:12]}). It is therefore corrected like the other "
        'comparisons. Changed since runs had started: baseline "grpo" -> "maxrl".'
    )
    assert said in report.text
    assert "tested alone, as declared" not in report.text
    assert said in report.files[1].read_text(encoding="utf-8")
    facts = sentences.as_json(report.analysis)["declaration"]
    assert facts["sentence"] == said
    assert facts["late"] is True
    assert (facts["baseline"], facts["started"], facts["runs"]) == ("maxrl", 1, 18)
    assert "primary" not in {one.family for one in report.analysis.comparisons}
