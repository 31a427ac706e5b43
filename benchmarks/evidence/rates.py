"""The learning rate of each condition of a campaign, by two seeds that the campaign does not use.

    python benchmarks/evidence/rates.py benchmarks/evidence/length.toml             by accuracy
    python benchmarks/evidence/rates.py benchmarks/evidence/pass-at-k.toml pass@8   by another column of results.csv
    python benchmarks/evidence/rates.py benchmarks/evidence/lora.toml accuracy 3    rates a factor of 3 apart, not 2

Every condition but the controls runs with a lower rate, its own and a higher one on the seeds 1000 and 1001; the
greatest mean of the two decides. The rates stand in the campaign's file then, and the table that is printed in
benchmarks/RESULTS.md. The runs are in runs/NAME-rates; the same command goes on with them.
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

SEEDS = [1000, 1001]


def search(file: Path, apart: float) -> dict[str, Any]:
    """Return the campaign of the search: every condition of `file` with three rates, a factor `apart` from its own."""
    data = tomli.loads(file.read_text())
    settings, loaded = data["campaign"], load_campaign(file)
    runs = zip(loaded.conditions, loaded.configs, strict=True)
    own = {condition.method: run.config.optimizer.lr for condition, run in runs}
    controls = settings.pop("controls", [])
    conditions = [
        {**condition, "label": f"{condition['label']} lr {lr:g}", "optimizer.lr": lr}
        for condition in settings["conditions"]
        if condition["label"] not in controls
        for lr in (own[condition["label"]] * factor for factor in (1 / apart, 1.0, apart))
    ]
    settings |= {"name": f"{loaded.name}-rates", "seeds": SEEDS, "conditions": conditions}
    for key in ("baseline", "looks"):  # of the conditions and seeds that the search replaces
        settings.pop(key, None)
    if "warm_starts" in settings:
        settings["warm_starts"] = len(SEEDS)
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
    file, metric, apart = (*sys.argv[1:], *("accuracy", "2")[len(sys.argv) - 2 :])
    campaign = search(Path(file), float(apart))
    name = campaign["campaign"]["name"]
    Path("runs").mkdir(exist_ok=True)
    searched = Path("runs", f"{name}.toml")
    searched.write_text(tomli_w.dumps(campaign))
    subprocess.run([sys.executable, "-m", "retrain", "campaign", str(searched)], check=True)
    found = means(Path("runs", name, "results.csv"), metric)
    shown_rates = list[str]()
    for label, values in found.items():
        if list(values) != shown_rates:
            shown_rates = list(values)
            print(f"\n| condition | {' | '.join(shown_rates)} |\n|---{'|---' * len(shown_rates)}|")
        best = max(values, key=values.__getitem__)
        shown = (f"**{value:.3f}**" if rate == best else f"{value:.3f}" for rate, value in values.items())
        print(f"| {label} | {' | '.join(shown)} |")
