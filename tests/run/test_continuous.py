"""`[rollout] mode = "continuous"`: what is trained on, how stale it is, and what a stopped run keeps."""

import itertools
import signal
import threading
import time

import pytest

from retrain.errors import Preempted, UserCodeError
from retrain.run.collectors import continuous
from retrain.run.session import Resume
from retrain.storage import checkpoint
from retrain.system.event_loop import check_stop
from tests.small_runs import rows, stored

EXACT = ("model.dtype=float32", "torch.dtype=float32", "training.lr=1e-3", "rollout.parity_every=1")
FLOW = (*EXACT, "rollout.mode=continuous", "reward_pool.workers=1", "logging.rollouts_every=1")
ONE_AT_A_TIME = (*FLOW, "rollout.max_staleness=2", "rollout.in_flight=1")
GROUPS, SIZE, STEPS = 3, 4, 4
"""Of the small run."""


def trained_problems(run, steps=STEPS):
    """Ids of the problems of all groups, in the order of training."""
    return [id for step in range(steps) for id in dict.fromkeys(row["problem_id"] for row in stored(run, step))]


def first_problems(train, count):
    """Ids of the first problems of the task, as a run without continuous sampling meets them."""
    return trained_problems(train(*EXACT, "logging.rollouts_every=1", name="in-order"), count // GROUPS)


@pytest.fixture(autouse=True)
def no_threads(monkeypatch):
    monkeypatch.setattr(continuous, "_DRAIN_S", 0)  # a stopped run abandons the group that waits at the gate
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("sampling", "scoring"))], "no thread outlives the run"


class Gate:
    """Holds the groups that are to be scored after the first `count`, until it is opened or the run ends.

    Attributes:
        reached: set when the first of them is to be scored, so the groups before it are complete if one is
            in flight at a time.
    """

    def __init__(self, score, count):
        self.count, self.is_open, self.reached = count, False, threading.Event()
        self._score, self._calls = score, itertools.count()

    def __call__(self, *args):
        if next(self._calls) >= self.count:
            self.reached.set()
            while not self.is_open:
                check_stop()
                time.sleep(0.01)
        return self._score(*args)

    def stops_after(self, step):
        """An observer that sends SIGTERM in a step, once a group is held."""

        def observe(event, details):
            if event == "step" and details["step"] == step:
                assert self.reached.wait(60)
                signal.raise_signal(signal.SIGTERM)

        return observe


@pytest.fixture
def gate(monkeypatch):
    """Two steps have their groups, and one group is complete beyond that."""
    held = Gate(continuous.score, 2 * GROUPS + 1)
    monkeypatch.setattr(continuous, "score", held)
    return held


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("most", [1, 2])
def test_every_prompt_is_trained_on_once_and_within_the_bound(train, most):
    said = []
    run = train(*FLOW, f"rollout.max_staleness={most}", observe=lambda event, details: said.append(details))
    metrics = rows(run / "metrics.jsonl")
    assert sorted(trained_problems(run)) == sorted(first_problems(train, GROUPS * STEPS))
    for step, row in enumerate(metrics):
        groups = [one["group"] for one in stored(run, step)]
        assert groups == [group for group in range(GROUPS) for _ in range(SIZE)], "groups are whole"
        assert row["rollout/in_flight"] + row["rollout/queued"] <= GROUPS * most
        assert 0 <= row["rollout/staleness_min"] <= row["rollout/staleness_mean"] <= row["rollout/staleness_max"]
    assert metrics[0]["rollout/staleness_max"] == 0
    assert max(row["rollout/staleness_max"] for row in metrics) >= 1
    assert all(row["parity/logp_diff_max"] < 1e-4 for row in metrics), "checked on fresh samples"
    assert any("cannot be repeated bit for bit" in str(one.get("text")) for one in said)


@pytest.mark.slow
def test_stale_tokens_are_corrected_and_their_mismatch_is_reported_by_staleness(train):
    run = train(*FLOW, "tis.cap=1e-9")
    metrics = rows(run / "metrics.jsonl")
    assert all(row["grad/norm"] < 1e-6 for row in metrics), "a cap that leaves nothing shows that tis is at work"
    ages = {name.rpartition("_")[2] for row in metrics for name in row if name.startswith("mismatch/kl_stale_")}
    assert ages >= {"0", "1"}
    assert metrics[0]["mismatch/kl_stale_0"] == pytest.approx(metrics[0]["mismatch/kl"])


