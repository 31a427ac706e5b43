"""Rewards that go wrong in every way the pool has to survive. Imported by its workers."""

import asyncio
import ctypes
import importlib
import mmap
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal

import retrain


def by_text(completion, answer):
    """Does what the completion names; otherwise scores whether it equals the answer."""
    action = ACTIONS.get(completion)
    return action() if action else float(completion == answer)


def second(completion, answer):
    return 2.0


def always_raises(completion, answer):
    raise ValueError(f"cannot score {completion}")


def no_opinion(completion, answer):
    return None


def wants_more(completion, answer, teacher):
    return 0.0


def positional_only(completion, answer, /):
    return 0.0


def with_default(completion, answer, scale=3.0):
    return scale


def everything(completion, answer, prompt, problem, length, max_tokens, finish_reason):
    assert problem == {"id": "p", "prompt": "q?", "answer": answer, "extra": {"level": 3}}
    assert (prompt, finish_reason) == ("q?", "stop")
    return length / max_tokens


@retrain.reward("half_hearted", correctness=False)
def half_hearted(completion, *, value: float = 0.25):
    return value


class Counting:
    """Keeps state in its worker."""

    def __init__(self, *, start: int = 0):
        self.calls = start

    def __call__(self, completion):
        self.calls += 1
        return self.calls


def environment(completion, answer):
    return float(os.environ.get(completion) == answer)


def by_name(completion, answer, *, secret_env: str):
    return float(os.environ[secret_env] == answer)


LOOPS = []


async def in_a_loop(completion):
    LOOPS.append(asyncio.get_running_loop())
    return 1.0


def torch_loaded(completion, answer):
    return float("torch" in sys.modules)


def _freeze():
    os.kill(os.getpid(), signal.SIGSTOP)
    _hang()  # where a signal from itself does not stop it


def _hang():
    while True:
        pass


def _print_and_die():
    print("a last line")
    os._exit(1)


def _tensor():
    return importlib.import_module("torch").tensor([0.25])


def _print_much():
    for _ in range(100):
        print("x" * 1_000_000)
    return 1.0


def _daemon():
    """A program in a session of its own, whose parent has ended: it is in no group of the worker's."""
    file = os.environ["PID_FILE"]
    command = f"sleep 6000 & echo $! > {file}.new; mv {file}.new {file}"
    subprocess.run(["sh", "-c", command], start_new_session=True, check=True)
    return 1.0


def _grandchild():
    child = subprocess.Popen(["sleep", "6000"])
    staged = os.environ["PID_FILE"] + ".new"
    with open(staged, "w") as file:
        file.write(str(child.pid))
    os.rename(staged, os.environ["PID_FILE"])
    time.sleep(6000)


ACTIONS = {
    "hang": _hang,
    "freeze": _freeze,
    "power": lambda: 9**9**9**9,
    "segfault": lambda: ctypes.string_at(0),
    "allocate": lambda: float(len(bytearray(4 << 30))),
    "share": lambda: float(len(mmap.mmap(-1, 16 << 30))),
    "exit": lambda: os._exit(3),
    "sysexit": lambda: sys.exit("bye"),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": lambda: 1 / 0,
    "recursion": lambda: ACTIONS["recursion"](),
    "print": _print_much,
    "print a line": lambda: print("a line") or 1.0,
    "die after a line": _print_and_die,
    "np bool": lambda: importlib.import_module("numpy").bool_(True),
    "np array": lambda: importlib.import_module("numpy").array(0.5),
    "np pair": lambda: importlib.import_module("numpy").array([0.5, 0.5]),
    "tensor": _tensor,
    "decimal": lambda: Decimal("0.75"),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT) or 1.0,
    "grandchild": _grandchild,
    "daemon": _daemon,
    "list": lambda: [1.0, 2.0],
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "beyond float32": lambda: 3.5e38,
    "string": lambda: "1.0",
    "huge": lambda: 10**400,
    "bool": lambda: True,
    "none": lambda: None,
    "pid": os.getpid,
}
