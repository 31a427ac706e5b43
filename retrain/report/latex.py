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
# Not between letters or digits: `gtpo-2` and `1e-5` keep their hyphen.
_NUMBER = re.compile(r"(?<![\w.])-(?=[.\d])")


def text(value: str) -> str:
    """Escape the special characters of LaTeX; a hyphen before a number becomes a minus sign."""
    # Character by character, because replacing one after the other would escape the escapes.
    escaped = "".join(_SPECIAL.get(character, character) for character in _NUMBER.sub("\N{MINUS SIGN}", value))
    return escaped.replace("\N{MINUS SIGN}", "$-$")


def tables(titled: Mapping[str, Table]) -> str:
    """Return one `table` environment for each table that has rows. It needs \\usepackage{booktabs}.

    The first column is left-aligned, the others are right-aligned.

    Args:
        titled: caption -> table.
    """
    parts: list[str] = []
    for caption, table in titled.items():
        if not table.rows:
            continue
        lines = [" & ".join(map(text, row)) + r" \\" for row in (table.columns, *table.rows)]
        # Numbers of equal decimals line up when they end at one edge.
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
