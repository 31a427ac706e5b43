"""One way to write a page: jinja2 templates in `templates/`, one base, one style sheet, and every text escaped.

What a page shows comes from outside (text of models, names, reasons), so autoescape is on for HTML and SVG, and in
Markdown each text goes through the macro `line`. Control characters are dots in both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tabs and line ends, what turns the direction of writing, and halves of characters."""


class Table(NamedTuple):
    """Columns and rows of text, written by the macro `table` of HTML pages or of Markdown.

    Attributes:
        columns: the head; empty strings throughout mean no head.
        rows: one text per column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]]) -> Table:
        """A table from rows that have the same columns, each a mapping of column to text."""
        return cls([*rows[0]] if rows else [], [[*row.values()] for row in rows])

    def aligned(self) -> list[str]:
        """Return head and rows as lines for a terminal, with columns of one width."""
        every = (self.columns, *self.rows)
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in every]


def fill(template: str | Path, **content: Any) -> str:
    """Text of a template with this content; a missing name is an error.

    Args:
        template: a file of `templates/` here, or the path of another package's template, which may
            extend and import those.
    """
    path = _TEMPLATES / template
    return _environment(path.parent).get_template(path.name).render(content)


@cache
def _environment(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader([folder, _TEMPLATES], encoding="utf-8"),
        autoescape=select_autoescape(["html", "svg"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: _CONTROLS.sub("·", value) if type(value) is str else value,
    )
    environment.filters["inline"] = _inline
    cast("dict[str, Any]", environment.filters)["fenced"] = _fenced
    return environment


def _inline(text: str) -> str:
    """A text as one line of Markdown: no HTML, no cell's end, and neither link nor image, which would be fetched."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return " ".join(text.replace("](", "]&#40;").replace("]:", "]&#58;").split("\n"))


def _fenced(text: str, language: str, character: str = "`") -> str:
    """A text as a block of code in Markdown, whose end no line of the text is."""
    longest = max(map(len, re.findall(f"{character}+", text)), default=0)
    mark = character * max(3, longest + 1)
    return f"{mark}{language}\n{text}\n{mark}"


def plural(count: int, noun: str) -> str:
    """`1 run`, `5 runs`, `1,000 runs`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def percent(share: float | None) -> str:
    """`51.6%`; `-` for None."""
    return "-" if share is None else f"{share:.1%}"


def duration(seconds: float) -> str:
    """`89 s`, `12 min`, `1.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
