"""Answers go to their calls, and the calls of a worker that ends know which of them is to blame."""

import asyncio
import os
import signal
import socket
import sys
from typing import Any

import pytest

from retrain.errors import UserCodeError
from retrain.system import event_loop
from retrain.system.worker_pool import CallLost, WorkerPool
from retrain.system.worker_process import WorkerSpec

ANSWERS = {"fine": b'[1, "a"]\n[2, "b"]\n', "ends": b""}


def stand_in():
    """As a module: writes what its first call names, and nothing else."""
    import pickle

    pipe = socket.socket(fileno=int(sys.argv[1]))
    calls = pipe.makefile("rb")
    *_, name = pickle.load(calls)
    pipe.sendall(b'[0, ["ready"]]\n')
    if name == "leaves":  # before anything was asked
        return
    pickle.load(calls)
    pickle.load(calls)
    pipe.sendall(ANSWERS[name])
    if name != "ends":
        calls.read()


async def two_calls(name, at_once=1) -> Any:
    """What two calls of one worker come to: text, or the reason, and who is guilty."""
    pool = WorkerPool(WorkerSpec("a stand-in", __name__, name, 0, 600.0, at_once=at_once), 1)
    worker = await pool.worker(0)
    found = await asyncio.gather(worker.call(1), worker.call(2), return_exceptions=True)
    await pool.close()
    return [(str(one), one.guilty) if isinstance(one, CallLost) else one for one in found]


def test_answers_go_to_their_calls():
    assert event_loop.run(two_calls("fine")) == ["a", "b"]


def test_a_worker_that_ends_blames_the_call_under_way():
    (why, guilty), *later = event_loop.run(two_calls("ends"))
    assert "exit code 0" in why
    assert guilty
    assert [blamed for _, blamed in later] == [False]


def test_of_calls_that_are_under_way_together_any_may_be_guilty():
    assert [guilty for _, guilty in event_loop.run(two_calls("ends", at_once=2))] == [None, None]


def test_workers_that_end_before_a_call_are_not_started_for_ever():
    async def start_again():
        pool = WorkerPool(WorkerSpec("a stand-in", __name__, "leaves", 0, 600.0), 1)
        for _ in range(50):
            worker = await pool.worker(0)
            while worker.lost is None:
                await asyncio.sleep(0.01)

    with pytest.raises(UserCodeError, match="a stand-in ended its process 5 times in a row"):
        event_loop.run(start_again())


def test_what_is_raised_in_the_waiting_thread_ends_the_coroutine_first():
    """Ctrl-C: the coroutine cleans up, and then the exception is raised."""
    ended = []

    async def wait():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        event_loop.run(wait())
    assert ended == [True]


def test_functions_are_called_in_the_thread_that_waits():
    async def calls():
        inner = await asyncio.gather(*(event_loop.call_in_caller(lambda n=n: (n, os.getpid())) for n in range(3)))
        with pytest.raises(ZeroDivisionError, match="by zero"):
            await event_loop.call_in_caller(lambda: 1 / 0)
        return inner

    assert event_loop.run(calls()) == [(n, os.getpid()) for n in range(3)]


if __name__ == "__main__":
    stand_in()
