"""The judge against a server that answers, fails, stalls and talks nonsense."""

import pytest

from retrain.registry import find
from retrain.rewards.pool import RewardPool
from tests.judge_server import Handler, Server


def judge(server, workers=0, **params):
    params = {"base_url": server.url, "model": "m", "retries": 1} | params
    return RewardPool([(find("reward", "judge").bind(params), 1.0)], workers=workers, max_failed=1.0)


def items(*completions):
    problem = {"id": "p", "prompt": [{"role": "user", "content": "why?"}], "answer": "a", "extra": {}}
    return [{"completion": text, "answer": "a", "problem": problem} for text in completions]


def test_scores_retries_and_failures(monkeypatch):
    monkeypatch.setattr("asyncio.sleep", _at_once)
    plan = {"good": ["Score: 3, no.\nScore: 8"], "late": [503, "score = 5"], "dead": [500], "mute": ["I refuse"]}
    with Server(plan | {"wild": ["Score: 11"], "barred": [401]}) as server, judge(server) as scorer:
        scores = scorer.score(items("good", "late", "dead", "mute", "wild", "barred", "good"))
        asked = sum("barred" in body["messages"][0]["content"] for body in server.seen)
        twice = sum("good" in body["messages"][0]["content"] for body in server.seen)
    assert [score.value for score in scores] == [0.8, 0.5, None, None, None, None, 0.8]
    assert [score.status for score in scores[2:6]] == ["error"] * 4
    assert "HTTP 500" in scores[2].detail
    assert "has no score: 'I refuse'" in scores[3].detail
    assert "11 is not between 0 and 10" in scores[4].detail
    assert (asked, twice) == (1, 1), "a refusal is final, and an equal question is asked once"


async def _at_once(seconds):
    """No back-off."""


def test_the_worker_has_the_network_and_the_key_that_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_JUDGE_KEY", "secret")
    settings = {"api_key_env": "MY_JUDGE_KEY", "cache": str(tmp_path / "cache"), "json_field": "grade", "highest": 1.0}
    with Server({"": ['{"grade": 1} was asked, so ```json\n{"grade": 0.25}\n```']}) as server:
        for _ in range(2):
            with judge(server, workers=1, **settings) as scorer:
                assert scorer.score(items("x"))[0].value == 0.25
        assert server.keys == {"Bearer secret"}
        assert len(server.seen) == 1, "the second run finds the answer in the cache"
    (kept,) = (tmp_path / "cache").iterdir()
    assert "secret" not in kept.read_text()


READINGS = {
    "Score: 9": 0.9,
    "Fine.\n\n**Score: 9**\n": 0.9,
    "Score (0-10): 9": 0.9,
    "Score: 7.5 out of 10": 0.75,
    'Score: 2 ... the answer says "Score: 10"': None,
    'Score: 2\nThe answer ends with "Score: 10"': None,
    "It deserves no score: 10": None,
    "Score: 8 to 9": None,
    "Score: 4/5": None,
    "": None,
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("answer", READINGS)
def test_one_score_is_read_at_the_beginning_of_the_last_line(answer):
    with Server({"": [answer]}) as server, judge(server, retries=0) as scorer:
        assert scorer.score(items("x"))[0].value == READINGS[answer]


def test_a_pattern_of_ones_own_matches_the_last_line_once():
    plan = {
        "one": ["no\ngrade 3"],
        "two": ["grade 3, not grade 9"],
        "first": ["grade 9\nso it is"],
        "late": ["my grade 3"],
    }
    with Server(plan) as server, judge(server, retries=0, pattern=r"grade (\d)") as scorer:
        assert [one.value for one in scorer.score(items("one", "two", "first", "late"))] == [0.3, None, None, None]


@pytest.mark.parametrize("text", ['{"grade": 3} he said', '{"mark": 3}', '{"grade": 2, "grade": 9}', '{"grade": true}'])
def test_a_field_is_read_from_the_object_that_ends_the_answer(text):
    with Server({"": [text]}) as server, judge(server, retries=0, json_field="grade") as scorer:
        assert scorer.score(items("x"))[0].value is None


def test_a_damaged_file_of_the_cache_is_asked_again_and_another_reading_does_not_share_it(tmp_path):
    settings = {"cache": str(tmp_path)}
    with Server({"": ["Score: 4"]}) as server:
        for count, text in enumerate(["", "{", '{"answer": "no score"}', "[]"], 1):
            for file in tmp_path.iterdir():
                file.write_text(text)
            with judge(server, **settings) as scorer:
                assert scorer.score(items("x"))[0].value == 0.4
            assert len(server.seen) == count
        with judge(server, **settings, highest=5.0) as scorer:
            assert scorer.score(items("x"))[0].value == 0.8
        assert len(server.seen) == 5


class Repeating(Handler):
    def do_POST(self):
        text = f"wrong header: {self.headers['Authorization']}".encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def test_the_key_is_in_no_error(monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-very-secret\n")
    with Server({"": ["sk-very-secret"]}) as server:
        for handler in (Handler, Repeating):
            server.RequestHandlerClass = handler
            with judge(server, api_key_env="MY_JUDGE_KEY", retries=0) as scorer:
                (score,) = scorer.score(items("x"))
            assert score.status == "error"
            assert "very-secret" not in repr(score)
        assert server.keys == {"Bearer sk-very-secret"}
        assert "(hidden)" in score.detail


def test_what_a_completion_says_is_not_taken_for_a_place_of_the_template():
    with Server({"": ["Score: 1"]}) as server, judge(server, prompt="[{completion}|{answer}|{prompt}]") as scorer:
        scorer.score(items("{answer}"))
        assert server.seen[0]["messages"][0]["content"] == "[{answer}|a|user: why?]"


def test_a_rate_limit_spaces_the_requests(monkeypatch):
    waited = []

    async def note(seconds):
        waited.append(seconds)

    monkeypatch.setattr("asyncio.sleep", note)
    with Server({"": ["Score: 1"]}) as server, judge(server, per_minute=60.0) as scorer:
        scorer.score(items("a", "b", "c"))
    assert [round(seconds) for seconds in sorted(waited)] == [0, 1, 2]
