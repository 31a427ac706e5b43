"""The recording of a run for the front page."""

import gzip
import json
import re
from xml.etree import ElementTree

import pytest

from docs.recording import animated

pytestmark = pytest.mark.repository


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
