"""The tests do not depend on who started them or came before them, and property tests do not look at the clock."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from retrain.registry.component import REGISTERED
from tests.preload import client

# A shell without job control starts background jobs with Ctrl-C ignored, which every process of a test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A fork waits for ever for the threads that torch has had in the process that it was made of: one thread, but for the
# numeric tests, which fork no process that computes.
os.environ["OMP_NUM_THREADS"] = os.environ.get("RETRAIN_TEST_THREADS", "1")

# What `make` installs apart, for the tests and not for the processes that they start.
sys.path.append(str(Path(sys.prefix, "apart")))

if find_spec("hypothesis"):  # environments for one engine or executor have no property tests
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


def folder_of_server() -> str:
    """Make a folder for the server of forks: the path of a socket has at most 107 characters."""
    return tempfile.mkdtemp(prefix="retrain-tests-", dir=None if len(tempfile.gettempdir()) < 64 else "/tmp")


if mine := "RETRAIN_TEST_SERVER" not in os.environ:  # else this is a process of a session that has one
    os.environ["RETRAIN_TEST_SERVER"] = folder_of_server()
    client.install(Path(os.environ["RETRAIN_TEST_SERVER"]))


def pytest_unconfigure():
    """The server of forks, if one was asked for, ends without its folder."""
    if mine:
        shutil.rmtree(os.environ.pop("RETRAIN_TEST_SERVER"))


KEPT: dict[str, object] = {}
"""Imported modules that are no plug-in of a test, by name."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Share tests out between processes: a file goes to one of them, for its fixtures, and slow tests come first.

    All tests on ranks go to one process, which starts the ranks once. A slow test is shared out by itself, unless it
    has a group because it needs what its file makes once. Of a test marked `slow(but=2)` the first two cases are not
    slow.
    """
    quick = Counter()
    for item in items:
        if (slow := item.get_closest_marker("slow")) and quick[item.function] < slow.kwargs.get("but", 0):
            quick[item.function] += 1
            item.own_markers.remove(slow)
    if not config.getoption("loadgroup", False):  # one process, or an environment without pytest-xdist
        return
    for item in items:
        if {"pair", "trio"} & {*item.fixturenames}:
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif not (item.get_closest_marker("slow") or item.get_closest_marker("xdist_group")):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    """What is imported and collected by now stays: the garbage collector need not look through it, .5 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """One cache of warm starts, and one key that signs runs, for all processes of a session, apart from the user's."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(shared / "state"))
        patch.setenv("RETRAIN_CACHE", str(shared / "cache"))
        yield


@pytest.fixture(autouse=True)
def forgotten_plugins(tmp_path_factory):
    """No test finds the plug-ins of another one's folder: imported, registered, or where modules are looked for."""
    yield
    folders, gone = f"{tmp_path_factory.getbasetemp()}{os.sep}", set()
    for name, module in [one for one in sys.modules.items() if KEPT.get(one[0]) is not one[1]]:
        facts = getattr(module, "__dict__", {})  # asking a module that loads lazily for a name would load it
        if any(str(place).startswith(folders) for place in (facts.get("__file__"), *facts.get("__path__", ()))):
            gone.add(sys.modules.pop(name).__name__)
        else:
            KEPT[name] = module
    sys.path[:] = [place for place in sys.path if not place.startswith(folders)]  # where plug-ins were looked for
    for key in [key for key, one in REGISTERED.items() if one.target.__module__ in gone]:
        del REGISTERED[key]


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """The test's own folder, entered."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
