"""The table of faults names tests that exist."""

import ast

import pytest

from tests.faults.cases import CASES, ROOT, TRUST


@pytest.mark.repository
def test_every_case_names_tests_that_exist():
    missing = []
    for number, case in (*CASES.items(), *TRUST.items()):
        for test in case.tests:
            file, function = test.split("::")
            tree = ast.parse((ROOT / "tests" / file).read_text())
            if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body):
                missing.append((number, test))
    assert missing == []


def test_the_numbers_are_complete():
    assert sorted(CASES) == list(range(1, 41))
    assert list(TRUST) == [f"T{number}" for number in range(1, 26)]
