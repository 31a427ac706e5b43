"""Tables of the pages are those of the stored runs."""

import pytest

from benchmarks.evidence import spread
from benchmarks.evidence.ablations import ABLATIONS, table
from benchmarks.results import read


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_results_show_the_table_of_the_runs(name):
    assert read(name) == "\n".join(table(name))


def test_statistics_shows_the_spread_over_seeds():
    assert read("spread", spread.PAGE) == spread.table()
