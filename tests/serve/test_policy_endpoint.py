"""A policy that programs talk to by HTTP, as an OpenAI client would; their conversations are trained on."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.datastructures import Headers

from retrain.config.load import load
from retrain.errors import ConfigError, EngineError, StorageError
from retrain.run.before.environment_checks import check_endpoint
from retrain.run.reopen import reopen
from retrain.run.session import Resume, run
from retrain.serve.chat_fields import ContextLimits
from retrain.serve.chat_sessions import SessionConflictError, Sessions
from retrain.serve.http_app import Access, RefusedError
from retrain.serve.policy_endpoint import PolicyEndpoint, source_of_episodes
from retrain.types import Completion, Rollout
from tests.run.test_episodes import CHAT, END
from tests.small_runs import rows, stored
from tests.waiting import PATIENCE_S, until

SESSION = "X-Session-ID"


def post(url, path, body, session="", method="POST"):
    """Status and JSON of a POST; a body that is a text is sent as it is, and `session` may be headers."""
    place = urlsplit(url)
    connection = HTTPConnection(place.hostname, place.port, timeout=600)
    more = session if isinstance(session, dict) else {SESSION: session} if session else {}
    content = body if isinstance(body, str) or body is None else json.dumps(body)
    connection.request(method, path, content, {"Content-Type": "application/json", **more})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if answer.headers["Content-Type"] == "application/json" else text.decode()


def user(text):
    return {"role": "user", "content": text}


def spoken(*ids):
    return Completion((*ids, END), (-0.5,) * (len(ids) + 1), "stop", 3)


def begun(sessions, name, messages):
    """A request that is not refused."""
    asked = sessions.prepare(name, messages)
    sessions.begin(asked)
    return asked


def test_a_request_extends_its_session_or_is_a_branch():
    sessions = Sessions(CHAT)
    first = begun(sessions, "s", [user("abc")])
    assert sessions.add_reply(first, spoken(2, 3)) == CHAT.decode([2, 3])
    reply = {"role": "assistant", "content": CHAT.decode([2, 3])}
    second = begun(sessions, "s", [user("abc"), reply, user("de")])
    assert second.row is first.row
    assert second.context == (*CHAT.prompt("abc").ids, 2, 3, END, *CHAT.encode("de"))
    beside = begun(sessions, "s", [user("abc"), reply, user("f")])
    assert beside.row is not first.row, "the row is waiting for another reply"
    sessions.add_reply(second, spoken(4))
    sessions.add_reply(beside, spoken(5))
    other = begun(sessions, "s", [user("abc"), {"role": "assistant", "content": "never said"}, user("de")])
    assert other.row not in (first.row, beside.row)
    assert len({one.stream for one in (first, second, beside, other)}) == 4
    sessions.add_reply(other, spoken(6))
    assert sessions.reward("s", 0.75) == 3
    whole, branch, changed = sessions.take(1)
    assert [(turn.start, turn.end) for turn in whole.turns] == [(0, 3), (5, 7)]
    assert whole.completion_ids == (2, 3, END, *CHAT.encode("de"), 4, END)
    assert whole.sampler_logprobs == (-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5)
    assert {one.group for one in (whole, branch, changed)} == {0}
    assert [one.reward for one in (whole, branch, changed)] == [0.75] * 3
    assert [len(one.turns) for one in (branch, changed)] == [1, 1]
    assert whole.weights_version == 3


def test_without_a_name_a_session_is_found_by_what_was_said():
    sessions = Sessions(CHAT)
    first, second = (begun(sessions, "", [user("abc")]) for _ in range(2))
    sessions.add_reply(first, spoken(2))
    sessions.add_reply(second, spoken(3))
    found = sessions.prepare("", [user("abc"), {"role": "assistant", "content": CHAT.decode([2])}, user("d")])
    assert (found.session, found.row) == (first.session, first.row)
    assert len({first.session, second.session, begun(Sessions(CHAT), "", [user("abc")]).session}) == 3
    assert len(first.session) > 20, "nobody guesses it"


def test_draws_of_sessions_without_a_name_depend_on_their_order():
    def streams():
        sessions = Sessions(CHAT)
        first = begun(sessions, "", [user("abc")])
        sessions.add_reply(first, spoken(2))
        said = [user("abc"), {"role": "assistant", "content": CHAT.decode([2])}, user("d")]
        more = begun(sessions, "", said)
        sessions.add_reply(more, spoken(3))
        sessions.reward(first.session, 1.0)
        others = [begun(sessions, name, [user("abc")]) for name in ("s", "", "")]
        return [one.stream for one in (first, more, *others)]

    assert streams() == streams()
    assert len({*streams()}) == 5


def test_one_conversation_is_one_row_with_one_reward():
    """Whatever comes in between: a reward while a turn is sampled, a turn after the reward, a second reward."""
    sessions = Sessions(CHAT)
    with pytest.raises(KeyError, match="s"):
        sessions.reward("s", 1.0)
    first = begun(sessions, "s", [user("abc")])
    with pytest.raises(SessionConflictError, match="no answer yet"):
        sessions.reward("s", 1.0)
    sessions.add_reply(first, spoken(2))
    said = [user("abc"), {"role": "assistant", "content": CHAT.decode([2])}, user("d")]
    given_up = begun(sessions, "s", said)
    with pytest.raises(SessionConflictError, match="no answer yet"):
        sessions.reward("s", 1.0)
    sessions.cancel(given_up)
    again = begun(sessions, "s", said)
    assert again.row is first.row
    sessions.add_reply(again, spoken(3))
    assert sessions.reward("s", 1.0) == 1
    with pytest.raises(SessionConflictError, match="has its reward"):
        sessions.prepare("s", [*said, user("e")])
    with pytest.raises(SessionConflictError, match="has its reward already"):
        sessions.reward("s", 0.0)
    assert len(sessions.take(2)) == 1


TALK = """
training = { max_steps = 2, batch_size = 2, group_size = 2, max_tokens = 16 }
warmup = { steps = 12, batch_size = 8, problems = 96 }
eval = { problems = 0 }
logging = { rollouts_every = 1 }
reward_pool = { workers = 0 }
"""


@pytest.fixture
def toml(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(TALK)
    return file


def converse(url, prompt, name, number):
    """What a program does: two turns, and a reward that varies."""
    said = [user(prompt)]
    status, first = post(url, "/v1/chat/completions", {"model": "x", "messages": said, "max_tokens": 6}, name)
    assert status == 200, first
    assert isinstance(first, dict)
    assert first["object"] == "chat.completion"
    assert first["usage"]["completion_tokens"] <= 6
    choice = first["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    said += [choice["message"], user("\n1+1=")]
    status, second = post(url, "/v1/chat/completions", {"model": "x", "messages": said, "max_tokens": 6}, name)
    assert (status, second["session"]) == (200, name)
    return post(url, f"/v1/sessions/{name}/reward", {"reward": float(number % 2)})


def test_a_run_trains_on_what_programs_talk_about(toml, tmp_path):
    urls: list[str] = []
    talking: list[threading.Thread] = []

    def observe(event, details):
        if event == "message" and "answers at" in details["text"]:
            urls.append(details["text"].split()[-1].removesuffix("/v1"))
            talking.append(threading.Thread(target=talk, daemon=True))
            talking[0].start()

    answers = []

    def talk():
        with ThreadPoolExecutor(4) as threads:
            for step in range(2):
                names = [f"s{step}-{number}" for number in range(4)]
                prompts = ["12+34=", "12+34=", "5+6=", "5+6="]
                answers.extend(threads.map(converse, urls * 4, prompts, names, range(4)))

    loaded = load(toml, [f'logging.dir="{tmp_path}/runs"', "logging.name=talked"])
    access = Access("127.0.0.1")
    done = run(loaded, Resume(), observe, around=lambda parts: source_of_episodes(parts, access, PATIENCE_S))
    talking[0].join()
    assert [status for status, _ in answers] == [200] * 8
    for step, row in enumerate(rows(done / "metrics.jsonl")):
        assert row["reward/mean"] == 0.5
        assert row["rollout/completions"] == 4
        assert row["env/turns"] == 2
        assert row["rollout/staleness"] == 0
        assert row["groups/informative"] == 1
        assert row["grad/norm"] > 0
        assert {len(one["turns"]) for one in stored(done, step)} == {2}
    parity = rows(done / "metrics.jsonl")[0]["parity/logp_diff_mean"]
    assert parity < 0.02, "what was trained on is what was sampled, but for rounding"


@pytest.fixture
def parts(train):
    """A run that has been trained."""
    parts = reopen(train("training.max_steps=1", "eval.problems=0"), (), lambda event, details: None)
    yield parts
    parts.close()


def answered(parts, ask, file=None, key=""):
    """What `ask(url)` finds while an endpoint answers."""
    endpoint = PolicyEndpoint(parts, Access("127.0.0.1", key=key), file)

    def asks():
        try:
            return ask(endpoint.url)
        finally:
            endpoint.request_stop()

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(asks)
        try:
            with pytest.raises(EngineError, match="stopped while waiting"):
                endpoint.work()
            assert post(endpoint.url, TURN, {"messages": [user("a")]}, {"Authorization": f"Bearer {key}"})[0] == 503
        finally:
            endpoint.close()
    return found.result()


TURN = "/v1/chat/completions"
DEEP = 50_000
BAD = [
    ({}, "messages: field required"),
    ({"messages": []}, "no messages"),
    ({"messages": [user("a")], "n": 2}, "n: input should be 1"),
    ({"messages": [user("a")], "stream": True}, "stream: input should be False"),
    ({"messages": [user("a")], "max_tokens": -3}, "max_tokens: input should be greater than or equal to 1"),
    ({"messages": [user("")]}, "no tokens"),
    ("[" * DEEP + "]" * DEEP, "not a JSON object"),
    ('{"messages": ' + "[" * DEEP + "]" * DEEP + "}", "not a JSON object"),
    ('{"messages"', "not a JSON object"),
]
"""(request, what its refusal says)."""


def raw(url, data):
    """The status of the answer to bytes that are sent as they are; "" if the connection is closed without one."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), PATIENCE_S) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()[9:12]


