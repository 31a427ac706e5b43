"""How far a campaign is, from files that grow and shrink."""

import json

import pytest

from retrain.campaign.work.lease import LeaseWatch
from retrain.campaign.work.progress import Progress


@pytest.fixture
def sweep(tmp_path):
    cells = [
        {
            "id": f"{condition}/s{seed}",
            "condition": condition,
            "seed": seed,
            "overrides": {},
            "max_steps": 10,
            "path": f"cells/{condition}/s{seed}",
        }
        for seed in (0, 1)
        for condition in ("a", "b")
    ]
    for cell in cells:
        (tmp_path / cell["path"]).mkdir(parents=True)
    (tmp_path / "plan.json").write_text(json.dumps({"cells": cells}))
    return tmp_path


def append(file, *values, key="time/step_s"):
    with file.open("a") as out:
        out.writelines(json.dumps({"step": 0, key: value}) + "\n" for value in values)


def row(progress, name):
    return next(row for row in progress.facts()["runs"] if row["id"] == name)


def test_states_steps_accuracy_and_time_left(sweep):
    progress = Progress(sweep)
    assert {row["state"] for row in progress.facts()["runs"]} == {"waiting"}
    assert progress.facts()["left_s"] is None
    LeaseWatch(sweep / "leases", 60).take("a/s0", sweep / "none")
    append(sweep / "cells/a/s0/metrics.jsonl", 2.0, 4.0)
    append(sweep / "cells/a/s0/eval.jsonl", 0.25, 0.5, key="accuracy")
    (sweep / "cells/b/s0/outcome.json").write_text('{"status": "done", "attempts": 1, "host": "here", "reason": ""}')
    (sweep / "cells/b/s1/outcome.json").write_text('{"status": "failed", "reason": "data"}')
    facts = progress.facts()
    assert (facts["total"], facts["done"], facts["failed"], facts["running"]) == (4, 1, 1, 1)
    running = row(progress, "a/s0")
    assert (running["state"], running["steps"], running["accuracy"], running["left_s"]) == ("running", 2, 0.5, 8 * 3.0)
    assert facts["left_s"] == (8 + 10) * 3.0
    assert row(progress, "b/s1")["reason"] == "data"


def test_the_time_left_counts_the_start_and_the_evaluations_of_the_jobs_that_are_done(sweep):
    LeaseWatch(sweep / "leases", 60).take("a/s0", sweep / "none")
    append(sweep / "cells/a/s0/metrics.jsonl", 1.0, 1.0)
    append(sweep / "cells/b/s0/metrics.jsonl", *[1.0] * 10)
    (sweep / "cells/b/s0/outcome.json").write_text('{"status": "done", "seconds": 50.0}')
    (sweep / "cells/b/s1/outcome.json").write_text('{"status": "failed", "reason": "data"}')
    assert Progress(sweep).facts()["left_s"] == (8 + 10) * 5.0


def test_a_finished_run_without_an_outcome_is_done_as_in_the_report(sweep):
    (sweep / "cells/b/s0").mkdir(parents=True, exist_ok=True)
    (sweep / "cells/b/s0/status.json").write_text('{"outcome": "finished"}')
    (sweep / "cells/b/s1/status.json").write_text('{"outcome": "diverged"}')
    assert Progress(sweep).facts()["done"] == 1


def test_rows_are_counted_once_and_a_half_written_one_when_it_is_whole(sweep):
    progress, file = Progress(sweep), sweep / "cells/a/s0/metrics.jsonl"
    append(file, *range(1, 5))
    assert row(progress, "a/s0")["steps"] == 4
    with file.open("a") as out:
        out.write('{"step": 4, "time/st')
    assert row(progress, "a/s0")["steps"] == 4
    with file.open("a") as out:
        out.write('ep_s": 1.0}\n')
    assert row(progress, "a/s0")["steps"] == 5
