"""SIGTERM: at once where there is nothing to save, after the step where there is, at once the second time."""

import os
import signal
import sys
import threading

import pytest

from retrain.errors import Preempted
from retrain.protocols import ALONE
from retrain.run.loop import _agreed_signal
from retrain.run.stop_signal import Stop
from tests.forks import run_source
from tests.waiting import PATIENCE_S


def test_before_the_first_step_the_run_ends_at_once_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="before a step began"), Stop():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(Preempted, match=r"; run the same command$"), Stop("run the same command"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_during_a_step_it_is_noted():
    told = []
    with Stop() as stop:
        stop.defer(lambda: told.append(stop.requested))
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGTERM"
    assert told == ["SIGTERM"]


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
