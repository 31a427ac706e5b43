"""Structural limits of the package. Code lines are the lines that are neither docstring, comment nor blank."""

from collections import Counter

import pytest

from docs.measure import ROOT, modules

pytestmark = pytest.mark.repository

PACKAGE, MODULE, FUNCTION = 16, 450, 70
"""Modules of a package; code lines of a module; code lines of a function."""
CORE_LINES = 30_784
"""Code lines of the package without lab/ and adapters/. Lower the number to what is reached; never raise it."""
DOCS_WORDS = 51_917
"""Words of docs/*.md, as `wc -w` counts them. Lower the number to what is reached; never raise it."""
VAGUE = {"one", "found", "own", "place", "known"}
"""Names that say nothing about what they hold."""
VAGUE_NAMES = 2
"""Bindings of these names in the package. Lower the number to what is reached; never raise it."""


def test_the_core_only_shrinks():
    core = [module for module in modules() if module.package not in ("lab", "adapters")]
    assert sum(len(module.code) for module in core) <= CORE_LINES


def test_the_documentation_only_shrinks():
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md"))
    assert words <= DOCS_WORDS


def test_names_say_what_they_hold():
    counts = Counter(module.package for module in modules() for name in module.bindings() if name in VAGUE)
    assert counts.total() <= VAGUE_NAMES, dict(counts)


def test_a_package_has_few_modules():
    counts = Counter(module.file.parent.relative_to(ROOT).as_posix() for module in modules())
    assert {package: count for package, count in counts.items() if count > PACKAGE} == {}


def test_a_module_is_read_in_one_sitting():
    lengths = {module.name: len(module.code) for module in modules()}
    assert {name: length for name, length in lengths.items() if length > MODULE} == {}


def test_a_function_fits_on_a_screen():
    found = {(module.name, name): length for module in modules() for name, length in module.functions()}
    assert {place: length for place, length in found.items() if length > FUNCTION} == {}


def test_module_names_are_unique():
    names = Counter(module.file.stem for module in modules() if module.file.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []


def test_class_and_type_alias_names_are_unique():
    names = Counter(name for module in modules() for name in module.type_names())
    assert [name for name, count in names.items() if count > 1] == []


def test_no_import_cycle():
    """Also within a package, and `retrain` itself; imports inside functions and under `TYPE_CHECKING` count."""
    graph = {module.name: module.imported_modules() for module in modules()}
    before = None
    while before != graph:  # drop what imports nothing that is left, and what nothing that is left imports
        before = graph
        imported = set().union(*graph.values())
        graph = {
            name: found & graph.keys() for name, found in graph.items() if found & graph.keys() and name in imported
        }
    assert graph == {}
