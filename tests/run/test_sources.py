"""Runs with sources: several experts, replay, and sources of the user's own."""

import json

import pytest

from retrain.errors import ConfigError, UserCodeError
from tests.run.test_expert_rows import conversation
from tests.small_runs import rows

OWN = '''
from dataclasses import replace
from retrain import ExpertRow, source


class Recorded:
    """Trains on the step's rollouts alone, and remembers what it saw."""

    def __init__(self):
        self.steps = 0

    def take(self, step, rollouts):
        return list(rollouts), {"recorded/steps": self.steps}

    def after(self, batch):
        self.steps += 1
        return {"recorded/rows": len(batch.rewards)}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def parity(completion, answer):
    """Tells completions apart where the answer is odd, and nowhere else."""
    return float(len(completion) % 2) if int(answer) % 2 else 0.0


class Bad:
    def __init__(self, *, fault: str):
        self.fault = fault

    def take(self, step, rollouts):
        new = [replace(one, group=7) for one in rollouts]
        return {
            "part": list(rollouts[1:]),
            "twice": [*rollouts, rollouts[0]],
            "text": ["hello"],
            "none": None,
            "prompts": new,
            "reward": [replace(rollouts[0], reward=float("nan"))],
            "ids": [replace(rollouts[0], prompt_ids=(10**6,))],
            "expert": [ExpertRow((1, 2, 3), ((1, 3),))],
            "spans": [ExpertRow((1, 2, 3), ((0, 3),))],
            "metric": (list(rollouts), {"reward/mean": 1.0}),
        }[self.fault]


@source("narrow", brings=("expert",))
class Narrow:
    def take(self, step, rollouts):
        return [replace(one, group=0) for one in rollouts[:4]]
'''


@pytest.fixture
def own(tmp_path):
    """Write the user's sources, and return overrides that name one."""
    (tmp_path / "own_sources.py").write_text(OWN)
    paths = f'plugins.search_paths=["{tmp_path}"]'
    return lambda name, params="{}": (paths, f'source=[{{name="own_sources.{name}", params={params}}}]')


FAULTS = {
    "part": "returned 3 of the 4 rollouts of group 0; return all or none",
    "none": "returned None, not a list of rollouts and expert rows",
    "prompts": "group 7 has two prompts",
    "reward": "its reward: Input should be a valid number",
    "expert": "no loss term trains on expert rows",
    "metric": "taken by the run",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_cannot_be_trained_on_name_their_source(train, own, fault):
    with pytest.raises(UserCodeError, match=f"own_sources.Bad.*{FAULTS[fault]}"):
        train(*own("Bad", f'{{fault="{fault}"}}'), "eval.problems=0")


def test_a_source_brings_what_its_decorator_says(train, own):
    with pytest.raises(UserCodeError, match='must declare "rollouts" in brings'):
        train(*own("Narrow"), 'loss=[{name="ppo_clip"}, {name="sft"}]', "eval.problems=0")


@pytest.mark.slow
def test_a_source_of_the_users_own_is_asked_shown_and_saved(resumed, own):
    found = rows(resumed(*own("Recorded"), "eval.problems=0") / "metrics.jsonl")
    assert [row["recorded/steps"] for row in found] == [0, 1, 2, 3]
    assert {row["recorded/rows"] for row in found} == {12}


@pytest.fixture
def replay(own):
    """Overrides of a run that replays: rewards differ in about every second group."""
    paths, _ = own("Recorded")
    return (paths, 'source=[{name="replay"}]', "replay.share=1.0", 'rewards=[{name="own_sources.parity"}]')


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_with_replay_resumes_as_if_it_had_not_been_interrupted(resumed, replay, ahead):
    options = (*replay, "training.max_steps=6", f"rollout.overlap={ahead}", f"reward_pool.workers={ahead}")
    found = rows(resumed(*options) / "metrics.jsonl")
    assert sum(row["replay/groups"] for row in found) > 0
    replayed = [row for row in found if row["replay/groups"]]
    assert all(row["replay/staleness"] >= min(row["step"], ahead + 1) for row in replayed)
    assert all(row["groups/informative"] <= 1 for row in found)


@pytest.mark.slow
def test_the_rollouts_of_another_run_are_replayed(train, replay):
    first = train(*replay, "logging.rollouts_every=1", name="first")
    path = f'replay.path="{first}/rollouts"'
    steps = rows(train(*replay, path, "training.seed=2", name="second") / "metrics.jsonl")
    assert steps[0]["replay/groups"] > 0
    assert "replay/staleness" not in steps[0]
    assert steps[0]["grad/norm"] > 0


def test_groups_of_a_run_without_greedy_rewards_are_no_source_for_remax(train, replay):
    first = train(*replay, "logging.rollouts_every=1", "training.max_steps=2", name="first")
    with pytest.raises(ConfigError, match="without the reward of a greedy completion, which remax subtracts"):
        train(*replay, f'replay.path="{first}/rollouts"', "algorithm.advantage_mode=remax", name="second")


@pytest.mark.slow
def test_several_experts_have_rows_positions_and_passes_of_their_own(resumed, tmp_path):
    for name, count in (("one", 4), ("two", 3)):
        lines = [conversation(f"{10 + n}+{20 + n}?\n", f"so {30 + 2 * n}") for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    entries = ", ".join(f'{{path="{tmp_path}/{name}.jsonl", ratio=0.2}}' for name in ("one", "two"))
    options = (f"expert=[{entries}]", 'loss=[{name="ppo_clip"}, {name="sft"}]')
    found = rows(resumed(*options) / "metrics.jsonl")
    assert [row["rollout/completions"] for row in found] == [4] * 4, "12 rows less 3 and 3: one prompt"
    assert [row["expert/epoch"] for row in found] == [0, 1, 2, 3]
    assert [row["expert_2/epoch"] for row in found] == [1, 2, 3, 4]
