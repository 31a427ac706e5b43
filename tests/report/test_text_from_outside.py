"""Text of models or of other people in pages: no HTML, no control character, no image that would be fetched."""

import gzip
import json
import os

import pytest
from markdown_it import MarkdownIt

from retrain.config.schema import Config
from retrain.errors import StorageError
from retrain.report.charts import stacked_chart
from retrain.report.model_card import CardFacts, render_adapter_card, render_card
from retrain.report.page import Table, fill
from retrain.storage.run_files import read_rows
from retrain.system.records import read_json

REFRESH = '<meta http-equiv="refresh" content="0;url=http://evil">'


def test_names_of_metrics_are_text_in_charts():
    drawing = stacked_chart([0.0, 1.0], {f"{REFRESH}\x1b[2J\u202e": [1.0, 2.0]})
    assert "<meta" not in drawing
    assert "&lt;meta" in drawing
    assert not {"\x1b", "\u202e"} & {*drawing}


NOTHING = Table([], [])
PAGE = {
    "title": "a", "headline": "", "sentences": [], "remarks": [], "scope": "", "note": "", "measured": "",
    "differences": NOTHING, "described": NOTHING, "added": [], "conditions": [], "costs": NOTHING, "runs": [],
    "commands": [],
}  # fmt: skip
"""A page of a comparison with nothing in it."""


@pytest.mark.parametrize("text", ["![b](http://evil/b.png)", "[a][b]\n[b]: http://evil", "x|y", f"{REFRESH}\n# big"])
def test_markdown_shows_text_as_text(text):
    said = dict.fromkeys(("title", "headline", "scope", "note", "measured"), text)
    tables = {name: [(text, Table(["a"], [[text]]))] for name in ("conditions", "runs")}
    page = fill("campaign.md", **{**PAGE, **said, **tables, "sentences": [text], "remarks": [text]})
    for alive in ("](http", "]: http", "<meta", "x|y", "\n# big"):
        assert alive not in page


@pytest.mark.parametrize(
    "evil", ["\n```\n![b](http://evil/b.png)\n```", "\n~~~\n![b](http://evil/b.png)", "`![b](http://evil/b.png)`"]
)
def test_no_text_ends_the_code_that_it_is_shown_as(evil):
    page = fill("campaign.md", **{**PAGE, "commands": [f"retrain campaign '{evil}'"]})
    assert "<img" not in MarkdownIt().render(page)
    config = Config().model_dump(mode="json")
    config["model"] = {**config["model"], "path": f"a{evil}"}
    facts = CardFacts(name=evil, config=config, evaluations=[], steps=1, adapter=True)
    for card in (render_card(facts), render_adapter_card(facts, f"b{evil}"), render_adapter_card(facts, f"..{evil}")):
        assert "<img" not in MarkdownIt().render(card.partition("\n---\n")[2])


def test_escape_characters_are_dots_in_pages():
    page = fill("campaign.md", **{**PAGE, "title": "a\x1b[31mb\u202ec"})
    assert page.lstrip().startswith("# a·[31mb·c")


def test_what_is_no_plain_file_is_neither_followed_nor_waited_for(tmp_path):
    good = tmp_path / "metrics.jsonl"
    good.write_text(json.dumps({"step": 0}) + "\n")
    assert read_rows(good) == [{"step": 0}]
    (tmp_path / "eval.jsonl").symlink_to(good)
    os.mkfifo(tmp_path / "status.jsonl")
    for name, reason in (("eval.jsonl", "it is a link"), ("status.jsonl", "it is not a regular file")):
        with pytest.raises(StorageError, match=reason):
            read_rows(tmp_path / name)


def test_a_file_that_unpacks_to_a_thousand_times_its_size_is_refused(tmp_path):
    bomb = tmp_path / "step-000000.jsonl.gz"
    bomb.write_bytes(gzip.compress(b" " * (70 << 20)))
    with pytest.raises(StorageError, match="holds more than 64 MB"):
        read_rows(bomb)


@pytest.mark.parametrize(("name", "read"), [("status.json", read_json), ("metrics.jsonl", read_rows)])
def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path, name, read):
    huge = tmp_path / name
    huge.touch()
    os.truncate(huge, 1 << 40)
    with pytest.raises(StorageError, match="holds more than"):
        read(huge)
