"""Every link of the repository's pages leads to a file and a heading that exist, as do the pages that messages name."""

import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "dev", "benchmarks", "configs") for page in (ROOT / folder).rglob("*.md")),
    ]
)
NAMED = re.compile(r"(?<![\w/])((?:docs|dev)/[\w-]+\.md)(?:#([\w-]+))?")


@cache
def anchors(page):
    """Anchors of a page and of its headings, as GitHub makes them: of equal headings the second ends with -1."""
    found = re.findall(r'<a id="([\w-]+)"', page.read_text())
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-1")
    return found


def links(page):
    """(file, anchor or "") of every relative link of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text):
        path, _, anchor = "".join(target).partition("#")
        if "://" not in path and not path.startswith("mailto:"):
            yield (page.parent / path).resolve() if path else page, anchor


def broken(found):
    return [
        f"{file.name}#{anchor}"
        for file, anchor in found
        if "reference" not in file.parts and (not file.exists() or (anchor and anchor not in anchors(file)))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken(links(page)) == []


def test_pages_that_code_names_exist():
    sources = [
        file
        for suffix in ("py", "toml", "sh")
        for folder in ("retrain", "configs", "benchmarks", "plugins")
        for file in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    named = {(ROOT / path, anchor) for file in sources for path, anchor in NAMED.findall(file.read_text())}
    assert len(named) > 5
    assert broken(named) == []


def test_a_broken_link_is_noticed(tmp_path):
    (page := tmp_path / "page.md").write_text("# A `b` - c\n[x](#a-b---c) [y](#d) [z](other.md)\n")
    assert broken(links(page)) == ["page.md#d", "other.md#"]
