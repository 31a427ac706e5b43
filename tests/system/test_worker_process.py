"""What a worker sends is taken as the answer to the next call, or it is lost."""

import socket
import sys

import pytest

from retrain.system.worker_process import Containment, WorkerLost, WorkerProcess

ANSWERS = {
    "fine": b'[1, "a"]\n[2, "b"]\n',
    "pieces": b'[1, "a"]\n[2, ',
    "garbage": b"\x00\x00\x00\x10abc\n",
    "deep": b"[" * 100_000 + b"\n",
    "number": b"7\n",
    "twice": b'[1, "a"]\n[1, "a"]\n',
    "ahead": b'[1, "a"]\n[3, "c"]\n',
    "unasked": b'[1, "a"]\n[2, "b"]\n[3, "c"]\n',
    "text": b'["1", "a"]\n',
    "truth": b'[true, "a"]\n',
    "endless": b"x" * (3 << 20),
}


def stand_in():
    """As a module: writes what its first call names, and nothing else."""
    import pickle

    pipe = socket.socket(fileno=int(sys.argv[1]))
    calls = pipe.makefile("rb")
    _, name = pickle.load(calls)
    pipe.sendall(b'[0, "hello"]\n')
    pickle.load(calls)
    pickle.load(calls)
    pipe.sendall(ANSWERS[name])
    calls.read()


@pytest.fixture
def worker(request):
    made = WorkerProcess(__name__, request.param, Containment(0, False), (), 60.0)
    yield made
    made.kill()


def heard(worker):
    while True:
        yield from worker.receive()


@pytest.mark.parametrize("worker", ["fine"], indirect=True)
def test_answers_come_in_the_order_of_the_calls(worker):
    answers = heard(worker)
    assert next(answers) == "hello"
    worker.send([1, 2])
    assert [next(answers), next(answers)] == ["a", "b"]


@pytest.mark.parametrize(
    ("worker", "reason", "answered"),
    [
        ("garbage", "no answer", False),
        ("deep", "no answer", False),
        ("number", "no answer", False),
        ("text", "to no call", False),
        ("truth", "to no call", False),
        ("twice", "answered a call twice", True),
        ("ahead", "to no call", False),
        ("unasked", "to no call", False),
        ("endless", "without an end", False),
    ],
    indirect=["worker"],
)
def test_anything_else_loses_the_worker(worker, reason, answered):
    answers = heard(worker)
    assert next(answers) == "hello"
    worker.send([1, 2])
    with pytest.raises(WorkerLost, match=reason) as lost:
        list(answers)
    assert lost.value.answered == answered


@pytest.mark.parametrize("worker", ["pieces"], indirect=True)
def test_half_an_answer_blocks_nobody(worker):
    answers = heard(worker)
    assert next(answers) == "hello"
    worker.send([1, 2])
    assert next(answers) == "a"
    assert not worker.has_answered()


if __name__ == "__main__":
    stand_in()
