"""Figures of a report as files: SVG that needs no style sheet, and PNG if resvg-py is installed."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

from retrain.report.charts import label
from retrain.system.files import staged, write_text

FOLDER = "figures"
"""Name of the directory next to a report."""

_STYLES = Path(__file__).parent / "templates" / "style.css"
_COLORS = 16
"""Number of colors of conditions in the style sheet."""
_ZOOM = 3.0
"""Pixels of the PNG per unit of the drawing: 300 dpi at 100 units per inch."""
_LINE, _KEY = 18, 130
"""Height of a line of the legend, and width of an entry."""

_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_VARIABLE = re.compile(r"var\((--[\w-]+)\)")
# Tooltips need a browser; other programs may draw their strips.
_HOVER = re.compile(r'<rect class="hover".*?</rect>|<title>.*?</title>', re.DOTALL)
_OPENING = re.compile(r'<svg\b[^>]*viewBox="([-\d.]+) ([-\d.]+) ([\d.]+) ([\d.]+)"[^>]*>')
_UNSAFE = re.compile(r"[^a-z0-9]+")


class Drawing(NamedTuple):
    """An inline SVG element of a page.

    Attributes:
        svg: the element; "" for an empty drawing.
        keys: (text, mark as SVG around the origin) of each entry of its legend.
    """

    svg: str
    keys: Sequence[tuple[str, str]] = ()


def write_figures(folder: Path, drawings: Mapping[str, Drawing]) -> list[Path]:
    """Write every drawing that is not empty as NAME.svg, and as NAME.png if resvg-py is installed.

    Args:
        folder: directory to write to, which is created.
        drawings: name -> drawing; the letters and digits of the name become the name of the file.
    Returns:
        Paths of the files.
    Raises:
        OSError: a file cannot be written; inside `system.files.writing` it becomes a StorageError.
    """
    files: list[Path] = []
    for name, drawing in drawings.items():
        if not drawing.svg:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        document = standalone(drawing)
        file = _unused(folder, name, files)
        write_text(file, document)
        files.append(file)
        if (image := png(document)) is not None:
            with staged(file.with_suffix(".png")) as stage:
                stage.write_bytes(image)
            files.append(file.with_suffix(".png"))
    return files


def _unused(folder: Path, name: str, files: Sequence[Path]) -> Path:
    """Return the path of a figure. Two names with the same letters and digits get different paths."""
    plain = _UNSAFE.sub("-", name.lower()).strip("-") or "figure"
    paths = (folder / f"{plain}{f'-{number}' if number > 1 else ''}.svg" for number in count(1))
    # Only files of this call count: an earlier report's figures are to be replaced.
    return next(path for path in paths if path not in files)


def png(svg: str) -> bytes | None:
    """Render a standalone SVG as a PNG with 3 pixels per unit; None if resvg-py is not installed."""
    if importlib.util.find_spec("resvg_py") is None:
        return None
    return bytes(importlib.import_module("resvg_py").svg_to_bytes(svg_string=svg, zoom=_ZOOM))


def standalone(drawing: Drawing) -> str:
    """Return the drawing as an SVG document on white, with its styles and its legend, and without tooltips."""
    (x, y, width, height), body = _opened(_HOVER.sub("", drawing.svg))
    legend, lines = _legend(drawing.keys, x, y + height, width)
    whole = height + lines * _LINE
    # Rules of forests begin with that class, which the outer element of a file must then have.
    kind = ' class="forest"' if 'class="forest"' in drawing.svg.partition(">")[0] else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{x:g} {y:g} {width:g} {whole:g}" '
        f'width="{width:g}" height="{whole:g}"{kind}>\n<style>{_styles()}</style>\n'
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{whole:g}" fill="#ffffff"/>{body}{legend}</svg>\n'
    )


def _opened(svg: str) -> tuple[tuple[float, ...], str]:
    """Return the viewBox (x, y, width, height) of an SVG element, and its content."""
    opening = _OPENING.search(svg)
    assert opening is not None, "every chart has a viewBox"
    return tuple(map(float, opening.groups())), svg[opening.end() : svg.rindex("</svg>")]


def stacked(rows: Sequence[tuple[str, str, str]], axis: str, titles: tuple[str, str]) -> str:
    """Return one SVG element with the drawings below each other, each between two texts, and the axis at the bottom.

    Args:
        rows: (text on the left, SVG element, text on the right).
        axis: SVG element of the same width as those of the rows; "" for none.
        titles: headers of both columns of text.
    """
    elements = [_opened(svg) for svg in (*(svg for _, svg, _ in rows), *([axis] if axis else []))]
    # SVG has no text layout: 7 units are a wide estimate for a character of 11 pixels.
    columns = [[titles[0], *(left for left, _, _ in rows)], [titles[1], *(right for _, _, right in rows)]]
    left, right = (7.0 * max(map(len, column)) + 12 for column in columns)
    wide = max((width for (_, _, width, _), _ in elements), default=0.0)
    parts = [label("start", (4, 17), titles[0]), label("start", (left + wide + 8, 17), titles[1])]
    # Below the header.
    y = 26.0
    for index, ((_, _, _, height), content) in enumerate(elements):
        parts.append(f'<g transform="translate({left:.1f} {y:.1f})">{content}</g>')
        if index < len(rows):
            middle = y + height / 2 + 4
            parts.append(label("start", (4, middle), rows[index][0]))
            parts.append(label("start", (left + wide + 8, middle), rows[index][2]))
        y += height
    box = f"0 0 {left + wide + right:.0f} {y + 6:.0f}"
    return f'<svg class="forest" viewBox="{box}" role="img">{"".join(parts)}</svg>'


def _legend(keys: Sequence[tuple[str, str]], x: float, y: float, width: float) -> tuple[str, int]:
    """Return the marks with their texts, and the number of lines that they take."""
    across = max(1, int(width // max([_KEY, *(7 * len(text) + 30 for text, _ in keys)])))
    parts: list[str] = []
    for index, (text, mark) in enumerate(keys):
        left = x + 14 + width / across * (index % across)
        top = y + _LINE * (index // across) + 8
        parts.append(f'<g transform="translate({left:.1f} {top:.1f})">{mark}</g>')
        parts.append(label("start", (left + 12, top + 4), text))
    # The negated floor division rounds up.
    return "".join(parts), -(-len(keys) // across)


@cache
def _styles() -> str:
    """Return the rules of the style sheet for drawings, with the light colors instead of variables.

    Programs that draw SVG outside a browser support neither variables nor media queries.
    """
    sheet = _STYLES.read_text(encoding="utf-8")
    # The colors before the first media query are those of light pages; paper is white.
    values = dict(re.findall(r"(--[\w-]+):\s*([^;]+);", sheet.partition("@media")[0]))
    # The sheet's comments are the names of its sections, of which drawings need two.
    named = re.split(r"/\* (.+) \*/", sheet)
    sections = dict(zip(named[1::2], named[2::2], strict=True))
    drawings = sections["charts"] + sections["conditions of a campaign"].partition("@media")[0]
    rules = ["text { font-family: Helvetica, Arial, 'DejaVu Sans', sans-serif; font-size: 11px; }"]
    for selectors, body in _RULE.findall(drawings):
        for selector in map(str.strip, selectors.split(",")):  # but the size of an element of a page
            if not selector.startswith("svg") and re.match(
                r"(\.forest )?[\w]*\.[\w-]+(\[[^]]*\])?$|\.forest circle$", selector
            ):
                rules += _resolved(selector, body.strip(), values)
    return "\n".join(rules)


def _resolved(selector: str, body: str, values: Mapping[str, str]) -> Iterator[str]:
    """Yield the rule with values instead of variables; one rule for each condition if it uses the condition's color."""
    # A file has no variables to set and no other files to load.
    if "--c:" in body or "url(" in body:
        return
    if "var(--c)" not in body:
        yield f"{selector} {{ {_VARIABLE.sub(lambda match: values[match[1]], body)} }}"
        return
    for index in range(_COLORS):
        color = body.replace("var(--c)", values[f"--c{index}"])
        plain = selector.partition("[")[0]
        yield f"{plain}.c{index} {{ {_VARIABLE.sub(lambda match: values[match[1]], color)} }}"
