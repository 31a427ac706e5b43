"""A policy that programs talk to by HTTP, as an OpenAI client would; their conversations are trained on."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from retrain.config.environment_checks import check_endpoint
from retrain.config.load import load
from retrain.errors import ConfigError, EngineError, StorageError
from retrain.run.reopen import reopen
from retrain.run.session import Resume, run
from retrain.tools.harness_sessions import Sessions, plain_messages
from retrain.tools.policy_endpoint import SESSION, PolicyEndpoint, source_of_episodes
from retrain.types import Completion, Rollout
from tests.run.test_environment_runs import stored
from tests.run.test_episodes import CHAT, END
from tests.small_runs import rows
from tests.waiting import PATIENCE_S, until


def post(url, path, body, session=""):
    """Status and JSON of a POST; a body that is a text is sent as it is, and `session` may be headers."""
    place = urlsplit(url)
    connection = HTTPConnection(place.hostname, place.port, timeout=600)
    more = session if isinstance(session, dict) else {SESSION: session} if session else {}
    content = body if isinstance(body, str) else json.dumps(body)
    connection.request("POST", path, content, {"Content-Type": "application/json", **more})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def user(text):
    return {"role": "user", "content": text}


def spoken(*ids):
    return Completion((*ids, END), (-0.5,) * (len(ids) + 1), "stop", 3)


def begun(sessions, name, messages):
    """A request that is not refused."""
    asked = sessions.ask(name, messages)
    sessions.begin(asked)
    return asked


def test_a_request_extends_its_session_or_is_a_branch():
    sessions = Sessions(CHAT)
    first = begun(sessions, "s", [user("abc")])
    assert sessions.say(first, spoken(2, 3)) == CHAT.decode([2, 3])
    reply = {"role": "assistant", "content": CHAT.decode([2, 3])}
    second = begun(sessions, "s", [user("abc"), reply, user("de")])
    assert second.row is first.row
    assert second.context == (*CHAT.prompt("abc").ids, 2, 3, END, *CHAT.encode("de"))
    beside = begun(sessions, "s", [user("abc"), reply, user("f")])
    assert beside.row is not first.row, "the row is waiting for another reply"
    sessions.say(second, spoken(4))
    sessions.say(beside, spoken(5))
    other = begun(sessions, "s", [user("abc"), {"role": "assistant", "content": "never said"}, user("de")])
    assert other.row not in (first.row, beside.row)
    assert len({one.stream for one in (first, second, beside, other)}) == 4
    sessions.say(other, spoken(6))
    assert sessions.reward("s", 0.75) == 3
    whole, branch, changed = sessions.take(1)
    assert [(turn.start, turn.end) for turn in whole.turns] == [(0, 3), (5, 7)]
    assert whole.completion_ids == (2, 3, END, *CHAT.encode("de"), 4, END)
    assert whole.sampler_logprobs == (-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5)
    assert {one.group for one in (whole, branch, changed)} == {0}
    assert [one.reward for one in (whole, branch, changed)] == [0.75] * 3
    assert [len(one.turns) for one in (branch, changed)] == [1, 1]
    assert whole.weights_version == 3
    with pytest.raises(KeyError, match="s"):
        sessions.reward("s", 1.0)


def test_without_a_name_a_session_is_found_by_what_was_said():
    sessions = Sessions(CHAT)
    for place, ids in enumerate([(2,), (3,)]):
        asked = begun(sessions, "", [user("abc")])
        assert asked.session == f"session-{place}"
        sessions.say(asked, spoken(*ids))
    found = sessions.ask("", [user("abc"), {"role": "assistant", "content": CHAT.decode([2])}, user("d")])
    assert found.session == "session-0"
    assert found.row.turns
    sessions.begin(found)
    sessions.say(found, spoken(5))
    begun(sessions, "session-3", [user("abc")])
    begun(sessions, "session-4", [user("abc")])
    names = [begun(sessions, "", [user("abc")]).session for _ in range(3)]
    assert names == ["session-5", "session-6", "session-7"], "a name that a program gave is not given again"


def test_a_request_that_is_not_begun_leaves_no_trace():
    def ends(*refused):
        sessions = Sessions(CHAT)
        sessions.say(begun(sessions, "s", [user("abc")]), spoken(2))
        said = [user("abc"), {"role": "assistant", "content": CHAT.decode([2])}, user("d")]
        for name in refused:
            sessions.ask(name, said)
            sessions.ask(name, [user("x")])
        last = begun(sessions, "s", said)
        sessions.say(last, spoken(3))
        new = begun(sessions, "", [user("y")])
        return last.stream, new.session, new.stream, sessions.reward("s", 1.0), sessions.live

    assert ends() == ends("", "s", "t")
    assert ends()[3] == 1


def test_two_branches_that_say_the_same_are_two_rows():
    sessions = Sessions(CHAT)
    both = [begun(sessions, "s", [user("abc")]) for _ in range(2)]
    for one in both:
        sessions.say(one, spoken(2))
    assert sessions.reward("s", 1.0) == 2


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([user("a"), {"role": "tool", "content": None}], ["a", ""]),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], ["ab"]),
    ],
)
def test_messages_are_read_as_text(given, found):
    assert [one["content"] for one in plain_messages(given)] == found


TALK = """
[training]
max_steps = 2
batch_size = 2
group_size = 2
max_tokens = 16

