"""Evaluations keep their completions, in the form that `retrain score` reads."""

import gzip
import html
import json

import pytest

from retrain.errors import DataError
from retrain.report.run_page import write_report
from retrain.run.session import Resume
from retrain.tools.rollout_scores import results_file, score_file, summarize
from tests.commands import invoke
from tests.small_runs import rows

pytestmark = pytest.mark.slow

SETS = """
[[eval.sets]]
name = "cold.er"
problems = 4
samples = 3
temperature = 0.1
greedy = false
"""


def stored(run):
    return {file.name: [json.loads(line) for line in gzip.open(file, "rt")] for file in sorted(run.glob("eval/*"))}


def test_stored_completions_give_the_figures_of_the_evaluation(train, toml):
    toml.write_text(toml.read_text() + SETS)
    run = train("eval.samples=2", "eval.pass_at=[1,2]")
    names = [f"step-00000{step}{ending}.jsonl.gz" for step in (0, 2, 4) for ending in (".cold.er", "")]
    assert list(stored(run)) == sorted(names)
    for row in rows(run / "eval.jsonl"):
        for name, label in (("", ""), ("cold.er", "cold.er/")):
            found = score_file(str(results_file(run, row["step"], name)))
            facts = summarize(found, (1, row[f"{label}samples"]))
            assert facts["avg@n"]["value"] == pytest.approx(row[f"{label}accuracy"])
            assert facts["avg@n"]["low"] == pytest.approx(row[f"{label}ci_low"])
            assert facts["avg_tokens"]["value"] == pytest.approx(row[f"{label}avg_tokens"])
            assert (facts["problems"], facts["rollouts"]) == (
                row[f"{label}problems"],
                len(found) * row[f"{label}samples"],
            )
        assert summarize(score_file(str(results_file(run, row["step"]))), (2,))["pass@2"]["value"] == row["pass@2"]
    greedy = [one["greedy"]["correct"] for one in stored(run)["step-000004.jsonl.gz"]]
    assert sum(greedy) / len(greedy) == rows(run / "eval.jsonl")[-1]["greedy_accuracy"]
    assert "greedy" not in stored(run)["step-000004.cold.er.jsonl.gz"][0]
    assert results_file(run) == run / "eval" / "step-000004.jsonl.gz"
    with pytest.raises(
        DataError, match=r"no stored evaluation eval/step-000003.jsonl.gz; there are step-000000.cold.er"
    ):
        results_file(run, 3)


def test_run_directories_are_scored_against_each_other(train):
    run, base = train(), train("training.seed=5", name="base")
    facts = json.loads(invoke("score", str(run), "--base", str(base), "--json").stdout)
    ours, theirs = (rows(one / "eval.jsonl")[-1] for one in (run, base))
    assert (facts["pairs"], facts["unpaired"]) == (6, 0), "the held-out problems are the same for every seed"
    assert facts["paired"]["avg@n"]["value"] == pytest.approx(ours["accuracy"] - theirs["accuracy"])
    assert facts["aes_avg"]["length_part"] == pytest.approx(1 - ours["avg_tokens"] / theirs["avg_tokens"])
    text = invoke("score", str(run), "--base", str(base), "--step", "2").stdout
    assert f"{run}/eval/step-000002.jsonl.gz: 6 problems" in text
    assert "AES from avg@n" in text


def test_a_resumed_run_has_the_evaluations_of_an_uninterrupted_one(train, stopped):
    whole = train(name="whole")
    stopped(name="cut", steps=3)
    (cut := whole.with_name("cut")).joinpath("eval", "step-000004.jsonl.gz").write_bytes(b"left by a killed process")
    train(name="cut", resume=Resume("auto"))
    assert stored(cut) == stored(whole)


def test_problems_of_a_mix_are_told_apart_by_their_label(train):
    tasks = 'tasks=[{name="addition", label="a"}, {name="addition", label="b", params={min_digits=1}}]'
    run = train(tasks, "warmup.steps=0", "training.max_steps=0", "task.name=addition")
    found = stored(run)["step-000000.jsonl.gz"]
    names = [row["question_id"] for row in found]
    assert len(set(names)) == len(names)
    assert {name.partition("/")[0] for name in names} == {"a", "b"}


def test_the_page_of_samples_shows_held_out_problems(train):
    run = train("eval.samples=2")
    write_report(run)
    page = (run / "samples.html").read_text()
    last = stored(run)["step-000004.jsonl.gz"]
    right = sum(sum(row["correct"]) for row in last) / 12
    assert f"After 4 steps: 6 problems, {right:.1%} right" in page
    assert page.count("greedy, ") == 18
    assert "Step 2: " in page


def test_the_report_shows_held_out_problems_before_and_after(train, toml):
    toml.write_text(toml.read_text() + SETS)
    run = train()
    page = html.unescape(write_report(run).read_text())
    assert "decoded greedily: after 0 steps and after 4." in page
    section = page.partition("<h2>Before and after</h2>")[2].partition("<h2>")[0]
    found = stored(run)
    first, last = found["step-000000.jsonl.gz"], found["step-000004.jsonl.gz"]
    shown = list(zip(first, last, strict=True))[:4]
    for before, after in shown:
        assert before["prompt"] in section
        for step, row in ((0, before), (4, after)):
            verdict = "right" if row["greedy"]["correct"] else "wrong"
            assert f"after {step} steps: greedy, {verdict}, {row['greedy']['length']} tokens" in section
            assert row["greedy"]["prediction"] in section
