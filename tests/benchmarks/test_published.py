"""The table of the five conditions in benchmarks/RESULTS.md is that of the stored runs."""

import pytest

from benchmarks.evidence.ablations import ABLATIONS, table
from benchmarks.results import read


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_results_show_the_table_of_the_runs(name):
    assert read(name) == "\n".join(table(name))
