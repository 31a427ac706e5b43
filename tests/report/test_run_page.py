"""The report is complete, self-contained, and lets no text of a model out of its quotes."""

import base64
import hashlib
import json
import re
import threading
from html.parser import HTMLParser

import pytest

from retrain.config.schema import Checkpoint
from retrain.errors import UserCodeError
from retrain.report.page import source
from retrain.report.run_page import follow, render, write_report
from retrain.report.run_summary import status
from retrain.storage.run_directory import RunDirectory
from tests.full_disk import run_script
from tests.waiting import until

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "line", "circle", "polyline", "polygon", "img", "br", "input"}


def rollout(reward, text="2+2=4", **changes):
    tokens = list(text)
    row = {
        "problem_id": "p",
        "prompt": "2+2?",
        "text": text,
        "group": 0,
        "reward": reward,
        "correct": None if reward is None else reward > 0.5,
        "completion_ids": [1] * len(tokens),
        "tokens": tokens,
        "advantages": [0.5 if reward else -0.25] * len(tokens),
        "planning": [1] + [0] * (len(tokens) - 1),
    }
    return row | changes


def evaluation(step, accuracy, **changes):
    row = {"step": step, "accuracy": accuracy, "ci_low": accuracy - 0.05, "ci_high": accuracy + 0.05, "problems": 256}
    return row | {"avg_tokens": 12.0, "truncated": 0.0, "greedy_accuracy": 0.5, "pass@4": 0.9} | changes


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "my-run"
    with RunDirectory(path, "new", Checkpoint(), lambda event, details: None) as directory:
        resolved = {"training": {"max_steps": 30, "note": HOSTILE}}
        directory.write_config(f"[training]\n# {HOSTILE}\n", {"config": resolved, "plugins": {}})
        directory.write_environment({"python": "3.11", "devices": [], "git": None, "packages": {"torch": "2"}})
        directory.append("eval.jsonl", evaluation(0, 0.2))
        for step in range(30):
            row = {"step": step, "reward/mean": step / 30, "reward/accuracy": step / 30, "tokens/response": 10.0}
            row |= {"groups/informative": 0.5, "policy/entropy": 1.0, "grad/norm": float("nan") if step == 3 else 1.0}
            row |= {"loss/total": step / 30, "optim/lr": 1e-4, "reward/exact": 0.1, "reward/format": step / 30}
            row |= {"time/rollout_s": 0.5, "time/update_s": 0.25, "time/step_s": 0.8, "time/tokens_per_s": 9.0}
            directory.append("metrics.jsonl", row | {"tokens/sampled": 100.0})
        directory.write_rollouts(
            0,
            [rollout(1.0, prompt=HOSTILE), rollout(0.0, HOSTILE, prompt=HOSTILE, tokens=[HOSTILE], advantages=[-1.0])],
        )
        directory.write_rollouts(20, [rollout(None, advantages=None, group=1), rollout(None, "a\nb", group=1)])
        directory.append("eval.jsonl", evaluation(30, 0.8))
        directory.save_checkpoint(30, {"loop": {"step": 30}})
    return path


class Checker(HTMLParser):
    """Fails on tags that do not nest, on scripts, and on anything that would be fetched."""

    def __init__(self):
        super().__init__()
        self.stack, self.text = [], []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "img", "iframe", "link", "object", "embed")
        for name, value in attributes:
            assert not name.startswith("on")
            assert name != "src"
            assert name != "href" or (tag == "a" and re.fullmatch(r"[\w/%+-]+\.html", value))
            assert "url(" not in (value or "")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        if self.stack.pop() != tag:
            raise AssertionError(f"</{tag}> closes nothing")

    def handle_data(self, data):
        self.text.append(data)


def checked(html, script=""):
    """The text of a page. The only script is the given one, by its hash."""
    if script:
        assert html.count(f"<script>{script}</script>") == 1
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in html
        html = html.replace(f"<script>{script}</script>", "")
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.stack == []
    return "".join(checker.text)