@pytest.mark.slow
def test_a_checkpoint_keeps_complete_groups_and_prompts_in_flight(train, gate, tmp_path):
    """The resumed run trains on the first and samples the others again: no prompt is lost, none comes twice."""
    options = (*FLOW, "rollout.max_staleness=2", "rollout.in_flight=1")
    with pytest.raises(Preempted, match="after step 2"):
        train(*options, observe=gate.stops_after(1))
    run = tmp_path / "runs" / "run"
    [saved] = checkpoint.every(run / "checkpoints")[-1:]
    complete = [bool(group["rollouts"]) for group in checkpoint.load(saved)["groups"]["pending"]]
    assert complete.count(True) == 1
    assert complete.count(False) >= 1
    gate.is_open = True
    train(*options, resume=Resume("auto"))
    assert len(rows(run / "metrics.jsonl")) == STEPS
    assert sorted(trained_problems(run)) == sorted(first_problems(train, GROUPS * STEPS))


@pytest.mark.slow
def test_a_run_that_goes_on_without_continuous_sampling_loses_no_problem(train, gate, tmp_path):
    with pytest.raises(Preempted, match="after step 2"):
        train(*ONE_AT_A_TIME, observe=gate.stops_after(1))
    gate.is_open = True
    overrides = (*EXACT, "reward_pool.workers=1", "logging.rollouts_every=1")
    train(*overrides, resume=Resume("auto", allow_change=("rollout", "algorithm")))
    assert trained_problems(tmp_path / "runs" / "run") == first_problems(train, GROUPS * STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "most", "left"), [(0, 1, "trains on 1 .* samples [1-9] that"), (60, 9, "trains on [1-9]")]
)
def test_sigterm_waits_for_groups_in_flight_or_says_how_many_are_abandoned(
    train, gate, seconds, most, left, monkeypatch
):
    monkeypatch.setattr(continuous, "_DRAIN_S", seconds)
    gate.is_open = seconds > 0
    with pytest.raises(Preempted, match=rf"after step 2; --resume auto continues from there; it {left}"):
        train(*FLOW, f"rollout.in_flight={most}", "rollout.max_staleness=2", observe=gate.stops_after(1))


def test_an_error_of_a_group_ends_the_run(train, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("def broken(completion):\n    raise RuntimeError('on purpose')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserCodeError, match="on purpose"):
        train(*FLOW, f'plugins.search_paths=["{tmp_path}"]', 'rewards=[{name = "broken.broken"}]')


@pytest.mark.slow
def test_dropped_groups_are_replaced(train):
    run = train(*FLOW, "rollout.resample=uninformative", "rollout.max_resample=2")
    completions = [row["rollout/completions"] for row in rows(run / "metrics.jsonl")]
    assert len(completions) == STEPS
    assert all(count % SIZE == 0 and count <= 3 * GROUPS * SIZE for count in completions)
    assert len(trained_problems(run)) == len({*trained_problems(run)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        ('algorithm.advantage_mode="remax"',),
        ('source=[{name = "replay", params = {share = 0.4, max_staleness = 4}}]',),
        (
            'expert={path = "configs/data/addition_expert.jsonl", ratio = 0.25}',
            'loss=[{name="ppo_clip"}, {name="sft"}]',
        ),
    ],
)
def test_credit_and_sources_that_need_more_than_the_rollouts(train, extra):
    metrics = rows(train(*FLOW, *extra) / "metrics.jsonl")
    assert len(metrics) == STEPS
    assert any(name in metrics[-1] for name in ("reward/greedy", "replay/groups", "loss/sft"))


@pytest.mark.slow
def test_episodes_of_an_environment(train):
    game = ('task.name="sums"', 'environment.name="calculator"', "environment.turn_tokens=6", "training.max_tokens=24")
    run = train(*FLOW, *game, "environment.workers=1", "warmup.steps=0")
    assert len(rows(run / "metrics.jsonl")) == STEPS
    assert all(len(row["turns"]) >= 1 for row in stored(run, STEPS - 1))
    assert len({*trained_problems(run)}) == GROUPS * STEPS
