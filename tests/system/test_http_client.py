"""Calls that are late, too long, or aborted, and the errors that they raise."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager, suppress
from itertools import takewhile

import pytest

from retrain.system.http_client import Calls, HttpError, address, is_loopback
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


@contextmanager
def answering(answer):
    """A server that gives one answer to every request, and the requests that it got."""
    requests = []

    def serve():
        with suppress(OSError):  # it is closed at the end
            while True:
                connection, _ = listening.accept()
                with connection, connection.makefile("rb") as stream:
                    lines = list(takewhile(lambda line: line.strip(), stream))
                    size = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
                    requests.append((b"".join(lines).decode(), stream.read(size).decode()))
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield address(*listening.getsockname()), requests


def reply(body, status="200 OK", *headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", body]).encode()


def test_a_server_that_says_nothing_is_late(silent):
    with pytest.raises(TimeoutError, match=r"no answer within 0\.5 seconds"):
        Calls(0.5)(url(silent))


def test_calls_are_broken_off_under_whoever_waits_and_there_are_none_afterwards(silent):
    calls, ends = Calls(PATIENCE_S), []

    def ask():
        with pytest.raises(ConnectionAbortedError, match="aborted") as raised:
            calls(url(silent))
        ends.append(raised.value)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(calls._pending) == 3)
    calls.abort()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(ends) == 3
    with pytest.raises(ConnectionAbortedError, match="aborted"):
        calls(url(silent))


def test_coroutines_wait_for_their_answers_together():
    async def ask(place):
        calls = Calls(PATIENCE_S)
        return await asyncio.gather(*(calls.request(place, {"n": n}) for n in range(3)))

    with answering(reply('{"a": [1.5]}')) as (place, requests):
        assert asyncio.run(ask(place)) == [{"a": [1.5]}] * 3
    assert sorted(json.loads(body)["n"] for _, body in requests) == [0, 1, 2]


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (reply("x" * 2000), ValueError, "longer than 1000 bytes"),
        (reply("{"), ValueError, "Expecting property name"),
        (reply("gone", "410 Gone"), HttpError, "HTTP 410: gone"),
        (reply("", "302 Found", "Location: http://127.0.0.1:9/"), HttpError, "HTTP 302"),
        (b"SMTP ready\r\n\r\n", ConnectionError, "illegal status line"),
    ],
)
def test_an_answer_of_another_shape_is_an_error_of_its_kind(answer, kind, why):
    with answering(answer) as (place, _), pytest.raises(kind, match=why):
        Calls(PATIENCE_S, max_bytes=1000)(place)


def test_a_call_sends_no_cookie_that_an_earlier_answer_set_and_asks_no_proxy(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with answering(reply("1", "200 OK", "Set-Cookie: a=b")) as (place, requests):
        calls = Calls(PATIENCE_S)
        assert [calls(place), calls(place)] == [1, 1]
    assert len(requests) == 2
    assert "cookie" not in str(requests).lower()


def test_no_error_shows_the_key(monkeypatch):
    """Not that of a server which repeats it at the place where the error is cut, nor of a header that cannot be."""
    monkeypatch.setenv("OUR_API_KEY", "our-very-secret-key")
    with answering(reply("x" * 490 + "our-very-secret-key", "401 No")) as (place, _):
        with pytest.raises(HttpError, match=r"x\(hidden\)?$") as refused:
            Calls(PATIENCE_S, key="our-very-secret-key")(place, {})
        assert "our-very" not in str(refused.value)
        for bad in ("our-very-secret-key\n", "our-very-secret-key é"):
            with pytest.raises(ValueError, match="cannot be sent") as unsent:
                Calls(PATIENCE_S, key=bad)(place, {})
            assert "very-secret" not in str(unsent.value)
    with pytest.raises(ConnectionRefusedError, match="Connection refused") as away:
        Calls(PATIENCE_S)("http://user:our-very-secret-key@127.0.0.1:9/?token=our-very-secret-key", {})
    assert "very-secret" not in str(away.value)


def test_an_address_says_whether_only_this_machine_reaches_it():
    assert [address(host, 8000) for host in ("::1", "localhost")] == ["http://[::1]:8000", "http://localhost:8000"]
    for host in ("::1", "localhost", "127.0.0.9"):
        assert is_loopback(address(host, 1))
    for text in ("http://10.0.0.5:1", "http://[::1:8711", "http://sampler", "http://[x]:1", "", "nonsense"):
        assert not is_loopback(text)