def test_findings_come_before_the_curves(run):
    page = checked(render(run))
    assert "Looked at" not in page  # a run of an earlier version, or with [logging] findings = false
    facts = json.loads((run / "status.json").read_text()) | {"looked_at": ["no_update", "cut_off"]}
    (run / "status.json").write_text(json.dumps(facts))
    page = checked(render(run))
    assert page.index("No findings. Looked at: no_update, cut_off.") < page.index("Curves")
    one = {"name": "cut_off", "step": 10, "text": f"more <b> {HOSTILE}", "page": "retrain help cut_off"}
    (run / "status.json").write_text(json.dumps(facts | {"findings": [one]}))
    page = checked(render(run))
    assert page.index("1 finding") < page.index("retrain help cut_off") < page.index("Curves")
    assert "More <b> " in page
    assert "Looked at: no_update, cut_off." in page


def test_the_report_is_well_formed_complete_and_stable(run):
    html = write_report(run).read_text(encoding="utf-8")
    assert html == render(run)
    text = checked(html)
    for part in (
        "my-run",
        "finished, 30 of 30 steps",
        "Held-out accuracy rose from 20.0% to 80.0% (+60.0 points, 95% interval +52.9 to +67.1), on 256 problems in 30",
        "Informative groups",
        "Gradient norm",
        "Entropy",
        "Tokens per response",
        "Loss",
        "Reward, exact",
        "Reward, format",
        "Seconds per step",
        "rollout",
        "pass@4",
        "Early: step 0",
        "Late: step 20",
        "not scored",
        "python",
        "torch 2",
        "Resolved, with every default",
    ):
        assert part in text, part
    assert html.count("<svg") == 11
    assert "Learning rate" not in text, "it never changes"
    assert "step</text>" in html
    assert "nan" not in re.sub(r"<pre>.*?</pre>", "", html)
    assert "default-src 'none'" in html


def test_hostile_text_stays_text_wherever_it_comes_from(run):
    html = render(run)
    assert "<script" not in html
    assert "<img" not in html
    assert HOSTILE in checked(html)  # prompt, completion, configuration: shown as it was written
    assert html.count("&lt;script&gt;") == 4  # prompt, token, config.toml, config.resolved.json


def test_credit_is_shown_as_color_relative_to_the_step(run):
    html = render(run)
    assert html.count('class="up planning" title="advantage +0.5" style="--a:0.30"') == 1
    assert html.count('class="up" title="advantage +0.5" style="--a:0.30"') == 4
    assert 'class="down planning" title="advantage -1" style="--a:0.60"' in html
    assert "↵\n" in html


def test_metrics_of_a_users_component_are_drawn_and_all_are_listed(run):
    path = run / "metrics.jsonl"
    path.write_text("".join(json.dumps(json.loads(line) | {"damp/rows": 7.0}) + "\n" for line in path.open()))
    text = checked(render(run))
    assert text.count("damp/rows") >= 2, "a chart and a row of the table"
    assert text.count("tokens/sampled") == 1, "a row of the table"


def test_status_while_running_after_a_kill_and_after_an_error(tmp_path):
    path = tmp_path / "a"
    with RunDirectory(path, "new", Checkpoint(), lambda event, details: None) as directory:
        assert status(path)["steps"] == 0
        directory.write_config("", {"config": {"training": {"max_steps": 10}}, "plugins": {}})
        for step in range(4):
            directory.append("metrics.jsonl", {"step": step, "reward/mean": 0.5, "time/step_s": 2.0})
        found = status(path)
        assert found["state"] == "running"
        assert found["eta_s"] == pytest.approx(12.0)
        assert found["reward"] == 0.5
        (path / "lock").write_text("")
        assert status(path)["state"] == "killed"
        checked(render(path))
    with (
        pytest.raises(UserCodeError, match="mine"),
        RunDirectory(path, "fresh", Checkpoint(), lambda event, details: None),
    ):
        raise UserCodeError("reward mine.py raised")
    assert status(path)["state"] == "failed"
    assert status(path)["error"] == "reward mine.py raised"
    assert "failed, 0 steps: reward mine.py raised" in checked(render(path))


