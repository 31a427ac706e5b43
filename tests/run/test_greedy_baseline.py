"""Runs whose credit compares with the greedy completion of a prompt."""

import gzip
import json
from dataclasses import replace

import pytest

from retrain.config.load import load
from retrain.errors import ComponentError
from retrain.run.build import build
from retrain.run.collectors.rollouts import sampled, valid_rows
from retrain.run.collectors.rounds import collect
from retrain.storage.run_directory import RunDirectory
from tests.small_runs import rows

REMAX = 'algorithm.advantage_mode="remax"'


def stored(run):
    files = sorted((run / "rollouts").glob("*.gz"))
    return [json.loads(line) for file in files for line in gzip.open(file, "rt")]


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 4])
def test_the_credit_of_a_completion_is_its_gain_over_greedy_decoding(train, group):
    run = train(REMAX, f"training.group_size={group}", "logging.rollouts_every=1", "training.max_steps=2")
    found = stored(run)
    assert any(row["reward"] != row["greedy"] for row in found)
    for row in found:
        gain = row["reward"] - row["greedy"]
        assert row["advantages"] == pytest.approx([gain] * len(row["completion_ids"]), abs=1e-6)
    by_prompt = {(row["group"], row["prompt"]): set() for row in found}
    for row in found:
        by_prompt[row["group"], row["prompt"]].add(row["greedy"])
    assert all(len(values) == 1 for values in by_prompt.values())
    for row in rows(run / "metrics.jsonl"):
        assert row["rollout/completions"] == 3 * group
        assert "reward/greedy" in row


@pytest.mark.slow
def test_greedy_completions_do_not_change_what_is_sampled(train):
    plain = stored(train("training.max_steps=1", "logging.rollouts_every=1", name="plain"))
    compared = stored(train(REMAX, "training.max_steps=1", "logging.rollouts_every=1", name="compared"))
    assert [one["completion_ids"] for one in plain] == [one["completion_ids"] for one in compared]
    assert {one["greedy"] for one in plain} == {None}


@pytest.fixture
def parts(toml, tmp_path):
    loaded = load(toml, [REMAX, f'logging.dir="{tmp_path}"'])
    with RunDirectory(tmp_path / "run", "new", loaded.config.checkpoint, lambda *_: None) as directory:
        built = build(loaded, directory, lambda *_: None)
        yield built
        built.close()


def test_a_prompt_without_a_baseline_is_left_out(parts):
    rollouts, _, _ = sampled(parts, 0, 2, seed=3)
    assert all(one.greedy is not None for one in rollouts)

    class Silent:
        """Fails to score the second prompt's greedy completion."""

        def __init__(self, pool):
            self.pool = pool

        def score(self, items):
            found = self.pool.score(items)
            return found if len(items) > 2 else [found[0], replace(found[1], value=None, status="timeout")]

    pool, parts.pool = parts.pool, Silent(parts.pool)
    rollouts, _, _ = sampled(parts, 0, 2, seed=3)
    parts.pool = pool
    assert [one.reward is None for one in rollouts] == [False] * 4 + [True] * 4
    assert {one.group for one in valid_rows(rollouts)} == {0}


def test_programs_that_ask_have_no_greedy_completion(parts):
    parts.episode_source = object()
    with pytest.raises(ComponentError, match="needs greedy completions"):
        collect(parts, 0, 0)