def test_requests_that_are_long_or_malformed_end_alone(parts):
    most = ContextLimits.of(parts).max_bytes
    refused = {"Content-Length: 1\r\nContent-Length: 2\r\n\r\n": "400", "Host: localhost\r\n\r\n": "400"}
    head = f"POST {TURN} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    found, long, longer = answered(
        parts,
        lambda url: (
            {more: raw(url, f"{head}{more}".encode()) for more in refused},
            post(url, TURN, {"messages": [user("1" * 500_000)]}),
            post(url, TURN, "1" * (most + 1)),
        ),
    )
    assert found == refused
    assert [long[0], longer[0]] == [400, 413]
    assert all("context_length_exceeded" in answer[1]["error"]["message"] for answer in (long, longer))


def test_a_refused_request_changes_nothing(parts):
    """Whatever a program asks, it alone is refused: its session, other sessions and the run go on."""

    def ask(url):
        said = [user("12+34=")]
        first = post(url, TURN, {"messages": said, "max_tokens": 4}, "s")[1]
        said += [first["choices"][0]["message"], user("\n1+1=")]
        bad = [post(url, TURN, body, "s") for body, _ in BAD]
        bad += [post(url, TURN, {"messages": said, "max_tokens": wanted}, "s") for wanted in ("5", -3, [], 1.5)]
        lengths = [post(url, TURN, {"messages": said}, {"Content-Length": length})[0] for length in ("abc", "-1", "0")]
        status, second = post(url, TURN, {"messages": said, "max_tokens": 4}, "s")
        assert isinstance(second, dict), second
        name = "/v1/sessions/s/reward"
        texts = ['"much"', "[]", "null", "NaN", "1e999", "1" * 400, "-" + "1" * 400, "1e200", "-1e16", "true"]
        rewards = [post(url, name, f'{{"reward": {text}}}')[0] for text in texts]
        return bad, lengths, (status, second.get("session")), rewards, post(url, name, {"reward": 1})

    bad, lengths, second, rewards, last = answered(parts, ask)
    assert [status for status, _ in bad] == [400] * (len(BAD) + 4)
    for (_, answer), (_, why) in zip(bad, BAD, strict=False):
        assert why in answer["error"]["message"]
    assert lengths == [400, 400, 400]
    assert second == (200, "s")
    assert rewards == [400] * 10
    assert last == (200, {"session": "s", "rows": 1})


