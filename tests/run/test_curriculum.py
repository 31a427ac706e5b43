"""A run whose curriculum learns: it resumes as if it had not been interrupted."""

import pytest

from retrain.run.session import Resume
from tests.small_runs import digest, rows


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resumed_run_chooses_as_the_whole_one(train, stopped, tmp_path, ahead):
    few = (
        "training.curriculum=band",
        "addition.min_digits=1",
        "addition.max_digits=1",
        "training.max_steps=6",
        "band.candidates=3",
    )
    settings = (*few, f"rollout.overlap={ahead}", "reward_pool.workers=1", "logging.rollouts_every=1")
    whole = train(*settings, name="whole")
    stopped(*settings, name="cut")
    cut = train(*settings, name="cut", resume=Resume("auto"))
    found = rows(cut / "metrics.jsonl")
    assert [row["curriculum/known"] for row in found] == [
        row["curriculum/known"] for row in rows(whole / "metrics.jsonl")
    ]
    assert digest(cut) == digest(whole)
