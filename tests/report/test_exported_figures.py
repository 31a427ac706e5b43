"""Figures as files: SVG documents that stand alone, and PNG where a program that draws them is installed."""

import importlib.util
import struct
from xml.etree import ElementTree

import pytest

from retrain.report import exported_figures as export
from retrain.report.charts import Axes, hover, line_chart, polyline, svg

AXES = Axes((0.0, 10.0), (0.0, 1.0), True)
CURVE = svg(
    AXES.draw()
    + polyline(AXES, [(0.0, 0.1), (10.0, 0.9)], "curve c1")
    + hover(AXES, [(0.0, "step 0: <b>"), (10.0, "step 10")])
)
MARK = '<path class="center c1" d="M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0"/>'


def parsed(text):
    """The document; it is not well-formed otherwise."""
    return ElementTree.fromstring(text)


def test_a_drawing_becomes_a_document_with_its_colors_and_its_legend():
    text = export.standalone(export.Drawing(CURVE, [("gtpo & hicra", MARK)]))
    root = parsed(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in text
    assert "@media" not in text
    assert "hover" not in text.partition("</style>")[2]
    assert "gtpo & hicra" in "".join(root.itertext())
    assert ".curve.c1 { stroke" not in text
    assert "stroke: #d55e00" in text
    plain = parsed(export.standalone(export.Drawing(CURVE)))
    assert float(root.get("height", "0")) > float(plain.get("height", "0")) == 230


def test_rows_are_stacked_between_their_texts():
    row = '<svg class="forest" viewBox="0 0 340 26" role="img"><circle class="better" cx="9" cy="13" r="5"/></svg>'
    axis = '<svg class="forest" viewBox="0 0 340 20" role="img"><line class="axis" x1="0" y1="0" x2="9" y2="0"/></svg>'
    found = export.stacked([("rare", row, "+.01"), ("planning", row, "+.20")], axis, ("task", "difference"))
    root = parsed(export.standalone(export.Drawing(found)))
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["task", "difference", "rare", "+.01", "planning", "+.20"]
    assert len([*root.iter("{http://www.w3.org/2000/svg}circle")]) == 2
    assert root.get("class") == "forest"


def test_files_have_plain_names_and_empty_drawings_none(tmp_path):
    drawings = {
        "Accuracy: all / tasks": export.Drawing(line_chart([(0.0, 0.5), (1.0, 0.6)])),
        "nothing": export.Drawing(""),
    }
    files = export.write_figures(tmp_path / "figures", drawings)
    names = {file.name for file in files}
    assert {"accuracy-all-tasks.svg"} <= names <= {"accuracy-all-tasks.svg", "accuracy-all-tasks.png"}
    assert {file.name for file in (tmp_path / "figures").iterdir()} == names
    both = {"a+b": export.Drawing(CURVE), "a-b": export.Drawing(CURVE), "é": export.Drawing(CURVE)}
    again = export.write_figures(tmp_path / "again", both)
    assert [one.name for one in again if one.suffix == ".svg"] == ["a-b.svg", "a-b-2.svg", "figure.svg"]
    assert export.write_figures(tmp_path / "none", {"nothing": export.Drawing("")}) == []
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(importlib.util.find_spec("resvg_py") is None, reason="resvg-py is not installed")
def test_a_png_has_three_pixels_a_unit():
    image = export.png(export.standalone(export.Drawing(CURVE)))
    assert image is not None
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", image[16:24]) == (1320, 690)
