"""Whole runs with an environment: trained, resumed, sampled ahead, scored by rewards, refused."""

import sys
from pathlib import Path

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError, DataError, UserCodeError
from retrain.report.run_page import write_report
from retrain.run.before.data_checks import check_data
from tests.small_runs import digest, rows, stored

PLUGINS = f'plugins.search_paths=["{Path(__file__).parent}"]'
RUN = """
task = { name = "numbers" }
numbers = { top = 15 }
environment = { name = "guess", max_turns = 4, turn_tokens = 4 }
guess = { top = 15, guesses = 4, shaping = 0.5 }
training = { max_steps = 4, batch_size = 3, group_size = 4, max_tokens = 14 }
warmup = { steps = 12, batch_size = 8, problems = 96 }
eval = { every = 2, problems = 6 }
checkpoint = { every = 2 }
logging = { rollouts_every = 1 }
algorithm = { transform_mode = "turn_returns" }
"""


@pytest.mark.slow
def test_a_run_trains_on_episodes_and_resumes_to_the_bit(resumed):
    whole = resumed(steps=2)
    last = rows(whole / "metrics.jsonl")[-1]
    assert 1 <= last["env/turns"] <= 4
    assert sum(last[f"env/ended_{how}"] for how in ("done", "turns", "tokens", "context", "error", "timeout")) == 1
    assert last["reward/failed"] == last["env/replayed"] == 0
    assert rows(whole / "eval.jsonl")[-1]["turns"] >= 1
    episodes = stored(whole, 3)
    several = [one for one in episodes if len(one["turns"]) > 1]
    assert several
    for one in several:
        sampled = {place for turn in one["turns"] for place in range(turn["start"], turn["end"])}
        assert len(sampled) < len(one["completion_ids"])
        assert one["parts"]["found"] in (0.0, 1.0)
        assert one["reward"] == pytest.approx(one["parts"]["found"] + sum(turn["reward"] for turn in one["turns"]))
        if "advantages" in one:
            assert not any(a for place, a in enumerate(one["advantages"]) if place not in sampled)


@pytest.mark.slow
def test_its_report_shows_conversations(train):
    page = write_report(train("training.max_steps=1")).read_text()
    assert " ended: " in page
    assert 'class="observed"' in page or " observed" in page
    assert '<b class="turn">' in page


@pytest.mark.slow
def test_the_next_batch_can_be_played_while_the_last_is_trained_on(resumed):
    whole = resumed("rollout.overlap=2", steps=2)
    assert rows(whole / "metrics.jsonl")[-1]["rollout/staleness"] == 2


@pytest.mark.slow
def test_where_the_episodes_are_held_changes_nothing(train):
    exact = ("model.dtype=float32", "torch.dtype=float32")
    none = train(*exact, "environment.workers=0", name="none")
    assert digest(none) == digest(train(*exact, "environment.workers=1", name="one"))
    # Shares are sampled in calls of their own, and matrix products of other sizes round differently.
    shared = stored(train(*exact, "environment.workers=2", name="two"), 0)
    assert [one["completion_ids"] for one in shared] == [one["completion_ids"] for one in stored(none, 0)]


@pytest.mark.slow
def test_rewards_score_the_last_reply_of_an_episode_without_a_reward(train):
    polite = 'environment.name="talking_worlds.polite"'
    run = train(PLUGINS, polite, "guess={}", "warmup.steps=0", "training.max_steps=1")
    for one in stored(run, 0):
        if one["ended"] == "done":
            assert len(one["turns"]) == 2
            assert list(one["parts"]) == ["exact"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["trl.factory='third_party_environments.Vault'"])
def test_classes_of_other_libraries_train_as_they_are(train, kind):
    name, plugins = kind.partition(".")[0], Path(__file__).parents[1] / "environments"
    paths, world = f"plugins.search_paths=['{plugins}']", f"environment.name='{name}'"
    run = train(paths, world, "guess={}", kind, "warmup.steps=0", "training.max_steps=1", "eval.problems=0")
    episodes = stored(run, 0)
    assert {one["ended"] for one in episodes} <= {"done", "tokens", "turns"}
    assert all(one["reward"] in (0.0, 1.0) for one in episodes)
    assert rows(run / "metrics.jsonl")[0]["reward/failed"] == 0


def test_an_environment_for_another_interpreter_is_not_imported_here(toml, tmp_path):
    (tmp_path / "elsewhere.py").write_text("import not_yet_there\n\n\ndef game(answer):\n    yield None\n")
    with pytest.raises(ConfigError, match="not_yet_there"):
        load(toml, [f'plugins.search_paths=["{tmp_path}"]', 'environment.name="elsewhere.game"', "guess={}"])
    (tmp_path / "not_yet_there.py").write_text("")
    settings = [f'plugins.search_paths=["{tmp_path}"]', 'environment.name="elsewhere.game"', "guess={}"]
    loaded = load(toml, [*settings, f'environment.python="{sys.executable}"'])
    assert loaded.optional("environment") is None
    loaded = load(toml, [*settings, f'environment.python="{sys.executable}"', "environment.params.depth=1"])
    with pytest.raises(ConfigError, match="depth: missing or unknown"):
        check_data(loaded)


def test_an_environment_that_fails_everywhere_ends_the_run(train):
    with pytest.raises(UserCodeError, match=r"(?s)of 12 episodes failed.*int\(\) argument|invalid literal"):
        train(PLUGINS, "guess={}", "warmup.steps=0", "eval.problems=0", 'environment.name="talking_worlds.breaks"')


def test_a_warm_start_needs_replies(train):
    with pytest.raises(DataError, match="has no replies to imitate"):
        train('task.name="addition"', "numbers={}")
    with pytest.raises(DataError, match=r"raise .environment. turn_tokens"):
        train("environment.turn_tokens=1", name="cut")


@pytest.mark.slow
def test_turns_that_begin_in_one_state_are_compared(train):
    """Every episode of a group begins in one state; a later one is shared by those with equal hints."""
    run = train('algorithm.transform_mode="gigpo"', "training.max_steps=2")
    for row in rows(run / "metrics.jsonl"):
        assert 0 < row["gigpo/shared"] <= 1
    episodes = stored(run, 0)
    assert len({one["turns"][0]["state"] for one in episodes}) == 1
    later = {turn["state"] for one in episodes for turn in one["turns"][1:]}
    assert len(later) > 1
    assert "" not in later