def test_a_run_of_one_stored_step_and_no_evaluation(tmp_path):
    path = tmp_path / "a"
    with RunDirectory(path, "new", Checkpoint(), lambda event, details: None) as directory:
        directory.append("metrics.jsonl", {"step": 0, "reward/mean": 0.5})
        directory.write_rollouts(0, [rollout(1.0, "", tokens=[], advantages=[])])
    text = checked(render(path))
    assert "Early: step 0" in text
    assert "Late" not in text
    assert "(empty)" in text


FULL = """
from retrain.cli.main import main

sys.argv[0] = "retrain"
fill(2_000)
main()
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kept", [True, False])
def test_a_full_disk_ends_with_6_and_keeps_the_report_that_is_there(run, kept):
    if kept:
        write_report(run)
        before = (run / "report.html").read_text()
    done = run_script(FULL, "report", run, code=6)
    assert "report.html cannot be written: File too large; free some space" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert (run / "report.html").read_text() == before if kept else not (run / "report.html").exists()
    assert not list(run.glob(".tmp*"))


def test_a_followed_run_has_a_page_that_reloads_until_it_ends(tmp_path):
    path, page = tmp_path / "run", tmp_path / "run" / "report.html"
    with RunDirectory(path, "new", Checkpoint(), lambda event, details: None) as directory:
        directory.append("metrics.jsonl", {"step": 0, "reward/mean": 0.25})
        thread = threading.Thread(target=follow, args=(path, 0.01))
        thread.start()
        until(lambda: page.exists() and "0.25" in page.read_text())
        assert 'http-equiv="refresh" content="0.01"' in page.read_text()
        directory.append("metrics.jsonl", {"step": 1, "reward/mean": 0.125})
        until(lambda: "step 1: 0.125" in page.read_text())
    thread.join()
    assert 'http-equiv="refresh"' not in page.read_text()
    assert "step 1: 0.125, mean 0.125" in page.read_text()


def test_the_pointer_shows_values_and_samples_have_their_answer_and_parts(run):
    with RunDirectory(run, "auto", Checkpoint(), lambda event, details: None) as directory:
        parts = {"exact": 1.0, "format": 0.25, "unsure": None}
        directory.write_rollouts(29, [rollout(1.25, answer="the <4>", parts=parts), rollout(0.0, answer="the <4>")])
    html = render(run)
    assert "<title>step 29: 96.7%, mean 96.7%</title>" in html
    assert "<title>step 30: 80.0% (75.0% to 85.0%); dashed: 50.0%</title>" in html
    text = checked(html)
    assert "reward 1.250, exact 1, format 0.25, right" in text
    assert "answer: the <4>" in text


def test_the_page_of_all_samples_has_every_stored_completion(run, monkeypatch):
    report = write_report(run).read_text(encoding="utf-8")
    assert '<a href="samples.html">All samples</a>' in report
    page = run / "samples.html"
    script = source("filter.js")
    text = checked(page.read_text(encoding="utf-8"), script)
    assert "Step 0: 2 completions, 50.0% right" in text
    assert text.count(HOSTILE) == 2, "as prompt and as completion"
    assert "not scored" in text
    assert "a↵\nb" in text
    assert "more in" not in text
    monkeypatch.setattr("retrain.report.samples._CHARACTERS", 20)
    with RunDirectory(run, "auto", Checkpoint(), lambda event, details: None) as directory:
        directory.write_rollouts(29, [rollout(1.0, group=number) for number in range(3)])
    write_report(run)
    assert "2 more in rollouts/step-000029.jsonl.gz" in checked(page.read_text(encoding="utf-8"), script)


def test_samples_are_colored_up_to_a_limit(run, monkeypatch):
    write_report(run)
    html = (run / "samples.html").read_text(encoding="utf-8")
    assert html.count('class="down planning" title="advantage -1" style="--a:0.60"') == 1
    assert "not colored" not in html
    monkeypatch.setattr("retrain.report.samples._COLORED", 4)
    write_report(run)
    html = (run / "samples.html").read_text(encoding="utf-8")
    assert "advantage -1" not in html
    assert "are not colored" in html
