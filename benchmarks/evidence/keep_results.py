"""Keep the results of a campaign beside its file: the outcomes and the area under the curve of results.csv.

python benchmarks/evidence/keep_results.py runs/claim-length benchmarks/evidence/length.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from retrain.campaign.plan.plan_file import read_plan

if __name__ == "__main__":
    campaign, kept = map(Path, sys.argv[1:])
    plan = read_plan(campaign)
    names = {run.condition: {"task": run.task, "condition": run.method} for run in plan.cells}
    columns = ["condition", "seed", *(outcome.column for outcome in plan.measured), "area"]
    columns = ["task", *columns] if any(run.task for run in plan.cells) else columns
    with (campaign / "results.csv").open(newline="") as file:
        rows = [{**row, **names[row["condition"]]} for row in csv.DictReader(file)]
    with kept.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, columns[not any(row["task"] for row in rows) :], "", "ignore", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)
