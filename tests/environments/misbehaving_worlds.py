"""Environments that go wrong in every way the pool has to survive. Imported by its workers."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from retrain import Observation, environment
from retrain.environments import tools

HELD = []


def faulty(answer, rng, *, at="middle"):
    """Counts the replies and adds noise from its seed; does what the answer names, at reset, in the middle or last."""
    if at == "reset":
        act(answer)
    reply = yield f"0 {rng.randrange(1000)}"
    for turn in range(4):
        if (turn, at) in ((2, "middle"), (3, "end")):
            act(answer)
        noise = time.time_ns() if answer == "clock" else rng.randrange(1000)
        reply = yield Observation(f"{turn} {noise} {reply}", reward=0.25, metrics={"steps": 1})
    return {"found": 1.0, "neat": 0.5}


def act(what):
    if what in FAULTS:
        FAULTS[what]()


def fail(error):
    raise error


def write_garbage():
    for number in range(3, 4096):  # the pipe has the number that it has in the parent
        with suppress(OSError):
            os.write(number, b"{garbage}\n")


FAULTS = {
    "hang": lambda: time.sleep(60),
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": lambda: fail(ValueError("no such move")),
    "leave": lambda: fail(SystemExit(0)),
    "memory": lambda: HELD.append(bytearray(4 << 30)),
    "garbage": write_garbage,
    "fork": os.fork,
    "program": lambda: subprocess.run([sys.executable, __file__], close_fds=False, check=True),
}


@environment("alone_in_its_world", replay=False)
def outside(answer, rng):
    yield from faulty(answer, rng)


class Built:
    """Keeps its table, not its episodes, in `self`."""

    def __init__(self, *, greeting: str = "hello"):
        self.greeting = greeting

    def __call__(self, prompt, extra, limits, seed, problem):
        reply = yield self.greeting
        yield [{"role": "user", "content": f"{prompt} {extra} {problem['id']}"}, {"role": "tool", "content": reply}]
        yield f"{limits.max_turns} {seed} {reply.turn} {reply.tokens_left} {reply.finish_reason}"
        return None


FOUR = threading.Barrier(4, timeout=300)


def meeting(answer):
    FOUR.wait()
    yield None
    FOUR.wait()
    yield "again"
    FOUR.wait()
    return 1.0


def patient_python(code: str) -> str:
    """The tool `python` on however slow a machine."""
    tools._PYTHON_S = 600.0
    return tools.python(code)


def odd(answer):
    reply = yield None
    match answer:
        case "number":
            yield 3
        case "message":
            yield [{"text": "hi"}]
        case "text reward":
            return "1"
        case "nan":
            return float("nan")
        case "empty":
            return {}
        case "long":
            yield "x" * 1_000_000
    return reply


def early(answer):
    if answer == "reward":
        yield Observation("hi", reward=1.0)
    return 1.0
    yield


def wants_more(answer, teacher):
    yield None


def keyed(answer, *, depth: int):
    yield str(depth)


if __name__ == "__main__":  # a program that an environment starts
    write_garbage()
