"""One way to write a page: jinja2 templates in `templates/`, one base, one style sheet, and every text escaped.

What a page shows comes from outside (text of models, names, reasons), so autoescape is on for HTML and SVG. In Markdown
the cells of a table are escaped by the macro that writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jinja2 import Environment


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


def fill(template: str, **content: Any) -> str:
    """The text of `templates/TEMPLATE` with this content; a name that is missing is an error."""
    return _environment().get_template(template).render(content)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8"),
        autoescape=select_autoescape(["html", "svg"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


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
