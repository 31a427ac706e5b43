"""Leases: one owner at a time, whoever dies, and without comparing clocks."""

import json

import pytest

from retrain.campaign.work.lease import LeaseWatch, held
from tests.forks import run_source


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "leases"


class Clock:
    """Seconds pass when the test says so."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("retrain.campaign.work.lease.time", made)
    return made


def take(folder, lease_s=60.0, progress=None, watch=None):
    return (watch or LeaseWatch(folder, lease_s)).take("a/s0", progress or folder / "metrics.jsonl")


def foreign(folder, **changes):
    """A lease that a process of another machine holds."""
    lease = take(folder)
    path = folder / "a/s0/1.json"
    facts = json.loads(path.read_text())
    facts["owner"] |= {"machine": "elsewhere"}
    path.write_text(json.dumps(facts | changes))
    return lease, path


def test_a_lease_has_one_owner(folder):
    lease = take(folder)
    assert lease.owned()
    assert take(folder) is None
    assert held(folder, "a/s0") is True
    assert held(folder, "b/s0") is None


def test_a_released_lease_is_free_and_hands_its_facts_on(folder):
    lease = take(folder)
    lease.beat(crashes=1, child={"machine": "here", "pid": 7})
    lease.release()
    assert held(folder, "a/s0") is False
    second = take(folder)
    assert second.facts["crashes"] == 1
    assert second.previous["child"] == {"machine": "here", "pid": 7}
    assert not lease.owned()


def test_the_lease_of_a_dead_process_of_this_machine_is_free_at_once(folder):
    code = (
        "import sys; from pathlib import Path; from retrain.campaign.work.lease import LeaseWatch;"
        f"LeaseWatch(Path({str(folder)!r}), 1e6).take('a/s0', Path('none'))"
    )
    assert run_source(code).returncode == 0
    assert held(folder, "a/s0") is False
    assert take(folder, 1e6) is not None


def test_a_silent_lease_of_another_machine_is_free_after_its_time_by_the_watchers_clock(folder, clock):
    _, path = foreign(folder)
    watch = LeaseWatch(folder, 0.3)
    assert take(folder, watch=watch) is None, "it may be alive: it has just been seen for the first time"
    clock.passes(0.2)
    path.write_text(path.read_text().replace('"beat": 1', '"beat": 2'))
    clock.passes(0.2)
    assert take(folder, watch=watch) is None, "it showed a sign of life"
    clock.passes(0.4)
    assert take(folder, watch=watch) is not None


def test_a_frozen_worker_whose_run_goes_on_keeps_its_lease(folder, tmp_path, clock):
    foreign(folder)
    watch, progress = LeaseWatch(folder, 0.3), tmp_path / "metrics.jsonl"
    for step in range(4):
        progress.write_text("row\n" * step)
        assert take(folder, watch=watch, progress=progress) is None
        clock.passes(0.2)


def test_of_two_that_take_over_at_once_one_succeeds(folder, clock):
    foreign(folder)
    first, second = LeaseWatch(folder, 0.05), LeaseWatch(folder, 0.05)
    assert take(folder, watch=first) is None
    assert take(folder, watch=second) is None
    clock.passes(0.1)
    assert (take(folder, watch=first) is None) is False
    assert take(folder, watch=second) is None, "the lease it watched is not the newest any more"


def test_a_beat_after_the_take_over_does_not_touch_the_new_lease(folder, clock):
    lost, _ = foreign(folder)
    watch = LeaseWatch(folder, 0.05)
    take(folder, watch=watch)
    clock.passes(0.1)
    new = take(folder, watch=watch)
    before = (folder / "a/s0/2.json").read_text()
    lost.beat(crashes=9)
    assert (folder / "a/s0/2.json").read_text() == before
    assert new.owned()
    assert not lost.owned()


def test_a_file_that_is_half_written_counts_as_a_sign_of_life(folder, clock):
    _, path = foreign(folder)
    path.write_text('{"owner": {"ho')
    watch = LeaseWatch(folder, 0.2)
    assert take(folder, watch=watch) is None
    assert held(folder, "a/s0") is True
    clock.passes(0.3)
    assert take(folder, watch=watch) is not None, "and it is free when it stays so"
