"""BibTeX of the papers that the docstrings of components name."""

from __future__ import annotations

import re
from collections.abc import Sequence

_REFERENCES = re.compile(r"References:\s*(.*)", re.DOTALL)
_PAPER = re.compile(
    # Ids have four digits after the point until 2014, and five since.
    r"(?P<author>[A-Z][^,.;()]*?)( et al\.| and (?P<second>[A-Z]\w+))?, (?P<title>[^;]*?), arXiv:(?P<id>\d{4}\.\d{4,5})"
)


def entries(docstrings: Sequence[str]) -> list[str]:
    """Return a BibTeX entry for every distinct paper with an arXiv id, in the order of the docstrings.

    A docstring names a paper as `References: Shao et al., DeepSeekMath, arXiv:2402.03300.` The year comes from the id,
    and the title is the short one of the docstring.
    """
    entries: dict[str, str] = {}
    for docstring in docstrings:
        listed = _REFERENCES.search(docstring)
        # Docstrings break lines within a reference.
        for paper in _PAPER.finditer(" ".join(listed[1].split()) if listed else ""):
            # Several components cite one paper, with titles of different length; the first decides.
            entries.setdefault(paper["id"], _entry(paper))
    return list(entries.values())


def _entry(paper: re.Match[str]) -> str:
    surname = paper["author"].split()[-1]
    # The first two digits of an arXiv id are its year; ids of this form exist since 2007.
    year = f"20{paper['id'][:2]}"
    word = next((word for word in re.findall(r"[A-Za-z]{4,}", paper["title"])), "paper")
    author = f"{paper['author']} and {paper['second'] or 'others'}" if paper[2] else paper["author"]
    return "\n".join(
        [
            f"@misc{{{surname.lower()}{year}{word.lower()},",
            f"  author = {{{author}}},",
            f"  title = {{{{{paper['title']}}}}},",
            f"  year = {{{year}}},",
            f"  eprint = {{{paper['id']}}},",
            "  archivePrefix = {arXiv},",
            f"  url = {{https://arxiv.org/abs/{paper['id']}}},",
            "}",
        ]
    )
