"""A hook of mkdocs: formulas, written as $...$, become MathML, which browsers draw without a script or a font."""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """The page with its formulas drawn."""
    return FORMULA.sub(lambda found: str(convert(unescape(found[1]))), html)
