"""A signal stops at once where there is nothing to save, after the step where there is, at once the second time."""

import json
import os
import queue
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from retrain.config.schema import Checkpoint
from retrain.errors import Preempted
from retrain.protocols import ALONE
from retrain.run.loop import _agreed_signal
from retrain.run.stop_signal import Stop
from retrain.storage.run_directory import RunDirectory
from tests.forks import run_source
from tests.waiting import PATIENCE_S


def test_before_the_first_step_the_run_ends_at_once_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="before a step began"), Stop() as stop, stop.at_once():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(Preempted, match=r"; run it$"), Stop("run it") as stop, stop.at_once():
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("caught", [Exception, BaseException])
def test_a_run_ends_although_what_it_tries_at_its_start_catches_everything(train, tmp_path, monkeypatch, caught):
    signals = iter([signal.SIGTERM])

    def tried(layer):
        with suppress(caught):
            for number in signals:
                os.kill(os.getpid(), number)
        return False

    monkeypatch.setattr("retrain.training.cpu_kernels._is_rms_norm", tried)
    with pytest.raises(Preempted, match="before a step began"):
        train()
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()
    assert json.loads((tmp_path / "runs/run/status.json").read_text())["outcome"] == "preempted"


@pytest.mark.parametrize(
    ("number", "name", "error"), [(signal.SIGTERM, "SIGTERM", Preempted), (signal.SIGINT, "Ctrl-C", KeyboardInterrupt)]
)
def test_during_a_step_it_is_noted_and_announced(number, name, error):
    calls, events = [], queue.Queue()
    with Stop(observe=lambda *event: events.put(event)) as stop:
        stop.defer(lambda: calls.append(stop.requested))
        os.kill(os.getpid(), number)
        assert stop.requested == name
    assert calls == [name]
    kind, details = events.get(timeout=PATIENCE_S)
    assert (kind, details["text"]) == (
        "message",
        f"{name}: the run finishes its step, saves and ends; a second signal ends it at once",
    )
    stopped = stop.stopped(" after step 3")
    assert isinstance(stopped, error)
    assert f"stopped by {name} after step 3" in [str(stopped), *getattr(stopped, "__notes__", ())]


def test_a_second_interrupt_ends_a_step_at_once():
    with Stop() as stop:
        stop.defer(lambda: None)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_while_the_directory_is_opened_ends_the_run_once_it_is_open(tmp_path):
    directory = RunDirectory(tmp_path / "run", "new", Checkpoint(), lambda *_: None)
    with Stop(held=True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted, match="before a step began"), directory, stop.at_once():
            pass
    assert json.loads((tmp_path / "run" / "status.json").read_text())["outcome"] == "preempted"


def test_in_another_thread_there_are_no_handlers():
    def enter():
        with Stop():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(enter).result() is signal.getsignal(signal.SIGTERM)


def test_a_signal_that_comes_while_ranks_agree_counts_after_the_next_step(monkeypatch):
    def interrupted(self, value):
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGTERM)
        return [value]

    monkeypatch.setattr(type(ALONE), "all_gather", interrupted)
    with Stop() as stop:
        stop.defer(lambda: None)
        assert _agreed_signal(ALONE, stop) == ""
        assert stop.requested == "SIGTERM"
        assert _agreed_signal(ALONE, stop) == "SIGTERM"


def test_the_second_one_ends_the_process():
    text = (
        "import os, signal\nfrom retrain.run.stop_signal import Stop\n"
        "with Stop() as stop:\n    stop.defer(None)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('alive')\n"
    )
    done = run_source(text)
    assert (done.returncode, done.stdout) == (75, "")


def test_an_interrupt_that_python_drops_is_sent_again():
    class Dropped:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            signal.getsignal(signal.SIGINT)  # by then the handler has run

    def hang():
        Dropped()
        threading.Event().wait(PATIENCE_S)

    with pytest.raises(KeyboardInterrupt), Stop():
        hang()
    hook = sys.unraisablehook
    with Stop():
        assert sys.unraisablehook != hook
    assert sys.unraisablehook == hook


def test_an_interrupt_that_the_parent_ignores_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.requested
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