[warmup]
steps = 12
batch_size = 8
problems = 96

[eval]
problems = 0

[logging]
rollouts_every = 1

[reward_pool]
workers = 0
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
    how = ("127.0.0.1", 0, PATIENCE_S)
    done = run(loaded, Resume(), observe, around=lambda parts: source_of_episodes(parts, *how))
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


def answered(parts, ask, file=None):
    """What `ask(url)` finds while an endpoint answers."""
    endpoint = PolicyEndpoint(parts, "127.0.0.1", 0, file)

    def asks():
        try:
            return ask(endpoint.url)
        finally:
            endpoint.hurry()

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(asks)
        try:
            with pytest.raises(EngineError, match="no more episodes"):
                endpoint.work()
        finally:
            endpoint.close()
    assert endpoint.submit(TURN, "", {"messages": [user("a")]}, lambda: True)[0] == 503
    return found.result()


TURN = "/v1/chat/completions"
DEEP = 50_000
BAD = [
    ({}, "no messages"),
    ({"messages": "x"}, "messages is not a list"),
    ({"messages": [user("a")], "n": 2}, "one completion"),
    ({"messages": [user("a")], "stream": True}, "one completion"),
    ({"messages": [user("a")], "max_tokens": "5"}, "max_tokens is not a whole number"),
    ({"messages": [user("a")], "max_tokens": -3}, "max_tokens is below 1"),
    ({"messages": [user("a")], "max_completion_tokens": 0}, "max_tokens is below 1"),
    ({"messages": [user("a")], "max_tokens": True}, "max_tokens is not a whole number"),
    ({"messages": [user("a")], "model": [[]]}, "model is not a string"),
    ({"messages": [user("a")], "tools": 5}, "tools is not a list"),
    ({"messages": [user("")]}, "no tokens"),
    ({"messages": [user("\ud800")]}, ""),
    ("[" * DEEP + "]" * DEEP, "no JSON object"),
    ('{"messages": ' + "[" * DEEP + "]" * DEEP + "}", "no JSON object"),
    ('{"messages"', "no JSON object"),
]
"""(request, what its refusal says)."""


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
        name = "/v1/sessions/s/reward"
        texts = ['"much"', "[]", "null", "NaN", "1e999", "1" * 400, "-" + "1" * 400, "1e200", "-3.5e38", "true"]
        rewards = [post(url, name, f'{{"reward": {text}}}')[0] for text in texts]
        return bad, lengths, (status, second.get("session")), rewards, post(url, name, {"reward": 1})

    bad, lengths, second, rewards, last = answered(parts, ask)
    assert [status for status, _ in bad] == [400] * (len(BAD) + 4)
    for (_, answer), (_, why) in zip(bad, BAD, strict=False):
        assert why in answer["error"]["message"]
    assert lengths == [400, 413, 413]
    assert second == (200, "s")
    assert rewards == [400] * 10
    assert last == (200, {"session": "s", "rows": 1})


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


