"""Rewards on text and length: worked examples and traps."""

import pytest

from retrain.registry import components, find, reward
from retrain.rewards.text import exact, format_matches, number, overlong


def test_exact_reads_the_last_line():
    assert [exact(text, "125") for text in ("so 12\nso 125", "so 125\nso 12")] == [1, 0]


def test_exact_takes_the_last_match_of_another_pattern():
    assert exact("#### 3\n#### 4 ", "4", pattern=r"#### (.+)") == 1
    assert exact("#### 4\n#### 3", "4", pattern=r"#### (.+)") == 0
    assert exact("nothing", "4", pattern=r"#### (.+)") == 0
    assert exact("a", "4", pattern=r"(x)?a") == 0


def test_number_tolerance_is_relative_above_one():
    assert number("1001", "1000", tolerance=0.001) == 1
    assert number("1002", "1000", tolerance=0.001) == 0


def test_number_refuses_an_answer_without_one():
    with pytest.raises(ValueError, match="'forty' is not one number"):
        number("40", "forty")


def test_format():
    assert format_matches("<think>a\nb</think> 3", pattern=r"^<think>.*</think>") == 1
    assert format_matches("3", pattern=r"^<think>.*</think>") == 0


@pytest.mark.parametrize(("length", "value"), [(0, 0), (80, 0), (90, -0.5), (100, -1), (120, -1)])
def test_overlong_by_hand(length, value):
    assert overlong(length, 100) == pytest.approx(value)


def test_overlong_with_the_lengths_of_the_paper():
    assert overlong(16384, 20480) == 0
    assert overlong(16384 + 2048, 20480) == pytest.approx(-0.5)
    assert overlong(20480, 20480) == -1


def test_only_judgments_count_as_correctness():
    judges = {c.name: reward.traits_of(c).correctness for c in components("reward")}
    assert judges["exact"]
    assert judges["number"]
    assert judges["boxed_math"]
    assert not judges["format"]
    assert not judges["overlong"]
    assert find("reward", "overlong").reads == ("length", "max_tokens")
