"""Findings: a planted fault makes each speak, once; their texts are in status.json, and they change nothing."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks.results import read
from docs.measure import ROOT
from retrain.config.schema import Config
from retrain.registry import Component, find, names
from retrain.report.run_summary import status
from retrain.run import findings
from retrain.run.findings import FINDINGS, Evidence
from retrain.run.session import Resume
from retrain.types import Rollout, Turn
from tests.small_runs import digest, rows

NEVER = """rewards=[{name="format", params={pattern="no completion has this"}}]"""
NO_EVALUATION = "eval.problems=0"


def component(name, **params):
    found = find("reward", name) if name in names("reward") else Component("reward", name, len, name)
    return replace(found, params={"weight": 1.0, **params})


def rollout(text="so 5", prompt="2+3=", reward=0.0, correct=False, cut=False, length=4):
    ids = (1,) * length
    turn = Turn(0, length, "length" if cut else "stop", 0)
    return Rollout("0", prompt, "5", (1,), ids, (0.0,) * length, text, (turn,), 0, reward, {}, correct)


def evidence(*rows, config=None, evals=(), **more):
    return Evidence(config or Config(), rows=[*rows], evals=[*evals], **more)


def measured(step, accuracy, low, high):
    return {"step": step, "accuracy": accuracy, "ci_low": low, "ci_high": high}


def reported(run):
    """{name: text} of a run's findings."""
    return {one["name"]: one["text"] for one in status(run)["findings"]}


@pytest.fixture
def messages():
    return []


@pytest.fixture
def observe(messages):
    return lambda event, details: messages.append(details["text"]) if event in ("message", "done") else None


def test_groups_that_are_all_wrong(train, observe, messages):
    run = train(NEVER, NO_EVALUATION, "training.max_steps=10", "training.max_tokens=4", observe=observe)
    text = reported(run)["no_update"]
    assert text.startswith("none of the last 10 steps changed the weights: 30 groups were all wrong and 0 all right")
    assert text.endswith('the mean reward is 0; see "The reward stays 0"')
    assert messages.count(f"no_update: {text} (retrain help no_update)") == 1
    assert f"N{text[1:]}." in messages[-1]  # the last line repeats it
    assert "more than half of the completions were cut off in five steps" in reported(run)["cut_off"]
    assert "raise [training] max_tokens, now 4" in reported(run)["cut_off"]


def test_solved_problems():
    row = {"update/skipped": 1.0, "skipped/all_correct": 4.0, "reward/mean": 1.0}
    assert findings.no_update(evidence(*[row] * 10)).endswith("use harder problems, or stop")
    assert not findings.no_update(evidence(*[row] * 9))
    assert findings.no_update(evidence(row, ended=True)).startswith("the only step has not changed the weights")
    held = row | {"update/held": 1.0}
    assert not findings.no_update(evidence(*[row] * 9, held))


THINK = r"^<think>.*</think>"


