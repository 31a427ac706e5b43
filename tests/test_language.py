"""Proxies of plain language: words, openings and identifiers that a reader has to translate.

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

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md")]
PAGES += sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem != "log")  # a log stays as it was written
PACKAGES = (
    *("adapters", "algorithms", "campaign", "cli", "config", "data", "engines"),
    *("environments", "functional", "lab", "registry", "report", "rewards", "run"),
    *("serve", "storage", "system", "tools", "tracking", "training"),
)
WORDS = re.compile(
    r"(?<!there )(?<!There )\b(?:is|are) (?:no\b(?! longer)|none\b)"
    r"|\b(?:told|mends?|mended|bears?|heard|hears?)\b"
)
OPENING = re.compile(r"(?:What|Whether|How|Who|Those|Whoever)\b")
COUNTS = {"openings": 0, "words": 0}
"""Numbers of these in all of `retrain/`."""
ALLOWED: set[tuple[str, str]] = set()
"""(file, text on the line) that may stay, at most ten."""
NAMES = {
    *("ask", "beside", "bridge", "crew", "flow", "game", "guard", "hurry", "keep_sampling", "later", "lead", "led"),
    *("player", "rank_edges", "Say", "talk", "talks", "tell", "world", "world_pool", "worlds"),
}
"""Whole identifiers, in snake case and without underscores at their ends; `Say` in its own case."""
NAME_PARTS = {"alone", "apart", "borrowed", "elsewhere", "hear", "heard", "mend", "spoken", "told"}
"""Words that no identifier has."""
ALLOWED_NAMES = {
    ("retrain/protocols.py", "ALONE"): "the ranks of a single process",
}
"""Why an identifier of a file may stay, at most ten."""


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


def defined(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every identifier that a module defines, and first the name of the module."""
    yield 1, file.parent.name if file.stem == "__init__" else file.stem
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def identifiers(file: Path) -> list[str]:
    """`FILE:LINE: NAME` of every identifier of NAMES, or with a word of NAME_PARTS."""
    place, found = str(file.relative_to(ROOT)), list[str]()
    for line, name in defined(file):
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
        if ({snake, name} & NAMES or NAME_PARTS & {*snake.split("_")}) and (place, name) not in ALLOWED_NAMES:
            found.append(f"{place}:{line}: {name}")
    return found


def modules(*packages: str) -> list[Path]:
    """The files of packages of `retrain`, or of all."""
    return sorted(file for name in packages or ("",) for file in (ROOT / "retrain" / name).rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_needs_no_translation(page):
    assert words(page) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_needs_no_translation(package):
    assert [one for file in modules(package) for one in (*words(file), *openings(file), *identifiers(file))] == []


def test_a_module_of_no_package_needs_no_translation():
    files = sorted((ROOT / "retrain").glob("*.py"))
    assert [one for file in files for one in (*words(file), *openings(file), *identifiers(file))] == []


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
    assert len(ALLOWED_NAMES) <= 10
    unused = [key for key in ALLOWED_NAMES if key[1] not in (name for _, name in defined(ROOT / key[0]))]
    assert unused == []


@pytest.mark.parametrize("text", ["# what is no answer", '"""Whether it is."""', '"mend it"', "# it is told"])
def test_the_proxies_find_what_they_look_for(text, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (file := tmp_path / "module.py").write_text(text + "\n")
    assert len([*words(file), *openings(file)]) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def told(): ...",
        "async def _hear(): ...",
        "x = [game for game in ()]",
    ],
)
def test_identifiers_are_found_in_the_syntax_tree(text, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (file := tmp_path / "module.py").write_text(text + "\n")
    assert len(identifiers(file)) == 1


def test_the_name_of_a_module_is_an_identifier(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (file := tmp_path / "borrowed.py").write_text("world_size = foretold = asked = 1\n")
    assert identifiers(file) == ["borrowed.py:1: borrowed"]


def test_good_english_passes(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (file := tmp_path / "module.py").write_text(
        '"""Return None if there is no file or there is none left; it is no longer needed."""\n'
    )
    assert [*words(file), *openings(file)] == []
