"""A policy that programs talk to by HTTP, as an OpenAI client would; their conversations are trained on."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from retrain.config.environment_checks import check_endpoint
from retrain.config.load import load
from retrain.errors import ConfigError, EngineError
from retrain.run.reopen import reopen
from retrain.run.session import Resume, run
from retrain.tools.harness_sessions import Sessions, plain_messages
from retrain.tools.policy_endpoint import SESSION, PolicyEndpoint, source_of_episodes
from retrain.types import Completion, Rollout
from tests.run.test_environment_runs import stored
from tests.run.test_episodes import CHAT, END
from tests.small_runs import rows
from tests.waiting import PATIENCE_S


def post(url, path, body, session=""):
    """Status and JSON of a POST."""
    place = urlsplit(url)
    connection = HTTPConnection(place.hostname, place.port, timeout=600)
    headers = {"Content-Type": "application/json", **({SESSION: session} if session else {})}
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def user(text):
    return {"role": "user", "content": text}


def spoken(*ids):
    return Completion((*ids, END), (-0.5,) * (len(ids) + 1), "stop", 3)


def test_a_request_extends_its_session_or_is_a_branch():
    sessions = Sessions(CHAT)
    first = sessions.ask("s", [user("abc")])
    assert sessions.say(first, spoken(2, 3)) == CHAT.decode([2, 3])
    reply = {"role": "assistant", "content": CHAT.decode([2, 3])}
    second = sessions.ask("s", [user("abc"), reply, user("de")])
    assert second.row is first.row
    assert second.context == (*CHAT.prompt("abc").ids, 2, 3, END, *CHAT.encode("de"))
    beside = sessions.ask("s", [user("abc"), reply, user("f")])
    assert beside.row is not first.row, "the row is waiting for another reply"
    sessions.say(second, spoken(4))
    sessions.say(beside, spoken(5))
    other = sessions.ask("s", [user("abc"), {"role": "assistant", "content": "never said"}, user("de")])
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
        asked = sessions.ask("", [user("abc")])
        assert asked.session == f"session-{place}"
        sessions.say(asked, spoken(*ids))
    found = sessions.ask("", [user("abc"), {"role": "assistant", "content": CHAT.decode([2])}, user("d")])
    assert found.session == "session-0"
    assert found.row.turns


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


def test_a_trained_run_answers_and_records(train, tmp_path):
    file = tmp_path / "episodes.jsonl"
    parts = reopen(train("training.max_steps=1", "eval.problems=0"), (), lambda event, details: None)
    endpoint = PolicyEndpoint(parts, "127.0.0.1", 0, file)
    found = {}

    def ask():
        url, chat = endpoint.url, "/v1/chat/completions"
        bad = [{}, {"messages": "x"}, {"messages": [user("a")], "n": 2}, {"messages": [user("a")], "stream": True}]
        try:
            found.update(
                told=converse(url, "12+34=", "one", 1),
                missing=post(url, "/v1/sessions/one/reward", {"reward": 1.0}),
                elsewhere=post(url, "/v1/completions", {"prompt": "x"}),
                refused=[post(url, chat, body) for body in bad],
                reward=post(url, "/v1/sessions/one/reward", {"reward": "much"}),
                budget=post(url, chat, {"messages": [user("1" * 50_000)]}),
            )
        finally:
            endpoint.hurry()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    with pytest.raises(EngineError, match="no more episodes"):
        endpoint.work()
    thread.join()
    endpoint.close()
    assert endpoint.submit("/v1/chat/completions", "", {"messages": [user("a")]})[0] == 503
    parts.close()
    assert found["told"] == (200, {"session": "one", "rows": 1})
    assert found["missing"][0] == found["elsewhere"][0] == 404
    assert [status for status, _ in found["refused"]] == [400] * 4
    assert found["reward"][0] == 400
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
