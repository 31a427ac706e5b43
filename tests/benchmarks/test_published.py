"""The published comparisons whose runs were kept are computed again from their files."""

import re
from pathlib import Path

from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict.analysis import compare
from retrain.campaign.verdict.result_files import tables_of_rows
from retrain.campaign.verdict.result_rows import rows_of_files
from retrain.campaign.verdict.sentences import p_value

ROOT = Path(__file__).parents[2]


def test_the_ablation_on_smollm2_is_that_of_its_runs():
    (table,) = tables_of_rows(rows_of_files([ROOT / "benchmarks/evidence/smollm2.csv"]), Outcome())
    names = table.conditions
    ladder = [
        (table, names[1], names[0]),
        *((table, name, names[2] if i else names[1]) for i, name in enumerate(names[2:])),
    ]
    text = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    section = text.partition("## The ablation on SmolLM2")[2].partition("\n## ")[0]
    for one in compare(ladder, "ladder"):
        row = next(line for line in section.splitlines() if line.startswith(f"| {one.condition} |"))
        mean, low, high = (f"{value:+.3f}".replace("0.", ".") for value in one.difference)
        p, corrected = (p_value(value).removeprefix("= ") for value in (one.judged.p, one.judged.corrected))
        detectable = f"{one.detectable:.3f}".removeprefix("0")
        assert f"{mean} [{low}, {high}], p {p} (corrected {corrected}): inconclusive; detectable {detectable}" in row
        shown = re.split(r" \| ", row)[1]
        values = table.values(one.condition)
        assert f"{sum(values) / len(values):.3f}".removeprefix("0") == shown
