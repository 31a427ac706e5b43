"""The mutants still fit the source that they change."""

import ast

import pytest

from tests.mutants import MUTANTS, ROOT

pytestmark = pytest.mark.repository


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_the_source_and_has_tests(mutant):
    assert mutant.source(ROOT) != (ROOT / "retrain" / mutant.file).read_text()
    ast.parse(mutant.source(ROOT))
    assert all((ROOT / "tests" / test).exists() for test in mutant.tests)