@pytest.mark.parametrize(
    ("rollouts", "hidden", "says"),
    [
        ([rollout()], ["<think>"], "<think> is a special token that rewards do not see"),
        ([rollout(prompt="2+3=<think>\n")], [], "the prompt ends with <think>"),
        ([rollout("<think> a", cut=True)], [], "100% of the completions were cut off: raise [training] max_tokens"),
        ([rollout("<think> a </think> 5"), rollout(prompt="<think>")], ["<think>"], ""),
        ([rollout()], [], ""),
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_match(rollouts, hidden, says):
    run = evidence({}, rewards=[component("format", pattern=THINK)], hidden=hidden, rollouts=rollouts)
    assert says in findings.tag_never_seen(run)
    assert bool(says) == bool(findings.tag_never_seen(run))


def test_a_missing_box():
    run = evidence({}, rewards=[component("boxed_math")], rollouts=[rollout("so 5", cut=True)])
    assert "boxed_math" in findings.tag_never_seen(run)
    run.rollouts = [rollout(r"\boxed{5}", cut=True)]
    assert not findings.tag_never_seen(run)


def test_a_prompt_that_is_rendered_already():
    prompt = "<|im_start|>user\n2+3=<|im_end|>"
    run = evidence({}, written=["<|im_start|>", "<|im_end|>"], prompts=[prompt])
    assert findings.rendered_twice(run).startswith("text prompts contain <|im_end|>, <|im_start|>")
    assert not findings.rendered_twice(evidence({}, written=["<|im_start|>"], prompts=["2+3="]))


def test_entropy_that_is_gone():
    first, gone = {"policy/entropy": 0.5, "reward/accuracy": 0.2}, {"policy/entropy": 0.01, "reward/accuracy": 0.3}
    assert "from 0.5 to 0.01 nats" in findings.entropy_gone(evidence(first, gone, gone, gone))
    assert not findings.entropy_gone(evidence(first, gone, first, gone))
    assert not findings.entropy_gone(evidence(first, *[gone | {"reward/accuracy": 0.95}] * 3))


def test_updates_that_are_too_large(train):
    run = train("training.lr=0.02", "training.epochs=3", NO_EVALUATION, "training.max_tokens=24")
    assert "lower [optimizer] lr" in reported(run)["too_far"]


def test_a_destroyed_policy_needs_no_more_tokens():
    first, cut = {"rollout/truncated": 0.0, "reward/accuracy": 0.4}, {"rollout/truncated": 1.0, "reward/accuracy": 0.0}
    text = findings.cut_off(evidence(first, *[cut] * 5))
    assert text.endswith("accuracy fell from 40% to 0%: the updates destroy the policy, so lower [optimizer] lr")
    assert "max_tokens" not in text
    rare = first | {"reward/accuracy": 0.02}  # the first update of a rate of 1 does it, whatever the start
    skipped = cut | {"update/skipped": 1.0, "skipped/all_wrong": 8.0}
    text = findings.no_update(evidence(rare, *[skipped] * 10))
    assert text.endswith("accuracy fell from 2% to 0%: the updates destroy the policy, so lower [optimizer] lr")
    for start, end in ((first, {"reward/accuracy": 0.5}), (first | {"rollout/truncated": 0.6}, {})):
        assert "raise [training] max_tokens" in findings.cut_off(evidence(start, *[cut | end] * 5))


def test_a_narrow_range_clips_by_design():
    row = {"policy/clip_fraction": 0.6}
    assert findings.too_far(evidence(*[row] * 3, losses=[component("ppo_clip", eps_high=0.2)]))
    assert not findings.too_far(evidence(*[row] * 3, losses=[component("gspo", eps_high=4e-4)]))


def test_a_reward_that_rises_alone():
    steps = [{"reward/mean": value} for value in (0.1, 0.12, 0.1, 0.11, 0.1, 0.9, 0.88, 0.9, 0.91, 0.9)]
    flat = [measured(0, 0.3, 0.26, 0.34), measured(10, 0.31, 0.27, 0.35)]
    odd = [rollout("right", reward=1.0, correct=True), rollout("a  trick", reward=1.0), rollout("wrong")]
    run = evidence(*steps, evals=flat, rewards=[component("mine")], rollouts=odd)
    text = findings.reward_without_accuracy(run)
    assert text.startswith("the training reward rose from 0.106 to 0.898, and held-out accuracy changed by +1.0 points")
    assert text.endswith("+1.0 points: read samples, such as 'a trick' (reward 1)")
    run.evals[:] = [flat[0], measured(10, 0.8, 0.76, 0.84)]
    assert not findings.reward_without_accuracy(run)
    run.evals[:] = flat[:1]
    assert not findings.reward_without_accuracy(run)


def test_completions_that_are_equal(train, tmp_path):
    (tmp_path / "odd_answer.py").write_text(
        "def odd_answer(answer: str) -> float:\n    return float(int(answer) % 2)\n"  # the same for a whole group
    )
    run = train(
        """rewards=[{name="odd_answer.odd_answer"}]""", f'plugins.search_paths=["{tmp_path}"]', NO_EVALUATION,
        "training.temperature=0.01", "training.max_steps=10", "training.batch_size=12", "training.lr=1e-9",
    )  # fmt: skip
    assert "raise [training] temperature, now 0.01" in reported(run)["same_answers"]
    assert all(row["rollout/identical"] > 0.5 for row in rows(run / "metrics.jsonl"))


def test_a_stale_sampler():
    assert "46% of the tokens count" in findings.stale(evidence({"mismatch/ess": 0.9}, {"mismatch/ess": 0.46}))
    assert not findings.stale(evidence({"mismatch/ess": 0.9}))


def test_a_run_that_learned_nothing(train, observe, messages):
    run = train(observe=observe)
    assert reported(run)["nothing_learned"].startswith("no significant change of held-out accuracy: ")
    assert messages[-1].startswith("No significant change of held-out accuracy, from ")


def test_a_constant_reward_of_wrong_answers():
    row = {"update/skipped": 1.0, "reward/mean": 0.2, "reward/std": 0.0, "reward/accuracy": 0.0}
    run = evidence(*[row] * 10, evals=[measured(0, 0.0, 0.0, 0.1), measured(10, 0.0, 0.0, 0.1)], ended=True)
    assert findings.nothing_learned(run).endswith("; the reward pays wrong answers 0.2 and is constant")
    assert "the reward pays wrong answers 0.2 and is constant: check it" in findings.no_update(run)
    run.rows[3] = {**row, "reward/std": 0.1}
    assert findings.nothing_learned(run).endswith("train longer, or evaluate on more problems")


def test_a_run_that_learned_something():
    run = evidence({}, evals=[measured(0, 0.3, 0.26, 0.34), measured(4, 0.6, 0.56, 0.64)], ended=True)
    assert not findings.nothing_learned(run)
    run.evals[1] = measured(4, 0.34, 0.3, 0.38)
    assert "+4.0 points, 95% interval -1.7 to +9.7" in findings.nothing_learned(run)
    run.ended = False
    assert not findings.nothing_learned(run)


def test_a_resumed_run_says_nothing_twice(train, stopped, tmp_path, observe, messages):
    settings = (NEVER, "training.max_tokens=4")
    stopped(*settings)
    assert [*reported(tmp_path / "runs" / "run")] == ["tag_never_seen"]
    run = train(*settings, resume=Resume("auto"), observe=observe)
    names = ["tag_never_seen", "no_update", "nothing_learned"]
    assert [*reported(run)] == names
    assert [text.partition(":")[0] for text in messages if "(retrain help" in text] == names[1:]
    messages.clear()
    train(*settings, resume=Resume("auto"), observe=observe)
    assert ([*reported(run)], [text for text in messages if "(retrain help" in text]) == (names, [])
    train(*settings, "training.max_steps=6", resume=Resume("auto", None, ("training.max_steps",)), observe=observe)
    assert [*reported(run)] == [*names[:2], "cut_off", "nothing_learned"]  # at its new end it looks again


def test_they_change_nothing_and_can_be_silenced(train):
    spoken, silent = train(name="spoken"), train("logging.findings=false", name="silent")
    assert status(spoken)["looked_at"] == [one.__name__ for one in FINDINGS]
    assert (status(silent)["findings"], status(silent)["looked_at"]) == ([], [])
    assert json.loads((silent / "status.json").read_text()) == {"outcome": "finished"}
    assert digest(spoken) == digest(silent)


def test_the_page_explains_each_finding_and_the_results_say_how_often_it_is_wrong():
    rates = {
        name: float(share) for name, share in re.findall(r"\| `(\w+)` \| \d+ \| ([\d.]+)% \|", read("healthy-runs"))
    }
    assert [*rates] == [one.__name__ for one in FINDINGS]
    assert max(rates.values()) <= 2
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert re.findall(r'<a id="(\w+)"></a>`\1`', page) == [*rates]