@pytest.mark.slow
def test_messages_that_the_chat_template_refuses_end_no_run(parts):
    parts.chat.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% elif loop.previtem is defined and loop.previtem.role == m.role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )

    def ask(url):
        said = [user("12+34=")]
        refused = post(url, TURN, {"messages": [{"role": "system", "content": "1"}, *said]}, "s")
        first = post(url, TURN, {"messages": said, "max_tokens": 4}, "s")[1]
        said += [first["choices"][0]["message"], user("\n1+1=")]
        branch = post(url, TURN, {"messages": [user("1"), *said, user("2")]}, "s")
        second = post(url, TURN, {"messages": [*said, user("2")], "max_tokens": 4}, "s")
        return refused, branch, second[0], post(url, "/v1/sessions/s/reward", {"reward": 1.0})

    refused, branch, second, last = answered(parts, ask)
    assert (refused[0], branch[0], second) == (400, 400, 200)
    assert "System role not supported" in refused[1]["error"]["message"]
    assert "roles must alternate" in branch[1]["error"]["message"]
    assert last == (200, {"session": "s", "rows": 1})


@pytest.mark.slow
def test_a_request_that_its_program_has_given_up_is_no_turn(parts, monkeypatch):
    """Clients do so after a time, and ask again: the second request continues the conversation, too."""
    leaving: list[HTTPConnection] = []
    sample = parts.sampler.sample

    def leave(*given):
        said = sample(*given)
        if leaving:
            place = leaving[0].sock.getsockname()
            leaving.pop().close()
            until(lambda: f":{place[1]:04X}" not in " ".join(one.split()[2] for one in connections()))  # it has noticed
        return said

    def connections():
        return Path("/proc/net/tcp").read_text().splitlines()[1:]

    def ask(url):
        said = [user("12+34=")]
        first = post(url, TURN, {"messages": said, "max_tokens": 4}, "s")[1]
        said += [first["choices"][0]["message"], user("\n1+1=")]
        place = urlsplit(url)
        leaving.append(HTTPConnection(place.hostname, place.port))
        headers = {"Content-Type": "application/json", SESSION: "s"}
        leaving[0].request("POST", TURN, json.dumps({"messages": said, "max_tokens": 4}), headers)
        until(lambda: not leaving)
        second = post(url, TURN, {"messages": said, "max_tokens": 4}, "s")[1]
        return second["session"], post(url, "/v1/sessions/s/reward", {"reward": 1.0})

    monkeypatch.setattr(parts.sampler, "sample", leave)
    assert answered(parts, ask) == ("s", (200, {"session": "s", "rows": 1}))


