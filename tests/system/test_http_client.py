"""Calls that are late, or broken off."""

import socket
import threading
from contextlib import ExitStack

import pytest

from retrain.system.http_client import Calls, address, is_loopback
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def silent():
    """A socket that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


def url(listening):
    return address(*listening.getsockname())


def test_the_deadline_counts_from_before_there_is_a_connection(silent):
    """A full backlog leaves whoever connects without an answer, as a machine that is gone does."""
    silent.listen(0)
    with ExitStack() as waiting:
        for _ in range(4):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        with pytest.raises(TimeoutError, match=r"no connection within 0\.5 seconds"):
            Calls(0.5)(url(silent))


def test_a_server_that_says_nothing_is_late(silent):
    with pytest.raises(TimeoutError, match=r"no answer within 0\.5 seconds"):
        Calls(0.5)(url(silent))


def test_calls_are_broken_off_under_whoever_waits_and_there_are_none_afterwards(silent):
    calls, ends = Calls(PATIENCE_S), []

    def ask():
        with pytest.raises(ConnectionError, match=r"broken off|closed|reset") as raised:
            calls(url(silent))
        ends.append(raised.value)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(calls._under_way) == 3)
    calls.break_off()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(ends) == 3
    with pytest.raises(ConnectionAbortedError, match="broken off"):
        calls(url(silent))


def test_an_address_says_whether_only_this_machine_reaches_it():
    assert [address(host, 8000) for host in ("::1", "localhost")] == ["http://[::1]:8000", "http://localhost:8000"]
    for host in ("::1", "localhost", "127.0.0.9"):
        assert is_loopback(address(host, 1))
    for text in ("http://10.0.0.5:1", "http://[::1:8711", "http://sampler", "http://[x]:1", "", "nonsense"):
        assert not is_loopback(text)