def test_a_request_that_its_program_has_given_up_is_no_turn(parts, monkeypatch):
    """Clients do so after a time, and ask again: the second request continues the conversation, too."""
    leaving: list[HTTPConnection] = []
    sample = parts.sampler.sample

    def leave(*given):
        said = sample(*given)
        if leaving:
            port = leaving[0].port
            leaving.pop().close()
            # 08 is CLOSE_WAIT: the other end is closed.
            until(lambda: f":{port:04X}" in " ".join(one.split()[1] for one in connections() if one.split()[3] == "08"))
        return said

    def connections():
        return Path("/proc/net/tcp").read_text().splitlines()[1:]

    def ask(url):
        said = [user("12+34=")]
        first = post(url, TURN, {"messages": said, "max_tokens": 4}, "s")[1]
        said += [first["choices"][0]["message"], user("\n1+1=")]
        place = urlsplit(url)
        leaving.append(HTTPConnection(place.hostname, place.port))
        leaving[0].request("POST", TURN, json.dumps({"messages": said, "max_tokens": 4}), {SESSION: "s"})
        until(lambda: not leaving)
        second = post(url, TURN, {"messages": said, "max_tokens": 4}, "s")[1]
        return second["session"], post(url, "/v1/sessions/s/reward", {"reward": 1.0})

    monkeypatch.setattr(parts.sampler, "sample", leave)
    assert answered(parts, ask) == ("s", (200, {"session": "s", "rows": 1}))


def test_a_file_of_episodes_that_cannot_be_written_is_an_error_at_the_start(parts, tmp_path):
    with pytest.raises(StorageError, match=r"nowhere/episodes\.jsonl cannot be written"):
        PolicyEndpoint(parts, "127.0.0.1", 0, tmp_path / "nowhere/episodes.jsonl")


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
    assert found["missing"][0] == found["elsewhere"][0] == 404
    assert found["budget"][0] == 400
    assert "context_length_exceeded" in found["budget"][1]["error"]["message"]
    [row] = [json.loads(line) for line in file.read_text().splitlines()]
    one = Rollout.of_row(row)
    assert (one.reward, len(one.turns), one.correct) == (1.0, 2, True)


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
        run(loaded, Resume(), observe, around=lambda parts: source_of_episodes(parts, "127.0.0.1", 0, 3.0))
    [warned] = [text for text in said if "no program has asked" in text]
    assert "Ctrl-C ends the run" in warned


def test_what_cannot_train_on_programs_is_refused_with_its_place(toml):
    check_endpoint(load(toml), False)
    for more, key, why in (
        ('[algorithm]\nalgorithm_mode = "vine"\n', "[algorithm] algorithm_mode", "a program cannot be put back"),
        ('[algorithm]\nalgorithm_mode = "oracle"\n', "[algorithm] algorithm_mode", "a program cannot be put back"),
        ("[rollout]\noverlap = 1\n", "[rollout] overlap", "between updates"),
    ):
        toml.write_text(TALK.replace("workers = 0", "workers = 1") + more)
        with pytest.raises(ConfigError, match="program") as refused:
            check_endpoint(load(toml), False)
        [problem] = refused.value.problems
        assert (problem.key, problem.line) == (key, (TALK + more).count("\n")), problem
        assert why in problem.problem
    toml.write_text(TALK)
    with pytest.raises(ConfigError, match="several ranks"):
        check_endpoint(load(toml), True)
