"""What a worker sends is taken as the answer to a call under way, or the worker is lost; and who is blamed."""

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

ANSWERS = {
    "fine": b'[1, "a"]\n[2, "b"]\n',
    "garbage": b"\x00\x00\x00\x10abc\n",
    "twice": b'[1, "a"]\n[1, "a"]\n',
    "ahead": b'[1, "a"]\n[3, "c"]\n',
    "endless": b"x" * (3 << 20),
    "ends": b"",
}


def stand_in():
    """As a module: writes what its first call names, and nothing else."""
    import pickle

    pipe = socket.socket(fileno=int(sys.argv[1]))
    calls = pipe.makefile("rb")
    *_, name = pickle.load(calls)
    pipe.sendall(b'[0, ["ready"]]\n' + (b'[1, "a"]\n' if name == "speaks" else b""))
    if name == "speaks":  # in one piece, before anything was asked
        calls.read()
    pickle.load(calls)
    pickle.load(calls)
    pipe.sendall(ANSWERS[name])
    if name != "ends":
        calls.read()


def text(answer):
    if not isinstance(answer, str):
        raise ValueError("it is not text")
    return answer


async def two_calls(name, at_once=1) -> Any:
    """What two calls of one worker come to: text, or the reason, and who is guilty."""
    pool = WorkerPool(WorkerSpec("a stand-in", __name__, name, 0, 600.0, at_once=at_once), 1)
    worker = await pool.worker(0)
    found = await asyncio.gather(worker.call(1, text), worker.call(2, text), return_exceptions=True)
    await pool.close()
    return [(str(one), one.guilty) if isinstance(one, CallLost) else one for one in found]


def test_answers_go_to_their_calls():
    assert event_loop.run(two_calls("fine")) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "reason", "answered", "guilty"),
    [
        ("garbage", "an invalid answer", 0, True),
        ("endless", "without an end", 0, True),
        ("ends", "exit code 0", 0, True),
        ("ahead", "to no call", 1, True),
        ("twice", "answered a call twice", 1, False),
    ],
)
def test_anything_else_loses_the_worker_and_blames_the_call_under_way(name, reason, answered, guilty):
    found = event_loop.run(two_calls(name))
    assert found[:answered] == ["a"][:answered]
    (why, first), *later = found[answered:]
    assert reason in why
    assert first == guilty
    assert [blamed for _, blamed in later] == [False] * len(later)


@pytest.mark.parametrize("name", ["garbage", "ends"])
def test_of_calls_that_are_under_way_together_any_may_be_guilty(name):
    assert [guilty for _, guilty in event_loop.run(two_calls(name, at_once=2))] == [None, None]


def test_an_answer_that_nobody_asked_for_ends_an_idle_worker_and_such_workers_are_not_started_for_ever():
    pool = WorkerPool(WorkerSpec("a stand-in", __name__, "speaks", 0, 600.0), 1)
    with pytest.raises(UserCodeError, match="a stand-in ended its process 5 times in a row"):
        event_loop.run(pool.call_all([1], lambda _, answer: answer))
    event_loop.run(pool.close())


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
