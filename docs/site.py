"""Hooks of mkdocs: links to files outside of docs/, and formulas that browsers draw without a script or a font."""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
OUTSIDE = re.compile(r"\[([^]\n]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Replace links to files of the repository that the site lacks: by links to `repo_url`, or by their names."""
    address = f"{config.repo_url.rstrip('/')}/blob/main" if config.repo_url else ""
    shown = r"[\1](" + address + r"/\2\3)" if address else r"\1 (`\2`)"
    return OUTSIDE.sub(shown, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Draw formulas, written as $...$, as MathML."""
    return FORMULA.sub(lambda found: str(convert(unescape(found[1]))), html)
