"""The loop as a whole: a metrics row per step, reproducible, resumable, and it stops when it must."""

import gzip
import json

import pytest

from retrain.errors import DivergedError, UserCodeError
from retrain.run.session import Resume
from tests.small_runs import digest, rows


def test_a_run_writes_every_row_and_a_model_that_loads(train, tmp_path, monkeypatch):
    monkeypatch.setenv("RETRAIN_CACHE", str(tmp_path / "cache"))  # empty, so that the warm start is computed
    events = []
    run = train(observe=lambda event, details: events.append(event))
    metrics, evals = rows(run / "metrics.jsonl"), rows(run / "eval.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert [row["step"] for row in evals] == [0, 2, 4]
    assert all(row["ci_low"] <= row["accuracy"] <= row["ci_high"] for row in evals)
    assert all(
        {"loss/ppo_clip", "grad/norm", "reward/mean", "tokens/response", "optim/lr"} <= set(row) for row in metrics
    )
    assert json.loads((run / "status.json").read_text())["outcome"] == "finished"
    assert {"warmup", "step", "eval", "sample", "done"} <= set(events)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "model"), AutoTokenizer.from_pretrained(run / "model")
    assert model(**tokenizer("12+34?\n", return_tensors="pt")).logits.isfinite().all()


@pytest.mark.slow
def test_stored_rollouts_carry_the_credit_of_every_token(train):
    run = train('logging.observe=["planning_mask"]')
    files = sorted((run / "rollouts").iterdir())
    assert [file.name for file in files] == ["step-000000.jsonl.gz", "step-000002.jsonl.gz"]
    stored = [json.loads(line) for line in gzip.decompress(files[0].read_bytes()).splitlines()]
    assert len(stored) == 12
    for row in stored:
        count = len(row["completion_ids"])
        assert len(row["tokens"]) == len(row["advantages"]) == len(row["planning"]) == count
        assert len(row["sampler_logprobs"]) == count
        assert all(value <= 0 for value in row["sampler_logprobs"])


def test_the_stored_file_shows_what_the_command_line_changed(train, toml):
    stored = (train("training.max_steps=0", "eval.problems=0") / "config.toml").read_text()
    assert stored.startswith(toml.read_text())
    assert stored.endswith("# --set training.max_steps=0\n# --set eval.problems=0\n")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another(train):
    first, second, other = train(name="a"), train(name="b"), train("training.seed=1", name="c")
    assert rows(first / "metrics.jsonl") == rows(second / "metrics.jsonl")
    assert digest(first) == digest(second) != digest(other)
    assert rows(first / "eval.jsonl")[0] == rows(other / "eval.jsonl")[0], "the start does not depend on the seed"


@pytest.mark.slow
def test_going_on_from_a_named_checkpoint_repeats_the_rest(train):
    run = train()
    before = digest(run), rows(run / "metrics.jsonl")
    resumed = train(resume=Resume("auto", run / "checkpoints" / "step-000002"))
    assert (digest(resumed), rows(resumed / "metrics.jsonl")) == before


