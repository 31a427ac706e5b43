"""Tables for papers: LaTeX with the package booktabs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from retrain.report.page import Table

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "±": r"$\pm$",
    "<": "$<$",
    ">": "$>$",
}
_NUMBER = re.compile(r"(?<![\w.])-(?=[.\d])")


def text(value: str) -> str:
    """Return the text with the characters escaped that mean something to LaTeX; a minus before a number is one."""
    escaped = "".join(_SPECIAL.get(character, character) for character in _NUMBER.sub("\N{MINUS SIGN}", value))
    return escaped.replace("\N{MINUS SIGN}", "$-$")


def tables(found: Mapping[str, Table]) -> str:
    """Return one `table` environment for each table with rows, under its caption; \\usepackage{booktabs} is needed.

    The first column is set to the left, others to the right.
    """
    parts: list[str] = []
    for caption, table in found.items():
        if not table.rows:
            continue
        lines = [" & ".join(map(text, row)) + r" \\" for row in (table.columns, *table.rows)]
        columns = "l" + "r" * (len(table.columns) - 1)
        body = [lines[0], r"\midrule", *lines[1:]]
        parts += [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{text(caption)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    return "\n".join(["% \\usepackage{booktabs}", *parts])