@pytest.mark.slow
def test_web_pages_foreign_names_and_programs_without_the_key_are_refused(parts):
    """A page can send a POST of text from a browser of this machine, and have its own name lead here."""
    body = {"messages": [user("1+1=")], "max_tokens": 2}
    right = {"Authorization": "Bearer key-of-ours"}

    def ask(url):
        port = urlsplit(url).port
        refused = {
            "page": post(url, TURN, body, right | {"Origin": "http://evil.example"}),
            "same port": post(url, TURN, body, right | {"Origin": f"http://evil.example:{port}"}),
            "opaque": post(url, TURN, body, right | {"Origin": "null"}),
            "form": post(url, TURN, body, right | {"Content-Type": "text/plain"}),
            "no type": post(url, TURN, body, right | {"Content-Type": ""}),
            "rebound": post(url, TURN, body, right | {"Host": f"evil.example:{port}"}),
            "address": post(url, TURN, body, right | {"Host": "10.0.0.5"}),
            "no host": post(url, TURN, body, right | {"Host": ""}),
            "models": post(url, "/v1/models", None, {"Host": "evil.example"}, "GET"),
            "no key": post(url, TURN, body),
            "wrong key": post(url, TURN, body, {"Authorization": "Bearer key-of-our"}),
            "reward": post(url, "/v1/sessions/s/reward", {"reward": 1.0}),
            "preflight": post(url, TURN, None, right, "OPTIONS"),
            "method": post(url, TURN, None, right, "GET"),
        }
        taken = [
            post(url, TURN, body, right | {"Host": f"localhost:{port + 1}"}),
            post(url, TURN, body, right | {"Host": "[::1]:8000", "Origin": f"http://127.0.0.1:{port}"}),
            post(url, TURN, body, right | {"Content-Type": "application/json; charset=utf-8"}),
            post(url, "/v1/models", None, right, "GET"),
        ]
        return {name: status for name, (status, _) in refused.items()}, [status for status, _ in taken]

    refused, taken = answered(parts, ask, key="key-of-ours")
    others = {403: ("page", "same port", "opaque"), 415: ("form", "no type"), 401: ("no key", "wrong key", "reward")}
    others[405] = ("preflight", "method")
    assert refused == dict.fromkeys(refused, 400) | {name: code for code, names in others.items() for name in names}
    assert taken == [200] * 4


