"""What code of the model tries that looks for the reference answer, or wants to leave something behind."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.environments.contract import Limits
from retrain.environments.world_pool import Launch, WorldPool
from retrain.environments.world_worker import Hello
from retrain.system.sandbox import missing
from retrain.system.worker_process import Containment

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a sandbox")
SECRET = "GOLDANSWER-7719"
WORLD = """
import os, threading
from retrain import environment
from retrain.system import model_code

os.environ["OF_THE_WORKER"] = "KEY-OF-THE-WORKER"

@environment("judged")
def judged(answer, prompt):
    kept = [answer]
    reply = yield None
    while True:
        try:
            text = model_code.run(str(reply), 4.0, 1 << 15)
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
        self.pool = WorldPool(Launch({"": hello}, Containment(512, True, (str(folder),), runs_code=True)))
        facts = {"id": "0", "prompt": "p", "answer": SECRET, "extra": {"solution": SECRET}}
        self.opened = self.pool.step({0: ("open", 0, facts, 0)})[0]
        assert self.opened.kind == "say", self.opened

    def __call__(self, code: str) -> str:
        answer = self.pool.step({0: ("reply", 0, code, "stop", 0, 9)})[0]
        assert answer.kind == "say", answer
        return answer.messages[0][1]


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    made = Tool(tmp_path_factory.mktemp("worlds"))
    yield made
    made.pool.close()


READS = {
    "memory": """
import os
for pid in filter(str.isdigit, os.listdir('/proc')):
    if int(pid) == os.getpid(): continue
    try:
        regions = [line.split()[0].split('-') for line in open(f'/proc/{pid}/maps') if ' rw' in line]
        with open(f'/proc/{pid}/mem', 'rb', 0) as memory:
            for low, high in regions:
                memory.seek(int(low, 16))
                found = memory.read(min(int(high, 16) - int(low, 16), 1 << 26)).find(b'GOLD' + b'ANSWER-7719')
                if found >= 0: print('FOUND', pid)
    except OSError: pass
print('looked')
""",
    "environments and command lines": """
import os
for pid in filter(str.isdigit, os.listdir('/proc')):
    for name in ('environ', 'cmdline'):
        try: text = open(f'/proc/{pid}/{name}', 'rb').read()
        except OSError: continue
        if b'KEY-OF' + b'-THE-WORKER' in text or b'GOLD' + b'ANSWER' in text: print('FOUND', pid, name)
print('looked')
""",
    "ptrace": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in range(1, 700):
    if pid != os.getpid() and libc.ptrace(16, pid, 0, 0) == 0: print('FOUND', pid)
print('looked')
""",
    "process_vm_readv": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
class Vec(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
here = ctypes.create_string_buffer(8)
for pid in range(1, 700):
    if pid != os.getpid():
        ours, theirs = Vec(ctypes.addressof(here), 8), Vec(0x400000, 8)
        libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if ctypes.get_errno() not in (1, 3): print('FOUND', pid, ctypes.get_errno())
print('looked')
""",
    "inherited files": """
import os, stat
for fd in range(3, 300):
    try: mode = os.fstat(fd).st_mode
    except OSError: continue
    print('FOUND', fd, stat.filemode(mode))
print('looked')
""",
    "other processes": """
import os
seen = [int(pid) for pid in os.listdir('/proc') if pid.isdigit()]
if len(seen) > 2: print('FOUND', seen)
for pid in range(1, 700):
    try: os.kill(pid, 0)
    except ProcessLookupError: continue
    except PermissionError: print('FOUND', pid)
print('looked')
""",
}


@pytest.mark.parametrize("way", READS)
def test_the_reference_answer_is_out_of_reach(tool, way):
    assert tool(READS[way]) == "looked\n"


WALK = """
import os
def walk():
    for top in ('/', '/tmp', '/var', '/dev', '/run', os.path.expanduser('~')):
        for folder, folders, files in os.walk(top):
            if top == '/' or folder.count('/') > top.count('/') + 3: folders.clear()
            yield folder, files
"""
LEAVES = {
    "files everywhere": (
        WALK
        + """
written = 0
for folder, _ in walk():
    try: written += open(os.path.join(folder, 'left-behind'), 'w').write('x')
    except OSError: pass
print('done' if written > 4 else written)
""",
        WALK + "print([folder for folder, files in walk() if 'left-behind' in files] or 'nothing')",
    ),
    "shared memory": (
        """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print('done' if libc.shmget(7, 1 << 27, 0o1600) < 0 else 'SHARED')
from multiprocessing import shared_memory
try: shared_memory.SharedMemory('left', True, 1000)
except OSError: pass
""",
        "import os; print([name for name in os.listdir('/dev/shm')] or 'nothing')",
    ),
    "queues": (
        """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print('done' if libc.mq_open(b'/left', 0o102, 0o600, None) < 0 and libc.msgget(7, 0o1600) < 0 else 'QUEUE')
""",
        """
import ctypes
print('nothing' if ctypes.CDLL(None).mq_open(b'/left', 0) < 0 else 'QUEUE')
""",
    ),
    "daemons": (
        """
import os, time
for _ in range(10):
    if not os.fork():
        os.setsid()
        if not os.fork():
            while True: time.sleep(0.01)
        os._exit(0)
print('done')
""",
        "import os; print(len([pid for pid in os.listdir('/proc') if pid.isdigit()]) > 3 or 'nothing')",
    ),
}


@pytest.mark.parametrize("way", LEAVES)
def test_nothing_is_left_for_a_later_call(tool, way):
    first, then = LEAVES[way]
    assert tool(first).splitlines()[0] == "done"
    assert tool(then) == "nothing\n"


def test_daemons_of_a_call_have_ended_when_it_returns(tool):
    before = _processes()
    tool(LEAVES["daemons"][0])
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


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(1 << 31)",
        "import os\nfor n in range(100): open(f'/tmp/{n}', 'wb').write(bytes(1 << 24))",
        "import os\nfor n in range(100): open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 24))",
        "import os\nfor n in range(300): os.memfd_create(str(n))",
        "import os\nwhile True: os.fork()",
    ],
    ids=["heap", "files", "shared files", "memfd", "forks"],
)
def test_memory_and_processes_are_limited(tool, code):
    assert "Error" in tool(code)
    assert tool("print(1)") == "1\n"


def test_a_privilege_cannot_be_had(tool):
    code = "import ctypes; print(ctypes.CDLL(None).unshare({flag}))"
    assert {tool(code.format(flag=flag)) for flag in (0x10000000, 0x00020000, 0x20000000)} == {"-1\n"}
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
    assert set(names) <= {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"}
    assert os.environ.keys() - set(names)
    assert tool("import sys; print(sys.executable)").strip() == sys.executable


def test_code_that_is_too_long_is_refused(tool):
    assert tool("#" * 100_001) == "ValueError: the code is longer than 100,000 bytes"
    assert tool("#" * 99_000 + "\nprint(2)") == "2\n"
