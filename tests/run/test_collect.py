"""Which rows train: failures leave a group, and a group without a rival goes."""

import json

import pytest

from retrain.algorithms.graph.pipeline import Pipeline
from retrain.errors import DataError
from retrain.run.collectors.rollout_metrics import rollout_metrics
from retrain.run.collectors.rollouts import valid_rows
from retrain.system.records import jsonl_rows
from retrain.types import Rollout, Turn
from tests.make_checkpoint import make_checkpoint
from tests.small_runs import rows


def rollout(group: int, reward: float | None, tokens: int = 2, finish="stop") -> Rollout:
    ids = tuple(range(tokens))
    turns = (Turn(0, tokens, finish, 0),)
    return Rollout("p", "1+1?", "2", (1,), ids, (-0.5,) * tokens, "so 2", turns, group, reward, {}, reward == 1.0)


def test_a_group_that_failures_leave_with_one_row_is_dropped():
    rollouts = [rollout(0, 1.0), rollout(0, None), rollout(1, 0.0), rollout(1, 1.0), rollout(1, None)]
    assert valid_rows(rollouts) == rollouts[2:4]


def test_groups_of_one_stay_when_they_were_sampled_as_one():
    rollouts = [rollout(0, 1.0), rollout(1, None), rollout(2, 0.0)]
    assert valid_rows(rollouts) == rollouts[::2]


def test_means_are_over_scored_completions_and_lengths_over_all():
    rollouts = [rollout(0, 1.0, 3), rollout(0, 0.0, 1), rollout(0, None, 8, "length")]
    metrics = rollout_metrics(rollouts)
    assert metrics["reward/mean"] == metrics["reward/accuracy"] == metrics["reward/std"] == 0.5
    assert (metrics["reward/failed"], metrics["tokens/response"], metrics["rollout/truncated"]) == (1, 4, 1 / 3)
    assert (metrics["tokens/right"], metrics["tokens/wrong"]) == (3, 1)
    assert "tokens/wrong" not in rollout_metrics(rollouts[:1])


@pytest.mark.slow
def test_prompts_too_long_for_the_model_are_left_out_and_counted(train, tmp_path):
    make_checkpoint(tmp_path / "model", "gpt2")
    lines = [{"prompt": "long " * 300 if n % 3 == 0 else f"{n}?\n", "answer": str(n)} for n in range(30)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = (f'model.path="{tmp_path}/model"', "task.name=jsonl", "eval.problems=0", "warmup.steps=0")
    run = train(*options, f'jsonl.path="{tmp_path}/mixed.jsonl"')
    steps = rows(run / "metrics.jsonl")
    assert sum(row["rollout/too_long"] for row in steps) > 0
    assert {row["rollout/completions"] for row in steps} == {12.0}
    run = train(*options, f'jsonl.path="{tmp_path}/mixed.jsonl"', "training.max_prompt_tokens=3", name="short")
    seen = [rollout for file in sorted((run / "rollouts").iterdir()) for _, rollout in jsonl_rows(file)]
    assert seen
    assert all(len(rollout["prompt_ids"]) <= 3 for rollout in seen)
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[::3]))
    long = f'jsonl.path="{tmp_path}/long.jsonl"'
    with pytest.raises(
        DataError, match=r"244 tokens that max_tokens leaves of the model's positions: they have 1500 to"
    ):
        train(*options, long, name="long")
    with pytest.raises(DataError, match=r"the 3 tokens that \[training\] max_prompt_tokens allows: they have 1500 to"):
        train(*options, long, "training.max_prompt_tokens=3", name="limited")


@pytest.mark.slow
def test_with_resampling_on_credit_the_step_credits_all_kept_rows_at_once(train, monkeypatch):
    """What normalizes over the batch sees all of it, and components observe a step once."""
    steps = []
    real = Pipeline.before

    def before(self, batch):
        steps.append(batch)
        return real(self, batch)

    monkeypatch.setattr(Pipeline, "before", before)
    run = train(
        "rollout.resample=uninformative",
        "rollout.max_resample=3",
        "algorithm.transform_mode=gtpo",
        "logging.rollouts_every=1",
        "eval.problems=0",
    )
    written = rows(run / "metrics.jsonl")
    assert any(row["rollout/completions"] > 12 for row in written), "nothing was sampled again"
    trained = [
        sum("advantages" in rollout for _, rollout in jsonl_rows(file)) for file in sorted((run / "rollouts").iterdir())
    ]
    assert [len(batch.rewards) for batch in steps] == [count for count in trained if count]
    assert all("advantage/abs_mean" in row for row in written)
