"""Completions that are continued from prefixes, in real runs."""

from __future__ import annotations

import pytest
import torch

from retrain.config.load import load
from retrain.errors import ConfigError
from retrain.lab.monte_carlo.prefixes import Prefix
from retrain.run.collectors.rounds import collect
from retrain.run.reopen import reopen
from tests.small_runs import TOML, digest, rows


@pytest.mark.slow
def test_continuations_have_streams_of_their_own_and_change_no_run(train):
    plain, watched = train(), train('logging.observe=["token_values","segment_values"]', name="watched")
    assert digest(plain) == digest(watched)
    tokens = [row.pop("oracle/tokens") for row in rows(watched / "metrics.jsonl")]
    assert min(tokens) > 100
    own = [
        {k: v for k, v in row.items() if k not in ("oracle/tokens", "vine/tokens")}
        for row in rows(watched / "metrics.jsonl")
    ]
    assert own == rows(plain / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["oracle", "vine"])
def test_a_run_learns_from_measured_credit_and_resumes_bit_for_bit(train, stopped, credit):
    keys = (f'algorithm.algorithm_mode="{credit}"', f"{credit}.continuations=2")
    whole = train(*keys)
    stopped(*keys, name="stopped")
    from retrain.run.session import Resume

    resumed = train(*keys, name="stopped", resume=Resume("auto"))
    assert digest(whole) == digest(resumed)
    assert all(row["grad/norm"] > 0 for row in rows(whole / "metrics.jsonl"))


@pytest.mark.slow
def test_a_continuation_begins_with_its_prefix_and_keeps_the_budget(train):
    parts = reopen(train("training.max_steps=1"), (), lambda *_: None)
    try:
        batch = collect(parts, 1, 0).batch
        ids = tuple(batch.input_ids[0].tolist())
        first = int(batch.response_mask[0].int().argmax())
        prefixes = [Prefix(0, ids[:first], 0), Prefix(0, ids[: first + 11], 11)]
        rewards, tokens = parts.trained.resources["continue_from"](batch.problems, prefixes, 3, 5)
        again, _ = parts.trained.resources["continue_from"](batch.problems, prefixes, 3, 5)
    finally:
        parts.close()
    assert rewards.shape == (2, 3)
    assert torch.equal(rewards, again)
    assert 3 * 1 + 3 <= tokens <= 3 * 12 + 3  # the second prefix has one token left of 12


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["rollout.overlap=1"], "needs the sampler"),
        (['environment.name="guess"', 'task.name="numbers"'], "replays no environment"),
    ],
)
def test_what_cannot_be_continued_is_refused_before_anything_loads(tmp_path, keys, text):
    file = tmp_path / "run.toml"
    file.write_text(TOML.replace("workers = 0", "workers = 1"))
    with pytest.raises(ConfigError, match=text):
        load(file, ['algorithm.algorithm_mode="vine"', *keys])
