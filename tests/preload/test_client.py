"""A fork of the server of tests is like the real program: what is asserted of one is asserted of the other."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import PYTHON, RETRAIN
from tests.preload import client
from tests.waiting import PATIENCE_S, alive, ends, fork_of, until

REAL = str(Path(sys.executable).with_name("retrain"))
EACH = pytest.mark.parametrize("python", [PYTHON, sys.executable], ids=["fork", "real"])


def run(*command: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **options)


@EACH
@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(300)", 44),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_it_ends_as_the_program_does(python, source, code):
    assert run(python, "-c", source).returncode == code


STATE = """
import atexit, importlib.util, json, os, signal, sys, threading
atexit.register(print, "at the end")
threading.Thread(target=lambda: print("in a thread", file=sys.stderr)).start()
print(json.dumps([
    sys.argv, sys.path[0] and os.path.realpath(sys.path[0]), os.getcwd(), os.umask(0), sys.stdin.read(), __name__,
    sys.stdout.isatty(), os.environ.get("OF_A_TEST"), signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
    signal.getsignal(signal.SIGINT) is signal.default_int_handler, os.nice(0), sorted(os.sched_getaffinity(0)),
    sys.dont_write_bytecode, importlib.util.find_spec("tests") is None,
    [(stream.encoding, stream.errors, stream.line_buffering) for stream in (sys.stdin, sys.stdout, sys.stderr)],
]))
"""


@pytest.mark.parametrize("form", [["-c", STATE, "x", "--y"], ["-m", "state", "x"], ["state.py", "-c"]], ids=str)
def test_its_surroundings_are_those_of_the_program(form, tmp_path):
    (tmp_path / "state.py").write_text(STATE)
    environment = os.environ | {"OF_A_TEST": "ä", "PYTHONDONTWRITEBYTECODE": "1"}

    def prepared():
        os.umask(0o027)
        os.nice(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    fork, real = (
        run(python, *form, cwd=tmp_path, env=environment, input="typed\r\n", preexec_fn=prepared)
        for python in (PYTHON, sys.executable)
    )
    assert real.returncode == 0, real.stderr
    assert (fork.returncode, fork.stdout, fork.stderr) == (0, real.stdout, real.stderr)
    assert json.loads(real.stdout.splitlines()[0])[4] == "typed\r\n"


WAITS = r"""
import os, signal, sys, time
def say(number, _):
    os.write(1, f"{signal.Signals(number).name}\n".encode())  # print may be interrupted here
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, say)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.1)  # a signal in front of a long wait would be handled after it
"""


@EACH
@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 75), ("SIGHUP", 75), ("SIGUSR1", 75), ("SIGINT", -2)])
def test_signals_reach_it(python, number, code):
    with subprocess.Popen(
        [python, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.Signals[number])
        assert ends(process) == code
        assert process.stdout.read() == (f"{number}\n" if code > 0 else "")


@EACH
def test_nothing_of_a_killed_one_is_left(python):
    with subprocess.Popen([python, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert fork_of(process.pid) == pid
        process.kill()
        assert ends(process) == -signal.SIGKILL
        until(lambda: not alive(pid))
        until(lambda: fork_of(process.pid) == process.pid)  # another process will have this PID


def test_a_killed_fork_ends_its_client_in_the_same_way():
    with subprocess.Popen([PYTHON, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        os.kill(int(process.stdout.readline()), signal.SIGKILL)
        assert ends(process) == -signal.SIGKILL


@EACH
def test_it_leads_a_process_group_that_can_be_killed(python):
    source = f"import subprocess; subprocess.Popen(['sleep', '6000']); print(1)\n{WAITS}"
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([python, "-c", source], **options) as process:
        process.stdout.readline()
        pid = int(process.stdout.readline())
        os.killpg(os.getpgid(fork_of(process.pid)), signal.SIGKILL)
        assert ends(process) == -signal.SIGKILL
        until(lambda: not alive(pid))


def test_the_command_is_the_installed_one(tmp_path):
    (tmp_path / "run.toml").write_text("[training]\nmax_stpes = 3\n")
    for arguments in (["--version"], ["validate", "run.toml"], ["nowhere"], ["validate"]):
        fork, real = (run(program, *arguments, cwd=tmp_path) for program in (RETRAIN, REAL))
        assert (fork.returncode, fork.stdout, fork.stderr) == (real.returncode, real.stdout, real.stderr)


@pytest.mark.parametrize(
    ("arguments", "variables", "forkable"),
    [
        (["retrain", "train", "run.toml"], {}, True),
        (["python", "-c", "pass"], {"RETRAIN_CACHE": "cache", "PYTHONPATH": "/somewhere"}, True),
        (["python", __file__], {}, True),
        (["python", "nowhere.py"], {}, False),
        (["python", "-I", "-c", "pass"], {}, False),
        (["retrain", "--version"], {"ATEN_CPU_CAPABILITY": "default"}, False),
        (["retrain", "--version"], {"PYTHONHASHSEED": "1"}, False),
    ],
)
def test_what_a_fork_cannot_be_is_started_in_full(arguments, variables, forkable):
    assert client.forkable(arguments, {**os.environ, **variables}, dict(os.environ)) is forkable


def test_another_copy_of_the_package_is_started_in_full(tmp_path):
    (tmp_path / "retrain").mkdir()
    (tmp_path / "retrain" / "__init__.py").touch()
    (tmp_path / "retrain" / "__main__.py").write_text("print('the copy')")
    (tmp_path / "beside.py").write_text("import retrain.__main__")
    for program, options in (
        (["-m", "retrain"], {"cwd": tmp_path}),
        (["-m", "retrain"], {"cwd": "/", "env": os.environ | {"PYTHONPATH": str(tmp_path)}}),
        ([tmp_path / "beside.py"], {"cwd": "/"}),
    ):
        done = run(PYTHON, *program, **options)
        assert done.stdout == "the copy\n", done.stderr


def test_no_two_forks_draw_the_same_numbers():
    source = "import random, numpy; print(random.random()); print(numpy.random.rand())"
    one, other = (run(PYTHON, "-c", source).stdout.split() for _ in range(2))
    assert len({*one, *other}) == 4
