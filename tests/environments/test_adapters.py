"""Classes that were written for other libraries, played and trained on as they are."""

import json
from typing import Any

import pytest

from retrain.environments.adapters import openenv, skyrl, trl
from retrain.environments.contract import Action, Limits

HERE = "tests.environments.third_party_environments"
LIMITS = Limits(4, 64, 64, 64)


def call(name, **arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def play(game, replies):
    """(what was said, with its reward; what was returned)."""
    said: list[Any] = [next(game)]
    try:
        for turn, reply in enumerate(replies):
            said.append(game.send(Action(reply, turn=turn, tokens_left=9)))
    except StopIteration as end:
        return said, end.value
    return said, "open"


def test_a_class_for_trl():
    game = trl("Open it.", "7", {"digits": 1}, LIMITS, factory=f"{HERE}.Vault")
    said, end = play(game, [call("turn_dial", number=3), call("get_reward"), call("turn_dial", number=7), "done"])
    first, *rest = said
    assert first.text == " It has 1 digits."
    assert [tool["name"] for tool in first.tools] == ["turn_dial"]
    assert '"number": {"type": "integer", "description": "where to turn it."}' in first.tools_text
    assert [one.text for one in rest] == [
        "too low",
        "error: there is no tool 'get_reward'; there are turn_dial",
        "click",
    ]
    assert end == 1.0


def test_the_last_turn_of_a_class_for_trl_counts():
    game = trl("Open it.", "7", {}, LIMITS, factory=f"{HERE}.Vault")
    said, end = play(game, [call("turn_dial", number=n) for n in (1, 2, 3, 7)])
    assert (said[0].text, len(said), end) == (None, 4, 1.0)
    assert play(trl("Open it.", "7", {}, LIMITS, factory=f"{HERE}.Vault"), ["I cannot"])[1] == 0.0


def test_a_class_for_trl_without_a_reward_leaves_it_to_the_rewards():
    assert play(trl("?", "7", {}, LIMITS, factory=f"{HERE}.Unscored"), [call("look"), "7"])[1] is None


def test_a_text_environment_of_skyrl():
    closed = []
    game = skyrl("Which?", "b", {"max_turns": 3}, LIMITS, env_class=f"{HERE}.Halves", config={"closed": closed})
    said, end = play(game, ["a", "b"])
    assert said[0] == [{"role": "user", "content": " Guess."}]
    assert [(one.text, one.reward) for one in said[1:]] == [("No.\nAgain.", 0.0)]
    assert (end, closed) == (1.0, [2])
    assert play(skyrl("Which?", "b", {}, LIMITS, env_class=f"{HERE}.Halves"), ["a"] * 4)[1] == 0.0


def test_a_text_environment_of_skyrl_that_changes_the_prompt_is_refused():
    with pytest.raises(ValueError, match="init changed the prompt"):
        next(skyrl("Which?", "b", {}, LIMITS, env_class=f"{HERE}.Rewriting"))


@pytest.mark.parametrize(("replies", "end"), [(["1", "2", "2"], 1.0), (["9"], 0.0)])
def test_an_environment_of_openenv(replies, end):
    paths = {"env_class": f"{HERE}.Walk", "action": f"{HERE}.steps_of", "show": f"{HERE}.text_of"}
    said, found = play(openenv(3, **paths), replies)
    assert said[0] == "5 left"
    assert [(one.text, one.reward) for one in said[1:]] == [("4 left", 0.0), ("2 left", 0.0)][: len(replies) - 1]
    assert found == end
