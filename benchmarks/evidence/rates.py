"""The learning rate of each condition of a campaign, by two seeds that the campaign does not use.

    python benchmarks/evidence/rates.py benchmarks/evidence/length.toml             by accuracy
    python benchmarks/evidence/rates.py benchmarks/evidence/pass-at-k.toml pass@8   by another column of results.csv

Every condition runs with half, once and twice the campaign's rate on the seeds 1000 and 1001; the greatest mean of the
two decides. The rates stand in the campaign's file then, and the table that is printed in docs/replications.md. The
runs are in runs/NAME-rates; the same command goes on with them.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from retrain.api import load_campaign

SEEDS, FACTORS = [1000, 1001], (0.5, 1.0, 2.0)


def search(file: Path) -> dict[str, Any]:
    """Return the campaign of the search: every condition of the campaign in `file` with every rate."""
    data = tomli.loads(file.read_text())
    settings, loaded = data["campaign"], load_campaign(file)
    lr = loaded.configs[0].config.optimizer.lr
    conditions = [
        {**condition, "label": f"{condition['label']} lr {factor * lr:g}", "optimizer.lr": factor * lr}
        for condition in settings["conditions"]
        for factor in FACTORS
    ]
    settings |= {"name": f"{loaded.name}-rates", "seeds": SEEDS, "conditions": conditions}
    if "base" in settings:
        settings["base"] = str((file.parent / settings["base"]).resolve())
    return data


def means(results: Path, metric: str) -> dict[str, dict[str, float]]:
    """Return the mean of `metric` over the seeds, by condition and rate."""
    found: dict[str, dict[str, list[float]]] = {}
    with results.open(newline="") as file:
        for row in csv.DictReader(file):
            label, _, rate = row["condition"].rpartition(" lr ")
            found.setdefault(label, {}).setdefault(rate, []).append(float(row[metric]))
    return {label: {rate: statistics.fmean(seeds) for rate, seeds in rates.items()} for label, rates in found.items()}


if __name__ == "__main__":
    campaign = search(Path(sys.argv[1]))
    name = campaign["campaign"]["name"]
    Path("runs").mkdir(exist_ok=True)
    file = Path("runs", f"{name}.toml")
    file.write_text(tomli_w.dumps(campaign))
    subprocess.run([sys.executable, "-m", "retrain", "campaign", str(file)], check=True)
    found = means(Path("runs", name, "results.csv"), sys.argv[2] if len(sys.argv) > 2 else "accuracy")
    rates = list(next(iter(found.values())))
    print(f"| condition | {' | '.join(rates)} |\n|---{'|---' * len(rates)}|")
    for label, values in found.items():
        best = max(values, key=values.__getitem__)
        shown = (f"**{value:.3f}**" if rate == best else f"{value:.3f}" for rate, value in values.items())
        print(f"| {label} | {' | '.join(shown)} |")
