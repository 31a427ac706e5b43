"""What code of the model tries that looks for the reference answer, or wants to leave something behind."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from retrain.environments.contract import Limits
from retrain.environments.env_pool import EnvPool, Launch
from retrain.environments.env_process import Hello
from retrain.system import bubblewrap, event_loop

pytestmark = pytest.mark.skipif(bool(bubblewrap.missing()), reason=str(bubblewrap.missing()))
SECRET = "GOLDANSWER-7719"
WORLD = """
import os, threading
from retrain import environment
from retrain.system import bubblewrap

os.environ["OF_THE_WORKER"] = "KEY-OF-THE-WORKER"

@environment("judged")
def judged(answer, prompt):
    kept = [answer]
    reply = yield None
    while True:
        try:
            text = bubblewrap.run(str(reply), 4.0, 1 << 15)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        reply = yield text

@environment("blind")
def blind(prompt):
    import sys
    frame, seen = sys._getframe(), []
    while frame is not None:
        seen.append(repr(frame.f_locals))
        frame = frame.f_back
    yield "\\n".join(seen)
"""


class Tool:
    """An environment in a worker, with a live episode: `tool(code)` is what the code prints."""

    def __init__(self, folder: Path, name: str = "judged") -> None:
        (folder / "worlds_of_this_test.py").write_text(WORLD)
        hello = Hello(name, f"worlds_of_this_test.{name}", {}, (str(folder),), 60.0, Limits(9, 9, 9, 9))
        self.pool = EnvPool(Launch({"": hello}, 512)).start()
        self.env = self.pool.env("", 0)
        facts = {"id": "0", "prompt": "p", "answer": SECRET, "extra": {"solution": SECRET}}
        self.opened = event_loop.run(self.env.reset(facts, 0))
        assert self.opened.kind == "observation", self.opened

    def __call__(self, code: str) -> str:
        answer = event_loop.run(self.env.step(code, "stop", 0, 9))
        assert answer.kind == "observation", answer
        return answer.messages[0][1]


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    made = Tool(tmp_path_factory.mktemp("worlds"))
    yield made
    made.pool.close()


ESCAPES = tomli.loads(Path(__file__).with_name("escapes.toml").read_text())


@pytest.mark.parametrize("code", ESCAPES["reads"].values(), ids=ESCAPES["reads"])
def test_the_reference_answer_is_out_of_reach(tool, code):
    printed = tool(code)
    assert printed.splitlines()[-1] == "looked"
    assert "FOUND" not in printed


def test_files_of_the_project_are_out_of_reach(tool):
    """The data file of a run has all answers, and the working directory has the data file."""
    code = """
import os
for place in {places}:
    print(os.path.exists(place), end=' ')