PLUGIN = """
import math
from retrain import loss, reward

@loss("not_a_number", vanishes=True)
def not_a_number(logprobs, advantages):
    return logprobs * math.nan

def fails_on_some(completion, answer):
    if len(completion) % 3 == 0:
        raise ValueError("no score for this one")
    return float(len(completion) % 2)

def constant(completion, answer):
    return 1.0

def reports(ctx):
    from retrain import TransformOutput
    rows = [[a] * len(row) for a, row in zip(ctx.episode_advantages, ctx.logprobs_G)]
    return TransformOutput(rows, {"mine/nonfinite": 1.0})

def texts(ctx):
    from retrain import TransformOutput
    rows = [[a] * len(row) for a, row in zip(ctx.episode_advantages, ctx.logprobs_G)]
    fits = all(len(texts) == len(row) for texts, row in zip(ctx.token_texts, ctx.logprobs_G))
    return TransformOutput(rows, {"mine/fits": float(fits), "mine/letters": len("".join(ctx.token_texts[0]))})

def lottery(rewards):
    import random
    import numpy, torch
    draws = [random.random() + numpy.random.rand() + float(torch.rand(())) for _ in rewards]
    return [draw - sum(draws) / len(draws) for draw in draws]
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "mine_for_loop.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_three_nonfinite_updates_end_the_run_and_keep_the_batch(train, plugin, tmp_path):
    with pytest.raises(DivergedError, match="3 times in a row"):
        train('loss=[{name="mine_for_loop.not_a_number"}]', 'algorithm.advantage_mode="mine_for_loop.lottery"')
    run = tmp_path / "runs" / "run"
    assert len(rows(run / "metrics.jsonl")) == 3
    assert all(row["update/nonfinite"] == 1 for row in rows(run / "metrics.jsonl"))
    assert (run / "rollouts" / "diverged-000002.jsonl.gz").is_file()


@pytest.mark.slow
def test_a_plain_transform_reads_the_texts_of_tokens(train, plugin):
    run = train('algorithm.transform_mode=["mine_for_loop.texts"]', "training.max_steps=1")
    (row,) = rows(run / "metrics.jsonl")
    assert row["mine/fits"] == 1.0
    assert row["mine/letters"] > 0


@pytest.mark.slow
def test_a_plugin_that_draws_from_the_global_generators_is_resumed_bit_for_bit(resumed, plugin):
    resumed('algorithm.advantage_mode="mine_for_loop.lottery"')


@pytest.mark.slow
def test_failed_scores_are_masked_and_counted_never_zero(train, plugin):
    run = train(
        'rewards=[{name="mine_for_loop.fails_on_some"}]', "logging.rollouts_every=1", "reward_pool.max_failed=1.0"
    )
    failed = 0
    for step, row in enumerate(rows(run / "metrics.jsonl")):
        stored = gzip.decompress((run / "rollouts" / f"step-{step:06d}.jsonl.gz").read_bytes()).splitlines()
        rollouts = [json.loads(line) for line in stored]
        unscored = [rollout for rollout in rollouts if rollout["reward"] is None]
        assert row["reward/failed"] == len(unscored)
        assert all(rollout["status"] == "error" and "advantages" not in rollout for rollout in unscored)
        scored = [rollout["reward"] for rollout in rollouts if rollout["reward"] is not None]
        assert row["reward/mean"] == pytest.approx(sum(scored) / len(scored))
        failed += len(unscored)
    assert failed > 0


def test_too_many_failed_scores_are_the_users_error(train, plugin):
    with pytest.raises(UserCodeError, match="no score for this one") as caught:
        train('rewards=[{name="mine_for_loop.fails_on_some"}]', "reward_pool.max_failed=0.0")
    assert caught.value.__notes__ == ["after 0 steps"]


@pytest.mark.slow
def test_groups_without_signal_are_resampled_a_bounded_number_of_times(train, plugin):
    run = train('rewards=[{name="mine_for_loop.constant"}]', "rollout.resample=uninformative", "rollout.max_resample=2")
    for row in rows(run / "metrics.jsonl"):
        assert row["rollout/completions"] == 3 * 4 * 3, "one round and two more, three groups of four each"
        assert row["update/skipped"] == 1


def test_training_raises_the_reward(train, tmp_path, monkeypatch):
    """Behavior: rewarded for short completions, the model writes shorter ones."""
    (tmp_path / "short_reward.py").write_text("def short(length, max_tokens):\n    return 1.0 - length / max_tokens\n")
    monkeypatch.chdir(tmp_path)
    run = train(
        'rewards=[{name="short_reward.short"}]',
        "training.max_steps=20",
        "training.batch_size=8",
        "training.lr=1e-3",
        "eval.problems=0",
    )
    lengths = [row["tokens/response"] for row in rows(run / "metrics.jsonl")]
    assert sum(lengths[-5:]) < 0.8 * sum(lengths[:5])


def test_without_rl_steps_the_warm_started_model_is_evaluated_and_saved(train):
    run = train("training.max_steps=0")
    assert [row["step"] for row in rows(run / "eval.jsonl")] == [0]
    assert (run / "model" / "model.safetensors").is_file()
    assert not (run / "metrics.jsonl").exists()


TRACKERS = """
class Unreachable:
    def __init__(self, run_dir):
        raise OSError("no route to host")

    def log(self, step, metrics):
        pass
"""


def test_a_tracker_that_cannot_be_built_costs_a_warning(train, tmp_path, monkeypatch):
    (tmp_path / "unreachable_tracker.py").write_text(TRACKERS)
    monkeypatch.chdir(tmp_path)
    said = []
    run = train(
        'logging.trackers=["unreachable_tracker.Unreachable"]',
        observe=lambda event, details: said.append(str(details.get("text"))),
    )
    assert len(rows(run / "metrics.jsonl")) == 4
    assert any("no route to host" in text and "continues" in text for text in said)


COUNTING = """
import torch


class Counting:
    def __init__(self, *, attribute: str = "seen"):
        self.seen, self.attribute, self.tensor, self.inner = 0, attribute, torch.zeros(2), {"seen": [0]}

    def __call__(self, advantages, response_mask):
        if self.attribute == "seen":
            self.seen += 1
        elif self.attribute == "tensor":
            self.tensor += 1
        elif self.attribute == "inner":
            self.inner["seen"][0] += 1
        return advantages * response_mask
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("attribute", ["seen", "tensor", "inner", ""])
def test_a_state_that_no_checkpoint_holds_is_named_once(train, tmp_path, monkeypatch, attribute):
    (tmp_path / "counting_transform.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    texts = []
    options = ["training.max_steps=3", "eval.problems=0", "checkpoint.every=1"]
    options += [f'plugins.search_paths=["{tmp_path}"]', 'algorithm.transform_mode="counting_transform.Counting"']
    options += [f'algorithm.transform_params.attribute="{attribute}"']
    train(*options, observe=lambda event, details: texts.append(str(details.get("text", ""))))
    warned = [text for text in texts if "no state_dict" in text]
    assert len(warned) == bool(attribute), texts
    assert all(f"has changed its {attribute} and" in text for text in warned)
