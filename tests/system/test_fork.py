"""Programs that start as forks are processes like any other."""

import json
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from retrain.system import fork
from retrain.system.process import end
from tests.waiting import alive, until

PROGRAM = """
import json, os, signal, sys, time

print(json.dumps({
    "arguments": sys.argv[1:], "name": __name__, "folder": os.getcwd(), "variable": os.environ.get("VARIABLE"),
    "leads": os.getsid(0) == os.getpid() == os.getpgid(0), "input": sys.stdin.read(), "known": "decimal" in sys.modules,
    "interrupted": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "others": sys.modules.get("planted"),
}), flush=True)
print("and this", file=sys.stderr, flush=True)
sys.modules["planted"] = 1
match sys.argv[1:]:
    case ["raise"]:
        raise RuntimeError("no")
    case ["sleep"]:
        time.sleep(6000)
    case ["child"]:
        if (child := os.fork()) == 0:
            time.sleep(6000)
        print(child, flush=True)
    case [code]:
        sys.exit(int(code))
"""
MAKER = """
import sys, time
from pathlib import Path
from retrain.system import fork

started = fork.Fork("program", ["sleep"], Path("log.txt"), {}, 75)
Path("pid").write_text(str(started.pid))
time.sleep(6000)
"""


@pytest.fixture(scope="module", autouse=True)
def server():
    """A server for these tests: others share one that has imported more than they name."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"):
            patch.setattr(forkserver._forkserver, name, None)
        patch.setattr(forkserver._forkserver, "_preload_modules", [])
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def start(*arguments: str, **environment: str) -> fork.Fork:
    return fork.Fork("program", arguments, Path("log.txt"), environment, 75)


def printed() -> list[str]:
    return Path("log.txt").read_text().splitlines()


def test_a_fork_is_given_what_a_process_is_given(folder):
    fork.prepare(["decimal"])
    for code in ("0", "3"):
        assert start(code, VARIABLE="here").wait() == int(code)
    facts, error, again, _ = printed()
    assert error == "and this"
    assert json.loads(again)["others"] is None, "a fork sees nothing of another"
    assert json.loads(facts) == {
        "arguments": ["0"],
        "name": "__main__",
        "folder": str(folder),
        "variable": "here",
        "leads": True,
        "input": "",
        "known": True,
        "interrupted": True,
        "others": None,
    }
    assert "VARIABLE" not in os.environ


def test_the_exit_code_says_how_it_ended(folder):
    assert start("raise").wait() == 1
    assert "RuntimeError: no" in printed()
    running = start("sleep")
    assert running.poll() is None
    with pytest.raises(subprocess.TimeoutExpired, match="timed out"):
        running.wait(0.01)
    running.terminate()
    assert running.wait() == -signal.SIGTERM
    assert running.poll() == -signal.SIGTERM


def test_its_whole_group_can_be_ended_as_soon_as_it_is_made(folder):
    running = start("child")
    until(lambda: Path("log.txt").exists() and len(printed()) == 3)
    child = int(printed()[-1])
    assert alive(child)
    end(running)
    until(lambda: not alive(child))
    at_once = start("sleep")
    end(at_once)
    assert at_once.poll() == -signal.SIGKILL


def test_it_ends_with_the_process_that_made_it(folder):
    (folder / "maker.py").write_text(MAKER)
    maker = subprocess.Popen([sys.executable, "maker.py"], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    until(lambda: (folder / "pid").exists() and (folder / "pid").read_text(), maker)
    started = int((folder / "pid").read_text())
    assert alive(started)
    maker.kill()
    maker.wait()
    until(lambda: not alive(started))
