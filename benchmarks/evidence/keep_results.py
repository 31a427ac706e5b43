"""Keep the results of a campaign beside its file: its outcomes, and the area under the curve of accuracy.

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
    columns = ["condition", "seed", *(outcome.column for outcome in plan.all_outcomes)]
    columns += ["area"] * (columns[2] == "accuracy")  # it is that of the first outcome
    columns = ["task", *columns] if any(run.task for run in plan.cells) else columns
    with (campaign / "results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] != "missing"]  # a look stopped its condition
    rows = [{**row, **names[row["condition"]]} for row in rows]
    with kept.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
