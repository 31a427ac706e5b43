"""The drawing of SEPA's schedule."""

from pathlib import Path

import pytest

from docs.schedule import schedule_picture, weights

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]


def test_the_weight_is_full_at_four_fifths_however_late_the_gate_opens():
    for gate in (0, 60):
        drawn = weights(gate)
        assert (len(drawn), drawn[gate + 10], drawn[159] < 1, drawn[160]) == (200, 0, True, 1)


def test_the_picture_of_the_page_is_the_schedule_of_the_code():
    assert (ROOT / "docs" / "images" / "sepa.svg").read_text() == schedule_picture()
