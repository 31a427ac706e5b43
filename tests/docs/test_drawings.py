"""Drawings of the documentation: campaigns side by side, the recording of a run, and the schedule of SEPA."""

import gzip
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.ladders import pictured
from docs.recording import animated
from docs.schedule import schedule_picture, weights
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


def test_a_recording_has_a_screen_for_every_step_and_fetches_nothing(tmp_path):
    steps = [{"step": step, "reward/mean": step / 4, "time/step_s": 1.0} for step in range(4)]
    evals = [{"step": step, "accuracy": step / 4, "ci_low": 0.0, "ci_high": 0.9} for step in (0, 4)]
    for name, rows in (("metrics.jsonl", steps), ("eval.jsonl", evals)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rollouts").mkdir()
    with gzip.open(tmp_path / "rollouts" / "step-000002.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "1+1=", "text": "eleven", "reward": 0.5}) + "\n")
    picture = animated(tmp_path)
    groups = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}g")
    said = ["".join(group.itertext()) for group in groups if group.get("class") == "frame"]
    assert [re.search(r"\d/4", text)[0] for text in said] == ["1/4", "2/4", "3/4", "4/4"]
    assert ["eleven" in text for text in said] == [False, False, True, True]
    assert ["100.0%" in text for text in said] == [False, False, False, True]
    assert "url(http" not in picture


ROOT = Path(__file__).parents[2]


def test_the_weight_is_full_at_four_fifths_however_late_the_gate_opens():
    for gate in (0, 60):
        drawn = weights(gate)
        assert (len(drawn), drawn[gate + 10], drawn[159] < 1, drawn[160]) == (200, 0, True, 1)


def test_the_picture_of_the_page_is_the_schedule_of_the_code():
    assert (ROOT / "docs" / "images" / "sepa.svg").read_text() == schedule_picture()
