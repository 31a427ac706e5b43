"""The built-in environments and their problems."""

from typing import Any

import pytest

from retrain.data.games import Numbers, Sums
from retrain.environments.calculator import calculator
from retrain.environments.guess import guess
from retrain.environments.tools import python_block, tools


def play(game, replies):
    """(what was said, turn rewards, what it returned)."""
    said, rewards = [next(game)], []
    try:
        for reply in replies:
            say = game.send(reply)
            said.append(say.text)
            rewards.append(say.reward)
    except StopIteration as end:
        return said[1:], rewards, end.value
    return said[1:], rewards, "open"


@pytest.mark.parametrize(
    ("replies", "said", "reward"),
    [
        (["=12+34", "so 46"], ["46\n"], 1.0),
        (["so 45"], [], 0.0),
        (["=1+2+3", "hm", "=12+34", "so 46"], ["?\n", "?\n", "46\n"], 1.0),
        (["=1+2"] * 4, ["3\n"] * 3, 0.0),
    ],
)
def test_calculator(replies, said, reward):
    assert play(calculator("46"), replies) == (said, [0.0] * len(said), reward)


def test_guess_rewards_what_a_hint_leaves():
    said, rewards, end = play(guess("3", top=7, guesses=4, shaping=3.0), ["5", "5", "what", "3"])
    assert (said, end) == (["-\n", "-\n", "?\n"], {"found": 1.0})
    assert rewards == pytest.approx([3 * (3 - 2.3219) / 3, 0.0, 0.0], abs=1e-4)  # log2 of 8 / 5, and nothing new
    assert play(guess("3", guesses=1), ["4"]) == ([], [], {"found": 0.0})


def test_all_guesses_that_find_the_number_earn_the_whole_shaping():
    _, rewards, _ = play(guess("0", top=7, guesses=9, shaping=1.0), ["4", "2", "1", "0"])
    assert sum(rewards) == pytest.approx(1.0)


@pytest.mark.parametrize("make", [Sums, Numbers])
def test_problems_are_apart_repeatable_and_shown_with_mistakes(make):
    first, again, other = make(0), make(0), make(1)
    train = [first.problem(index) for index in range(200)]
    assert train == [again.problem(index) for index in range(200)]
    assert train != [other.problem(index) for index in range(200)]
    held = first.heldout(5 if make is Numbers else 64)
    assert held == other.heldout(len(held))
    assert not {one.id for one in train} & {one.id for one in held}
    assert make(0).fingerprint() == make(1).fingerprint()
    game = calculator if make is Sums else guess
    found = [play(game(one.answer), one.replies)[2] for one in train]
    right = sum(one in (1.0, {"found": 1.0}) for one in found) / len(found)
    assert 0.1 < right < 0.9
    assert "open" not in found


def area(width: int, height: float = 1.0) -> float:
    """Width times height.

    More that the model is not told.
    """
    return width * height


CALLS = {
    "hermes": '<tool_call>{"name": "area", "arguments": %s}</tool_call>',
    "json": 'so\n```json\n{"name": "area", "arguments": %s}\n```',
}


@pytest.mark.parametrize("parser", ["hermes", "json", "python"])
def test_tools_are_called_and_mistakes_are_observations(parser):
    arguments = '{"width": 3, "height": 2.5}'
    right = CALLS[parser] % arguments if parser != "python" else "```python\narea(width=3, height=2.5)\n```"
    replies = [right, right.replace("area", "volume"), right.replace("width", "depth"), right.replace("3", "("), "7.5"]
    game: Any = tools(functions=[f"{__name__}.area"], parser=parser)
    first = next(game)
    assert [tool["name"] for tool in first.tools] == ["area"]
    assert '"width": {"type": "integer"}' in first.text
    assert '"description": "Width times height."' in first.text
    assert '"required": ["width"]' in first.text
    answers = [game.send(reply) for reply in replies[:-1]]
    assert [one.role for one in answers] == ["tool"] * 4
    assert answers[0].text == "7.5"
    assert "there is no tool 'volume'; there are area" in answers[1].text
    assert "TypeError" in answers[2].text
    assert answers[3].text.startswith("error: this is no call")
    assert [one.metrics["tool_errors"] for one in answers] == [0, 1, 1, 1]
    with pytest.raises(StopIteration) as end:
        game.send(replies[-1])
    assert end.value.value is None


def test_python_is_read_and_never_run():
    text = "```python\nx = 1\narea(3)\n__import__('os').getpid()\n```"
    assert [name for name, _ in python_block(text)] == ["", "", ""]
