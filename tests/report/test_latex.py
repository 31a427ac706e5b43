"""Tables for papers."""

import re

from retrain.report.latex import tables, text
from retrain.report.page import Table


def test_characters_of_latex_are_text():
    assert text(r"a_b & 5% of $x {y} #1 ~ ^ \cmd") == (
        r"a\_b \& 5\% of \$x \{y\} \#1 \textasciitilde{} \textasciicircum{} \textbackslash{}cmd"
    )
    assert text("-0.5 [-0.7, .3], ±.2, p < .001") == r"$-$0.5 [$-$0.7, .3], $\pm$.2, p $<$ .001"
    assert text("grpo-s3, 2026-11-25") == "grpo-s3, 2026-11-25"


def test_every_row_has_the_cells_of_the_head():
    found = tables(
        {"one & all": Table.of([{"method": "a_b", "p": "< .05"}, {"method": "c", "p": "-"}]), "": Table.of([])}
    )
    assert found.count(r"\begin{tabular}{lr}") == found.count(r"\end{tabular}") == 1
    assert r"\caption{one \& all}" in found
    rows = re.search(r"\\toprule\n(.*)\\bottomrule", found, re.DOTALL)
    assert rows
    assert rows[1] == "method & p \\\\\n\\midrule\na\\_b & $<$ .05 \\\\\nc & - \\\\\n"
