"""The warm starts of a campaign: as many at a time as it has slots, and none left behind."""

import pytest

from retrain.campaign import driver
from retrain.campaign.plan.load_campaign import load_campaign
from retrain.campaign.work import run_process
from retrain.campaign.work.campaign_directory import create

CAMPAIGN = """
warmup = {{ steps = 2, batch_size = 2, problems = 4 }}
eval = {{ problems = 0 }}
[campaign]
seeds = 3
warm_starts = {starts}
slots = 2
conditions = [
    {{ label = "grpo" }},
    {{ label = "maxrl", advantage_mode = "maxrl" }},
]
"""


@pytest.fixture
def computed(cwd, monkeypatch):
    """Returns a function that computes the warm starts of a campaign, and what happens meanwhile."""
    monkeypatch.setenv("RETRAIN_CACHE", str(cwd / "cache"))
    seen, real = [], run_process.warm_start

    class Watched:
        def __init__(self, run, log, environment):
            self.run, self.process = run.name, real(run, log, environment)
            seen.append(("start", self.run, environment.get("OMP_NUM_THREADS")))

        def wait(self):
            seen.append(("wait", self.run, self.process.wait()))

    def compute(starts, watched=Watched):
        monkeypatch.setattr(run_process, "warm_start", watched)
        (cwd / "sweep.toml").write_text(CAMPAIGN.format(starts=starts))
        loaded = load_campaign(cwd / "sweep.toml")
        campaign = create(loaded, False)
        driver.warm_start(loaded, campaign, campaign.jobs, lambda event, details: seen.append(details["text"]))
        return seen

    compute.watched = Watched
    return compute


def test_warm_starts_are_computed_in_the_slots(computed, monkeypatch):
    monkeypatch.setattr(driver, "end", lambda process: None)
    assert computed(3) == [
        "computing 3 warm starts, unless in the cache",
        *(("start", "s0", "1"), ("start", "s1", "1"), ("wait", "s0", 0), ("wait", "s1", 0)),
        *(("start", "s2", "1"), ("wait", "s2", 0)),
    ]


def test_one_warm_start_has_all_threads(computed, monkeypatch):
    monkeypatch.setattr(driver, "end", lambda process: None)
    assert computed(1) == ["computing 1 warm start, unless in the cache", ("start", "s0", None), ("wait", "s0", 0)]


def test_an_interruption_ends_all_of_them(computed, monkeypatch):
    class Interrupted(computed.watched):
        def wait(self):
            raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr(driver, "end", lambda process: ended.append((process.run, process.process.wait())))
    with pytest.raises(KeyboardInterrupt):
        computed(2, Interrupted)
    assert ended == [("s1", 0), ("s0", 0)]