"""
    root = Path(__file__).parents[2]
    places = [__file__, str(root / "pyproject.toml"), str(root / "runs"), "/etc/shadow", "/var/lib", "/home"]
    assert tool(code.format(places=places)).split() == ["False"] * len(places)
    assert tool("import numpy; print(numpy.arange(3).sum())") == "3\n"
    found = tool("import os; print(*sorted(os.listdir('/')))").split()
    assert set(found) <= SYSTEM | parents()


SYSTEM = set(re.findall(r"\w+", "bin dev etc lib lib32 lib64 libx32 nix proc run sbin sys tmp usr var"))


def parents() -> set[str]:
    """The top directories in which the interpreter and its packages are."""
    places = [sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith("-packages"))]
    return {Path(place).parts[1] for one in places for place in (one, os.path.realpath(one))}


@pytest.mark.parametrize("way", ESCAPES["leaves"].values(), ids=ESCAPES["leaves"])
def test_nothing_is_left_for_a_later_call(tool, way):
    assert tool(way["first"]).splitlines()[0] == "done"
    assert tool(way["then"]) == "nothing\n"


def test_daemons_of_a_call_have_ended_when_it_returns(tool):
    before = _processes()
    tool(ESCAPES["leaves"]["daemons"]["first"])
    assert _processes() - before == set()


def _processes() -> set[str]:
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if " -I -c " in line}


def test_sockets_are_out_of_reach(tool, tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "service"))
        server.listen()
        families = {"unix": 1, "internet": 2, "internet 6": 10, "netlink": 16, "virtual machines": 40}
        for family in families.values():
            assert "PermissionError" in tool(f"import socket; socket.socket({family}, socket.SOCK_STREAM)")
    assert tool("import socket; a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))") == "b'x'\n"
    for kind in ("SOCK_DGRAM", "SOCK_RAW", "SOCK_SEQPACKET"):  # one of these could send to a socket in a file
        assert "PermissionError" in tool(f"import socket; socket.socketpair(type=socket.{kind})")


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(1 << 31)",
        "import os\nfor n in range(100): open(f'/tmp/{n}', 'wb').write(bytes(1 << 24))",
        "import os\nfor n in range(100): open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 24))",
        "import os\nfor n in range(300): os.memfd_create(str(n))",
        "import mmap\nmmap.mmap(-1, 1 << 20)",  # would not count as memory of the process
        "import mmap\nwith open('/dev/zero', 'r+b') as file: mmap.mmap(file.fileno(), 1 << 20)",
        "import os\nwhile True: os.fork()",
    ],
    ids=["heap", "files", "shared files", "memfd", "shared mapping", "shared zeros", "forks"],
)
def test_memory_and_processes_are_limited(tool, code):
    assert "Error" in tool(code)
    assert tool("print(1)") == "1\n"


def test_the_kernel_ends_the_code_before_the_trainer_without_memory(tool):
    """Each of 64 processes may have as much memory as the worker."""
    assert tool("print(open('/proc/self/oom_score_adj').read())").strip() == "1000"
    assert "Error" in tool("open('/proc/self/oom_score_adj', 'w').write('0')")


def test_a_privilege_cannot_be_had(tool):
    code = "import ctypes; print(ctypes.CDLL(None).unshare({flag}))"
    assert {tool(code.format(flag=flag)) for flag in (0x10000000, 0x00020000, 0x20000000)} == {"-1\n"}
    clone = "import ctypes, os; print(ctypes.CDLL(None).syscall({number}, {flag} | 17, 0, 0, 0, 0))"
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000):
        assert tool(clone.format(number=number, flag=flag)) == "-1\n"
    for file in ("core_pattern", "hostname", "modprobe", "randomize_va_space"):
        assert "Error" in tool(f"import os; os.open('/proc/sys/kernel/{file}', os.O_WRONLY)")
    assert "CapEff:\t0000000000000000" in tool("print(open('/proc/self/status').read())")
    assert "Error" in tool("open('/proc/sys/kernel/pid_max', 'w').write('1000')")


def test_only_what_an_environment_reads_is_sent_to_its_worker(tmp_path):
    blind = Tool(tmp_path, "blind")
    try:
        [(_, text)] = blind.opened.messages
        assert SECRET not in text
        assert "'prompt': 'p'" in text
    finally:
        blind.pool.close()


def test_the_code_sees_few_variables(tool, monkeypatch):
    names = json.loads(tool("import json, os; print(json.dumps(sorted(os.environ)))"))
    known = {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PWD"}
    assert set(names) <= known
    assert os.environ.keys() - set(names)
    assert tool("import sys; print(sys.executable)").strip() == sys.executable


def test_code_that_is_too_long_is_refused(tool):
    assert tool("#" * 100_001) == "ValueError: the code is longer than 100,000 bytes"
    assert tool("#" * 99_000 + "\nprint(2)") == "2\n"


def test_a_path_below_a_link_is_reached_through_it(tmp_path):
    packages = tmp_path / "real" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    seen = [str(tmp_path / "link" / "lib" / "site-packages"), str(tmp_path / "link")]
    assert bubblewrap.layout(seen) == ([str(tmp_path / "real")], {str(tmp_path / "link"): str(tmp_path / "real")})


@pytest.mark.parametrize("packages", [".venv", "."])
def test_a_project_below_what_the_code_sees_is_out_of_reach(tmp_path, packages):
    """A project in /usr/src, whose interpreter is below it, or a virtual environment that is the project itself."""
    source = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from retrain.system import bubblewrap
if {packages == ".venv"}: bubblewrap._SYSTEM += ({str(tmp_path)!r},)
print(bubblewrap.run("import os; print(*sorted(os.listdir({str(tmp_path / "project")!r})))", 30, 400))
"""
    project = tmp_path / "project"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", project / packages], check=True)
    (project / "answers.jsonl").write_text(SECRET)
    python = [project / packages / "bin" / "python", "-c", source]
    done = subprocess.run(python, capture_output=True, text=True, cwd=project, check=False)
    seen = {".venv": {".venv"}, ".": {"bin", "include", "lib", "lib64", "pyvenv.cfg"}}[packages]
    assert {*done.stdout.split()} == seen, done.stderr


def test_an_environment_behind_a_link_runs_the_code(tmp_path):
    (tmp_path / ".venv").symlink_to(sys.prefix)
    python = tmp_path / ".venv" / Path(sys.executable).relative_to(sys.prefix)
    source = "from retrain.system import bubblewrap; print(bubblewrap.run('print(6 * 7)', 30, 9))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([python, "-P", "-c", source], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout == "42\n\n", done.stderr


def test_a_machine_without_bubblewrap_is_named_with_the_fix(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bwrap: not today >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "bwrap: not today" in bubblewrap.missing()[0]
    assert bubblewrap.missing()[1] == "allow unprivileged user namespaces"
    with pytest.raises(OSError, match="not today"):
        bubblewrap.run("print(1)", 5.0, 99)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "apt-get install bubblewrap" in bubblewrap.missing()[1]


def test_code_that_takes_too_long_ends_with_all_that_it_started():
    before = _processes()
    with pytest.raises(TimeoutError, match=r"more than 0\.5 s"):
        bubblewrap.run(ESCAPES["leaves"]["daemons"]["first"] + "\nwhile True: pass", 0.5, 99)
    assert _processes() - before == set()