def test_an_endpoint_on_all_addresses_accepts_every_name_but_no_other_web_page():
    access = Access("0.0.0.0")
    assert access.hosts == ["*"]
    for origin in ("http://evil.example", "http://[", "null"):
        with pytest.raises(RefusedError, match="other web pages"):
            access.check(Headers({"origin": origin}))
    access.check(Headers({"origin": "http://[::1]:3000"}))
    assert {"[::1]", "localhost", "10.0.0.11"} <= {*Access("10.0.0.11").hosts}


def test_a_file_of_episodes_that_cannot_be_written_is_an_error_at_the_start(parts, tmp_path):
    with pytest.raises(StorageError, match=r"nowhere/episodes\.jsonl cannot be written"):
        PolicyEndpoint(parts, Access("127.0.0.1"), tmp_path / "nowhere/episodes.jsonl")


def test_a_trained_run_answers_and_records(parts, tmp_path):
    file = tmp_path / "episodes.jsonl"

    def ask(url):
        return {
            "told": converse(url, "12+34=", "one", 1),
            "missing": post(url, "/v1/sessions/one/reward", {"reward": 1.0}),
            "elsewhere": post(url, "/v1/completions", {"prompt": "x"}),
            "budget": post(url, TURN, {"messages": [user("1" * 50_000)]}),
        }

    found = answered(parts, ask, file)
    assert found["told"] == (200, {"session": "one", "rows": 1})
    assert (found["missing"][0], found["elsewhere"][0]) == (409, 404)
    assert found["budget"][0] == 400
    assert "context_length_exceeded" in found["budget"][1]["error"]["message"]
    [row] = [json.loads(line) for line in file.read_text().splitlines()]
    one = Rollout.of_row(row)
    assert (one.reward, len(one.turns), one.correct) == (1.0, 2, True)


@pytest.mark.slow
def test_a_run_that_nobody_talks_to_says_so_and_ends(toml, tmp_path):
    said = []

    def observe(event, details):
        said.append(details.get("text", ""))
        if "answers at" in said[-1]:  # a conversation that nobody rewards, so that there is something to count
            url = said[-1].split()[-1].removesuffix("/v1")
            body = {"messages": [user("1+2=")], "max_tokens": 2}
            threading.Thread(target=post, args=(url, "/v1/chat/completions", body), daemon=True).start()

    loaded = load(toml, [f'logging.dir="{tmp_path}/runs"'])
    with pytest.raises(EngineError, match=r"0 of the 4 sessions .* 1 have none yet; --patience"):
        run(loaded, Resume(), observe, around=lambda parts: source_of_episodes(parts, Access("127.0.0.1"), 3.0))
    [warned] = [text for text in said if "has received no request" in text]
    assert "Ctrl-C ends the run" in warned


def test_what_cannot_train_on_programs_is_refused_with_its_place(toml):
    check_endpoint(load(toml), False)
    for more, key, why in (
        ('[algorithm]\nalgorithm_mode = "vine"\n', "[algorithm] algorithm_mode", "a program cannot be reset"),
        ('[algorithm]\nalgorithm_mode = "oracle"\n', "[algorithm] algorithm_mode", "a program cannot be reset"),
        ("[rollout]\noverlap = 1\n", "[rollout] overlap", "does not sample during an update"),
    ):
        toml.write_text(TALK.replace("workers = 0", "workers = 1") + more)
        with pytest.raises(ConfigError, match=r"program|endpoint") as refused:
            check_endpoint(load(toml), False)
        [problem] = refused.value.problems
        assert (problem.key, problem.line) == (key, (TALK + more).count("\n")), problem
        assert why in problem.problem
    toml.write_text(TALK)
    with pytest.raises(ConfigError, match="single process"):
        check_endpoint(load(toml), True)
