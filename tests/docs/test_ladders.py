"""Campaigns side by side, as one drawing."""

from xml.etree import ElementTree

import pytest

from docs.ladders import pictured
from tests.campaign.tables import write_campaign

pytestmark = pytest.mark.repository


def test_every_campaign_has_its_curves_and_a_row_for_each_change(tmp_path):
    conditions = ("grpo", "maxrl", "maxrl+gtpo")
    effects = {"first": {"maxrl": 0.3}, "second": {"maxrl": 0.0}}
    directories = [
        write_campaign(
            tmp_path / name, conditions=conditions, effects={"grpo": 0, "maxrl+gtpo": 0, **of}, failed=(), missing=()
        )
        for name, of in effects.items()
        if not (tmp_path / name).mkdir()
    ]
    picture = pictured(directories)
    drawn = ElementTree.fromstring(picture)
    texts = ["".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in ("first", "second", "maxrl", "gtpo")] == [
        *("first", "maxrl", "gtpo"),
        *("second", "maxrl", "gtpo", "maxrl"),  # the last is the legend's
    ]
    kinds = [mark.get("class") for mark in drawn.iter("{http://www.w3.org/2000/svg}path")]
    assert [kind for kind in kinds if kind and kind.endswith(" mark")] == [
        "better mark",
        "worse mark",
        "open mark",
        "open mark",
    ]
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
