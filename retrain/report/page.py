"""Pages from the jinja2 templates in `templates/`, which share a base, a style sheet and escaping.

Pages show untrusted text, such as completions and error messages. HTML and SVG are therefore autoescaped, and in
Markdown every text goes through the macro `line`. In both, control characters become dots.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, bidirectional formatting characters, and surrogates."""


class Table(NamedTuple):
    """Columns and rows of text, which the macro `table` of HTML or Markdown pages renders.

    Attributes:
        columns: the headers; an HTML table whose headers are all empty has no header row.
        rows: rows with one text per column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]]) -> Table:
        """Build a table from rows with the same columns, each a mapping column -> text."""
        return cls([*rows[0]] if rows else [], [[*row.values()] for row in rows])

    def aligned(self) -> list[str]:
        """Return header and rows as lines for a terminal, with aligned columns."""
        every = (self.columns, *self.rows)
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in every]


def fill(template: str | Path, **content: Any) -> str:
    """Render a template. A name that the template uses and `content` lacks is an error.

    Args:
        template: a file in `templates/`, or the path of another package's template, which may extend and import
            those in `templates/`.
        content: values by name.
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
        # Exactly str: jinja's own Markup is a subclass, whose text the templates wrote.
        finalize=lambda value: _CONTROLS.sub("·", value) if type(value) is str else value,
    )
    environment.filters["inline"] = _inline
    cast("dict[str, Any]", environment.filters)["sha256"] = _sha256
    cast("dict[str, Any]", environment.filters)["fenced"] = _fenced
    return environment


def _inline(text: str) -> str:
    """Escape a text for one line of Markdown: no HTML, no end of a table cell, and no links or images."""
    # & first, because the other replacements contain one.
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return " ".join(text.replace("](", "]&#40;").replace("]:", "]&#58;").split("\n"))


def _sha256(text: str) -> str:
    """Return the hash by which a page's content security policy permits a script."""
    return b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _fenced(text: str, language: str, character: str = "`") -> str:
    """Return a text as a fenced code block of Markdown, with a fence that is longer than any in the text."""
    longest = max(map(len, re.findall(f"{character}+", text)), default=0)
    mark = character * max(3, longest + 1)
    return f"{mark}{language}\n{text}\n{mark}"


def source(name: str) -> str:
    """Return the text of a file in `templates/` as it is, such as a script."""
    return (_TEMPLATES / name).read_text("utf-8")


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: `1 run`, `5 runs`, `1,000 runs`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def percent(share: float | None) -> str:
    """Format a share as `51.6%`; None as `-`."""
    return "-" if share is None else f"{share:.1%}"


def duration(seconds: float) -> str:
    """Format a duration as `89 s`, `12 min` or `1.5 h`."""
    # Up to a minute and a half seconds are exact, and `1 min` would hide a third of it.
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
