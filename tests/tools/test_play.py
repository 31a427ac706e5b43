"""An episode in a terminal."""

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError
from retrain.run.reopen import reopen
from retrain.tools.play import by_hand, by_model
from tests.run.test_environment_runs import RUN  # noqa: F401 - what `toml` holds


def test_a_person_plays_until_the_environment_ends_it(toml):
    said = list(by_hand(load(toml), 0, iter(["what", "x", "y", "z", "never asked for"])))
    assert said == ["0-15:", "?\n", "?\n", "?\n", "[ended after 4 turns: end; reward 0]"]
    first, *_, last = by_hand(load(toml), 0, map(str, range(4)))
    assert first == "0-15:"
    assert last.startswith("[ended after")


def test_it_ends_where_no_reply_is_left_and_shows_what_a_reply_earned(toml):
    said = list(by_hand(load(toml), 0, iter(["8"])))
    assert len(said) == 3
    assert said[0] == "0-15:"
    assert {"+\n", "-\n"} & set(said)
    assert any(text.startswith("[reward 0.") for text in said)


def test_without_an_environment_there_is_nothing_to_play(toml):
    toml.write_text("")
    with pytest.raises(ConfigError, match="no environment"):
        list(by_hand(load(toml), 0, iter([])))


@pytest.mark.slow
def test_a_model_plays(train):
    parts = reopen(train("training.max_steps=1"), (), lambda event, details: None)
    said = list(by_model(parts, 0))
    parts.close()
    assert said[0] == "0-15:"
    assert said[1].startswith("> ")
    assert said[-1].startswith("[ended after ")
