"""BibTeX of the papers that docstrings name."""

import inspect
import re

from retrain import registry
from retrain.report.bibliography import entries

DOCSTRING = """A loss.

References: Shao et al., DeepSeekMath, arXiv:2402.03300 (with std); Arora and Zanette, Training Language Models
    to Reason Efficiently, arXiv:2502.04463; MiniMax, MiniMax-M1 (CISPO), arXiv:2506.13585.
"""


def test_papers_are_told_apart_and_listed_once():
    first, second, third = entries([DOCSTRING, DOCSTRING])
    assert first.splitlines()[:4] == [
        "@misc{shao2024deepseekmath,",
        "  author = {Shao and others},",
        "  title = {{DeepSeekMath}},",
        "  year = {2024},",
    ]
    assert "author = {Arora and Zanette}" in second
    assert "title = {{Training Language Models to Reason Efficiently}}" in second
    assert "author = {MiniMax}" in third
    assert entries(["No paper."]) == []


def test_every_paper_of_every_component_has_an_entry():
    for kind in ("advantage", "transform", "loss", "algorithm", "signal"):
        for one in registry.components(kind):
            text = inspect.getdoc(one.target) or ""
            known = {found[1] for entry in entries([text]) if (found := re.search(r"eprint = \{(.*)\}", entry))}
            references = text.partition("References:")[2]
            assert known == {*re.findall(r"arXiv:(\d{4}\.\d{4,5})", references)}, one.name
