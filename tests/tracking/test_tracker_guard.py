"""A tracker that raises, hangs or exits costs one warning and nothing else."""

import threading

import pytest

from retrain.tracking.tracker_guard import _WAITING, SafeTracker


class Ear:
    def __init__(self):
        self.events = []

    def __call__(self, event, details):
        self.events.append((event, details["level"], details["text"]))


class Memory:
    """A tracker that works."""

    where = ""

    def __init__(self):
        self.rows, self.closed = [], False

    def log(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def completions(self, step, rows):
        self.rows.append((step, rows))

    def close(self):
        self.closed = True


def test_rows_arrive_in_order_and_unshared():
    memory, ear = Memory(), Ear()
    guard = SafeTracker("memory", memory, ear)
    metrics = {"a": 0.0}
    for step in range(50):
        metrics["a"] = float(step)
        guard.log(step, metrics)
    guard.completions(49, [{"text": "x"}])
    guard.close()
    assert memory.rows == [*((step, {"a": float(step)}) for step in range(50)), (49, [{"text": "x"}])]
    assert memory.closed
    assert ear.events == []


def test_where_a_tracker_shows_its_rows_is_told_once():
    class Shown(Memory):
        def log(self, step, metrics):
            self.where = "https://example.org/1"

    told = []
    guard = SafeTracker("shown", Shown(), lambda event, details: told.append((event, details)))
    for step in range(3):
        guard.log(step, {})
    guard.close()
    assert told == [("tracker", {"name": "shown", "where": "https://example.org/1"})]


@pytest.mark.parametrize("error", [RuntimeError("no network"), SystemExit(1), KeyboardInterrupt()])
def test_a_tracker_that_raises_is_dropped_with_one_warning(error):
    class Broken(Memory):
        def log(self, step, metrics):
            super().log(step, metrics)
            raise error

    broken, ear = Broken(), Ear()
    guard = SafeTracker("broken", broken, ear)
    for step in range(5):
        guard.log(step, {})
    guard._thread.join()
    guard.log(5, {})
    guard.close()
    assert len(broken.rows) == 1
    assert not broken.closed
    [(event, level, text)] = ear.events
    assert (event, level) == ("message", "warning")
    assert text.startswith(f"tracker broken raised {type(error).__name__}")
    assert "metrics.jsonl is complete" in text


@pytest.mark.parametrize("verb", ["log", "completions", "close", "where"])
def test_a_tracker_whose_attribute_raises_is_dropped_with_one_warning(verb):
    class Broken(Memory):
        pass

    def raising(self):
        raise RuntimeError("no such attribute")

    setattr(Broken, verb, property(raising))
    ear = Ear()
    guard = SafeTracker("broken", Broken(), ear)
    guard.log(0, {"a": 1.0})
    guard.completions(0, [{"text": "x"}])
    guard.close()
    [(_, level, text)] = ear.events
    assert level == "warning"
    assert "raised RuntimeError: no such attribute" in text


def test_a_tracker_that_hangs_at_close_is_left_behind():
    release = threading.Event()

    class Hanging(Memory):
        def close(self):
            release.wait()

    ear = Ear()
    guard = SafeTracker("hanging", Hanging(), ear, patience_s=0.05)
    guard.log(0, {})
    guard.close()
    assert "did not finish within 0.05 s" in ear.events[0][2]
    release.set()


def test_a_tracker_that_hangs_in_log_is_dropped_when_rows_pile_up():
    release = threading.Event()

    class Hanging(Memory):
        def log(self, step, metrics):
            release.wait()

    ear = Ear()
    guard = SafeTracker("hanging", Hanging(), ear)
    for step in range(_WAITING + 5):
        guard.log(step, {})
    guard.close()
    assert len(ear.events) == 1
    assert f"is {_WAITING} rows behind" in ear.events[0][2]
    release.set()
