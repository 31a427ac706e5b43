"""A declaration keeps its record while its terms are the same; a later change is late, and keeps the file before."""

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
    assert (known["after"], known["runs"], known["earlier"]) == (0, 18, [])
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
    assert plan((written_out[0], written_out[1].replace("0.0", "0.5"))).plan.declared["after"] == 1


def test_a_declaration_of_version_0_3_keeps_its_time(plan):
    """Its terms have the configurations' keys as well."""
    first = plan()
    dated(first)
    stored = json.loads((first.path / "plan.json").read_text())
    stored["declared"]["terms"] |= {"baseline: training.max_steps": 40, "primary: optimizer.lr": 2e-4}
    (first.path / "plan.json").write_text(json.dumps(stored))
    start(first)
    assert plan().plan.declared["at"] == "2026-01-01T00:00:00+00:00"
    assert plan(("2e-4", "3e-4")).plan.declared["after"] == 1


def test_a_change_before_the_first_run_leaves_no_mark(plan):
    known = dated(plan())
    changed = plan(("alpha = 0.05", "alpha = 0.1")).plan.declared
    assert (changed["after"], changed["earlier"]) == (0, [])
    assert changed["at"] > known["at"]
    assert plan(('primary = "std"\n', "")).plan.declared is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('baseline = "grpo"', 'baseline = "maxrl"'),
        ('primary = "std"', 'primary = "maxrl"'),
        ("alpha = 0.05", "alpha = 0.2"),
        ("seeds = 6", "seeds = 8"),
        ("2e-4", "3e-4"),
        ('label = "std"', 'label = "std"\nseed_offset = 100'),
    ],
)
def test_every_change_of_the_terms_after_a_start_is_late_and_keeps_the_file_before(plan, old, new):
    first = plan()
    known = dated(first)
    before = (first.path / "campaign.toml").read_bytes()
    start(first, 1)  # a run of maxrl, whose configuration does not change
    directory = plan((old, new))
    late = directory.plan.declared
    assert (late["after"], late["runs"], late["earlier"]) == (1, len(directory.jobs), ["campaign-before-1.toml"])
    assert late["at"] > known["at"]
    assert late["sha256"] == hashlib.sha256((directory.path / "campaign.toml").read_bytes()).hexdigest()
    assert (directory.path / "campaign-before-1.toml").read_bytes() == before
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
    assert (late["after"], late["runs"], len(late["earlier"])) == (1, 19, 2)


def test_a_condition_that_is_removed_after_its_run_has_started_is_named(plan):
    condition = ('[[campaign.conditions]]\nlabel = "maxrl"\nadvantage_mode = "maxrl"\n', "")
    assert plan(condition).plan.removed == plan().plan.removed == (), "nothing had started"
    start(plan(), 1)
    assert plan(condition).plan.removed == plan(condition).plan.removed == ("maxrl",)
    said = "Removed after runs of theirs had started, so that a smaller family of comparisons is corrected: maxrl."
    assert said in sentences.text(analyze([read_campaign(plan(condition).path)]))
    assert plan().plan.removed == ()


def test_a_claim_on_another_task_is_late(plan):
    tasks = ("seeds = 6", 'seeds = 6\ntasks = ["rare", "decoy"]\nclaim = "rare"')
    start(plan(tasks))
    assert plan(tasks, ('claim = "rare"', 'claim = "decoy"')).plan.declared["after"] == 1


def test_a_withdrawn_declaration_is_reported_and_its_return_is_late(plan):
    start(plan())
    withdrawn = plan(('primary = "std"\n', ""))
    assert withdrawn.plan.declared["after"] == 1
    assert plan(('primary = "std"\n', "")).plan.declared == withdrawn.plan.declared
    text = sentences.text(analyze([read_campaign(withdrawn.path)]))
    assert "The declaration of a primary comparison was withdrawn at " in text
    plan(("alpha = 0.05", "alpha = 0.1"))
    back = plan().plan.declared
    assert back["earlier"] == [f"campaign-before-{number}.toml" for number in (1, 2, 3)]
    kept = [(withdrawn.path / name).read_text() for name in back["earlier"]]
    assert ["primary" in text for text in kept] == [True, False, True]
    assert ["alpha = 0.1" in text for text in kept] == [False, False, True]


def test_the_verdict_says_in_every_output_that_a_declaration_is_late(plan):
    start(plan())
    directory = plan(('baseline = "grpo"', 'baseline = "maxrl"'))
    declared = read_plan(directory.path).declared
    report = write_report(directory.path)
    said = (
        f"The primary comparison, std against maxrl, was declared late, at {declared['at']}, after 1 of 18 runs had "
        f"started (sha256 of the file: {declared['sha256'][:12]}). It is therefore corrected like the other "
        "comparisons. Earlier files of the campaign: campaign-before-1.toml."
    )
    assert said in report.text
    assert "tested alone, as declared" not in report.text
    assert said in report.files[1].read_text(encoding="utf-8")
    facts = sentences.as_json(report.analysis)["declaration"]
    assert facts["sentence"] == said
    assert facts["late"] is True
    assert (facts["baseline"], facts["started"], facts["runs"]) == ("maxrl", 1, 18)
    assert "primary" not in {one.family for one in report.analysis.comparisons}
