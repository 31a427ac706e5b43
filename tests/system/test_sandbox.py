"""The sandbox, tried from inside; as root and as a user without privileges."""

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.system import sandbox

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(bool(sandbox.missing()), reason=f"no sandbox here: {sandbox.missing()}")

PRELUDE = """
import ctypes, json, os, socket, subprocess, sys, time
if {user}:
    os.setgroups([]); os.setresgid({user}, {user}, {user}); os.setresuid({user}, {user}, {user})
    ctypes.CDLL(None).prctl(4, 1)  # as after an exec: its own files in /proc are its own
from retrain.system import sandbox
outside = os.getpid()
os.chdir({directory!r})
sandbox.enter({readable!r})
def attempt(action):
    try:
        return action()
    except OSError as error:
        return type(error).__name__
"""


def inside(code, directory="/", readable=(), user=0):
    """What `code` prints as JSON inside a sandbox; `user` is another one than root, where the tests are root."""
    if user and os.geteuid():
        user = 0  # the tests run without privileges anyway
    # Imported before the privileges go, which may be needed to read the interpreter's files.
    script = "import retrain.system.sandbox, pwd, glob, socket, subprocess, encodings.idna\n" + PRELUDE.format(
        directory=str(directory), readable=[str(path) for path in readable], user=user
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script + code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


USERS = pytest.mark.parametrize("user", [0, 65534], ids=["as we are", "nobody"])


@USERS
def test_no_network_no_writing_no_processes_of_others_no_way_out(user):
    seen = inside(
        """
print(json.dumps([
    attempt(lambda: socket.create_connection(("127.0.0.1", 9), 5)),
    attempt(lambda: open("/etc/retrain-canary", "w").close()),
    attempt(lambda: open(f"/proc/{outside}/environ").read()),
    attempt(lambda: open(f"/proc/{os.getppid()}/environ").read()),
    sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    attempt(lambda: os.kill(outside, 9)),
    attempt(lambda: open("/proc/sys/kernel/core_pattern", "w")),
    attempt(lambda: sandbox.call("unshare", sandbox._CLONE_NEWUSER)),
    attempt(lambda: sandbox.call("mount", None, b"/", None, 32 | 4096, None)),
    attempt(lambda: open("/tmp/private", "w").write("x")),
    attempt(lambda: open("/dev/null", "w").write("x")),
]))
""",
        user=user,
    )
    refused = ["OSError", "OSError", "FileNotFoundError", "PermissionError", [1, 2], "ProcessLookupError"]
    assert seen[:6] == refused
    assert seen[6] in ("OSError", "PermissionError", "FileNotFoundError")
    assert seen[7:9] == ["OSError", "PermissionError"]
    assert seen[9:] == [1, 1]
    assert not Path("/tmp/private").exists()


def test_the_home_directory_is_empty_but_for_what_is_readable(tmp_path):
    home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "file").write_text("seen")
    (tmp_path / "hidden").write_text("secret")
    seen = inside(
        f"""
print(json.dumps([
    os.listdir({str(home)!r}), os.listdir({str(tmp_path)!r}), open({str(tmp_path / "shown/file")!r}).read(),
    attempt(lambda: open({str(tmp_path / "shown/file")!r}, "w")),
]))
""",
        readable=[tmp_path / "shown"],
    )
    assert seen == [[], ["shown"], "seen", "OSError"]


def test_the_working_directory_stays_and_its_parents_are_hidden(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "data").write_text("rows")
    (tmp_path / "link").symlink_to(work)
    code = "print(json.dumps([open('data').read(), os.listdir('..'), os.getcwd()]))"
    assert inside(code, directory=work) == ["rows", ["work"], str(work)]
    code = f"print(json.dumps(open({str(tmp_path / 'link' / 'data')!r}).read()))"
    assert inside(code, readable=[tmp_path / "link" / "data"]) == "rows"


@pytest.mark.slow
@USERS
def test_a_fork_bomb_is_bounded(user):
    code = """
made = 0
try:
    while made < 2000:
        if os.fork() == 0:
            time.sleep(600)
        made += 1
except OSError:
    pass
print(json.dumps(made)); sys.stdout.flush()
os._exit(0)
"""
    if os.geteuid() == 0 and not user and tuple(map(int, os.uname().release.split(".")[:2])) < (6, 14):
        pytest.skip("root is bounded since Linux 6.14")
    before = Path("/proc/sys/kernel/pid_max").read_text()
    assert 100 < inside(code, user=user) <= sandbox.PROCESSES
    assert Path("/proc/sys/kernel/pid_max").read_text() == before, "that of the machine is another one"


@pytest.mark.slow
def test_processes_that_have_ended_leave_room_for_others():
    code = """
def several():
    children = []
    for _ in range(100):
        if not (child := os.fork()):
            time.sleep(600)
        children.append(child)
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return len(children)
print(json.dumps([several() for _ in range(7)]))
"""
    assert inside(code) == [100] * 7


def test_the_exit_is_passed_on():
    for code, status in (("os._exit(7)", 7), ("os.kill(os.getpid(), 11)", 139)):
        script = f"import os; from retrain.system import sandbox; sandbox.enter([]); {code}"
        assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == status
