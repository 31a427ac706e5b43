import json

import pytest

from retrain.report.model_card import Card, render_card, write_card

HOW = {"ci_low": 0.1, "ci_high": 0.9, "problems": 256, "samples": 1, "temperature": 1.0}
ROWS = [{"step": step, "accuracy": step / 200} | HOW for step in range(0, 101, 4)]
CARD = Card(
    name="quick", base="builtin:tiny", task="addition", config='[model]\npath = "builtin:tiny"\n',
    evaluations=ROWS, steps=100, warmup_steps=600, extra={"loss": "ppo_clip | kl"},
)  # fmt: skip


def front_matter(text):
    head, _, _ = text.removeprefix("---\n").partition("\n---\n")
    return dict(line.split(": ", 1) for line in head.splitlines())


def test_card_of_a_model_made_here(tmp_path):
    text = write_card(tmp_path, CARD).read_text()
    assert (tmp_path / "README.md").exists()
    head = front_matter(text)
    assert json.loads(head["license"]) == "apache-2.0"
    assert json.loads(head["tags"]) == ["retrain", "reinforcement-learning", "addition"]
    assert "base_model" not in head
    assert "600 supervised steps and 100 steps of reinforcement learning on the task `addition`" in text
    assert '~~~toml\n[model]\npath = "builtin:tiny"\n~~~' in text
    assert r"| loss | ppo_clip \| kl |" in text


def test_curve_is_a_short_table_with_both_ends():
    lines = [line for line in render_card(CARD).splitlines() if line.endswith("| 0.900 |")]
    assert len(lines) == 12
    assert lines[0] == "| 0 | 0.000 | 0.100 | 0.900 |"
    assert lines[-1] == "| 100 | 0.500 | 0.100 | 0.900 |"
    assert "256 held-out problems, 1 completion(s) each, temperature 1.0" in render_card(CARD)


@pytest.mark.parametrize(("license", "expected"), [(None, "other"), ("mit", "mit")])
def test_card_of_a_derived_model_names_its_base(license, expected):
    text = render_card(Card("r", "org/base: x", "maths", "", license=license, adapter=True, evaluations=[{"step": 0}]))
    head = front_matter(text)
    assert json.loads(head["base_model"]) == "org/base: x"
    assert json.loads(head["license"]) == expected
    assert json.loads(head["tags"]) == ["retrain", "maths"]
    assert "not trained further" in text
    assert "`adapter/`" in text
    assert "| step |\n| --- |\n| 0 |" in text


def test_missing_values_stay_empty():
    rows = [{"step": 0, "accuracy": 0.5, "greedy_accuracy": 0.75}, {"step": 9, "accuracy": 0.25}]
    assert "| 9 | 0.250 |  |" in render_card(Card("r", "b", "t", "", evaluations=rows))
    assert "evaluation" not in render_card(Card("r", "b", "t", "")).lower()
