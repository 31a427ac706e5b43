"""`[rollout] overlap`: what is sampled ahead, that nothing depends on timing, and that it ends as it should."""

import json
import threading
import time

import pytest

from retrain.engines.torch_engine import TorchEngine
from retrain.errors import DivergedError, EngineError
from retrain.run.collectors.rounds import collect
from retrain.run.session import Resume
from retrain.storage import checkpoint
from retrain.training.policy import TorchPolicy
from tests.small_runs import digest, rows, stored

pytestmark = pytest.mark.slow

EXACT = ("model.dtype=float32", "torch.dtype=float32", "training.lr=1e-3", "rollout.parity_every=1")
AHEAD = (*EXACT, "rollout.overlap=1", "reward_pool.workers=1", "logging.rollouts_every=1")


def sampling_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("sampling")]


@pytest.fixture
def slowly(monkeypatch):
    """Make sampling in the thread, or the update beside it, take a while."""

    def slow(owner, method):
        real = getattr(owner, method)

        def late(self, *args):
            time.sleep(0.15)
            return real(self, *args)

        monkeypatch.setattr(owner, method, late)

    yield slow
    assert not sampling_threads(), "no thread outlives the run"


def test_the_first_batch_is_on_policy_and_every_later_one_a_step_old(train, slowly):
    run = train(*AHEAD)
    metrics = rows(run / "metrics.jsonl")
    assert [row["rollout/staleness"] for row in metrics] == [0, 1, 1, 1]
    versions = [{row["weights_version"] for row in stored(run, step)} for step in range(4)]
    assert versions == [{0}, {0}, {1}, {2}]
    assert metrics[0]["mismatch/kl"] < 1e-6 < metrics[1]["mismatch/kl"], "older weights show as a mismatch"
    assert all(row["parity/logp_diff_mean"] < 1e-4 for row in metrics), "and not as a failure of the sampler"


def test_older_weights_are_corrected_for(train, slowly):
    """A cap that leaves nothing of any advantage shows that the correction is at work, whatever assigns credit."""
    assert all(row["grad/norm"] > 1e-3 for row in rows(train(*AHEAD) / "metrics.jsonl"))
    for number, chain in enumerate(("tis", "gtpo", ["gtpo", "tis"])):
        run = train(*AHEAD, "tis.cap=1e-9", f"algorithm.transform_mode={json.dumps(chain)}", name=f"chain{number}")
        assert all(row["grad/norm"] < 1e-6 for row in rows(run / "metrics.jsonl"))


def test_what_is_slower_changes_nothing(train, slowly):
    quick = train(*AHEAD, name="quick")
    slowly(TorchEngine, "sample")
    sampling = train(*AHEAD, name="slow-sampling")
    slowly(TorchPolicy, "update")
    updating = train(*AHEAD, name="slow-update-as-well")
    assert rows(quick / "metrics.jsonl") == rows(sampling / "metrics.jsonl") == rows(updating / "metrics.jsonl")
    assert digest(quick) == digest(sampling) == digest(updating)


@pytest.mark.parametrize(("depth", "staleness"), [(1, [0, 1, 1, 1]), (2, [0, 1, 2, 2])])
def test_a_resumed_run_trains_on_the_batches_that_waited(train, stopped, slowly, tmp_path, depth, staleness):
    older = (*AHEAD, f"rollout.overlap={depth}")
    whole = train(*older, name="whole")
    metrics = rows(whole / "metrics.jsonl")
    assert [row["rollout/staleness"] for row in metrics] == staleness
    assert all(row["parity/logp_diff_mean"] < 1e-4 for row in metrics)
    stopped(*older, name="parts")
    newest, _ = checkpoint.newest(tmp_path / "runs" / "parts" / "checkpoints", print, holds_lock=True)  # pyright: ignore
    done = checkpoint.step_of(newest)
    assert done < 4
    assert [one["step"] for one in checkpoint.load(newest)["ahead"]] == [*range(done, min(4, done + depth))]
    run = train(*older, name="parts", resume=Resume("auto"))
    assert rows(run / "metrics.jsonl") == metrics
    assert rows(run / "eval.jsonl") == rows(whole / "eval.jsonl")
    assert digest(run) == digest(whole)
    assert "ahead" not in checkpoint.load(run / "checkpoints" / "step-000004")


def test_overlap_may_be_switched_off_at_a_resume_and_the_waiting_batch_is_sampled_again(train, stopped, slowly):
    stopped(*AHEAD)
    plain = ("rollout.overlap=0", *(option for option in AHEAD if "overlap" not in option))
    run = train(*plain, resume=Resume("auto", allow_change=["rollout.overlap"]))
    assert [row["rollout/staleness"] for row in rows(run / "metrics.jsonl")] == [0, 1, 1, 0]


def test_an_error_of_the_thread_ends_the_run_as_its_own_and_keeps_what_was_trained(
    train, monkeypatch, slowly, tmp_path
):
    def fails(parts, step, cursor):
        if step == 2:
            assert sampling_threads() == [threading.current_thread()]
            raise EngineError("the sampler is gone")
        return collect(parts, step, cursor)

    with monkeypatch.context() as patch:
        patch.setattr("retrain.run.collectors.steps.collect", fails)
        with pytest.raises(EngineError, match="the sampler is gone"):
            train(*AHEAD, "checkpoint.every=0")
    run = tmp_path / "runs" / "run"
    assert json.loads((run / "status.json").read_text())["exit_code"] == EngineError.exit_code
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [0, 1], "the step beside it was finished"
    train(*AHEAD, "checkpoint.every=0", resume=Resume("auto"))
    assert [row["rollout/staleness"] for row in rows(run / "metrics.jsonl")] == [0, 1, 0, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), DivergedError("no number")])
def test_an_error_of_the_trainer_waits_for_the_thread_and_leaves(train, monkeypatch, slowly, error):
    slowly(TorchEngine, "sample")

    def fails(self, batch, objective, epochs):
        raise error

    monkeypatch.setattr(TorchPolicy, "update", fails)
    with pytest.raises(type(error), match=str(error)):
        train(*AHEAD, "eval.problems=0")
