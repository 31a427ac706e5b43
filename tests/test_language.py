"""Proxies of plain language: words and openings that a reader has to translate.

The documentation, README, and the packages of PACKAGES hold none of them; `retrain/` as a whole holds no more than
COUNTS. A proxy is a servant and not the judge: rewrite the sentence instead of replacing the word.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md")]
PAGES += sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem != "log")  # a log stays as it was written
PACKAGES = (
    "adapters",
    "algorithms",
    "campaign",
    "cli",
    "config",
    "data",
    "engines",
    "environments",
    "functional",
    "registry",
    "report",
    "rewards",
    "serve",
    "storage",
    "system",
    "tools",
    "tracking",
)
WORDS = re.compile(
    r"(?<!there )(?<!There )\b(?:is|are) no\b(?! longer)|\b(?:is|are) none\b"
    r"|\b(?:told|mends?|mended|bears?|heard|hears?)\b"
)
OPENING = re.compile(r"(?:What|Whether|How|Who|Those|Whoever)\b")
COUNTS = {"openings": 38, "words": 10}
"""Numbers of these in all of `retrain/`."""
ALLOWED: set[tuple[str, str]] = set()
"""(file, text on the line) that may stay, at most ten."""


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Lines of prose: of a page all but its code; of a module its comments, docstrings and messages."""
    text = file.read_text()
    if file.suffix == ".md":
        text = re.sub(r"^```.*?^```|`[^`\n]+`", lambda code: re.sub(r"[^\n]", "", code[0]), text, flags=re.S | re.M)
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for number, line in enumerate(token.string.splitlines()):
                yield token.start[0] + number, line


def words(file: Path) -> list[str]:
    """`FILE:LINE: WORD` of every word that a reader has to translate."""
    name = str(file.relative_to(ROOT))
    return [
        f"{name}:{number}: {found[0]}"
        for number, line in prose(file)
        for found in WORDS.finditer(line)
        if not any(name == place and text in line for place, text in ALLOWED)
    ]


def openings(file: Path) -> list[str]:
    """`FILE:LINE: OPENING` of every docstring that begins with a question word or a pronoun."""
    return [
        f"{file.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if OPENING.match(text := node.value.value.strip())
    ]


def modules(*packages: str) -> list[Path]:
    """The files of packages of `retrain`, or of all."""
    return sorted(file for name in packages or ("",) for file in (ROOT / "retrain" / name).rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_needs_no_translation(page):
    assert words(page) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_needs_no_translation(package):
    assert [found for file in modules(package) for found in (*words(file), *openings(file))] == []


def test_the_others_do_not_get_worse():
    """Lower the numbers when they fall; a package without any goes into PACKAGES."""
    found = {"openings": 0, "words": 0}
    for file in modules():
        found["openings"] += len(openings(file))
        found["words"] += len(words(file))
    assert {kind: (count, "rewrite the new ones") for kind, count in found.items() if count > COUNTS[kind]} == {}


def test_the_list_of_exceptions_is_short_and_used():
    assert len(ALLOWED) <= 10
    assert [(place, text) for place, text in ALLOWED if text not in (ROOT / place).read_text()] == []


@pytest.mark.parametrize("text", ["# what is no answer", '"""Whether it is."""', '"mend it"', "# it is told"])
def test_the_proxies_find_what_they_look_for(text, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (file := tmp_path / "module.py").write_text(text + "\n")
    assert len([*words(file), *openings(file)]) == 1


def test_good_english_passes(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (file := tmp_path / "module.py").write_text('"""Return None if there is no file; it is no longer needed."""\n')
    assert [*words(file), *openings(file)] == []
