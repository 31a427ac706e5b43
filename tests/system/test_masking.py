"""Names and values that look like secrets, and what is hidden because of them."""

import json

import pytest

from retrain.config.jsonschema import json_schema
from retrain.config.schema import Config
from retrain.system.masking import HIDDEN, hide_named, literal_secrets, looks_secret, masked, secret_from


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "API-KEY", "hubToken", "SMTP_PASS", "GH_PAT", "password", "auth", "judge_secret_file", "dsn"),
        *("webhook_url", "dbpassword", "authtoken", "passwords", "api_keys", "header", "headers", "db_pw", "wifi_psk"),
    ],
)
def test_words_of_secrets(name):
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("max_tokens", "api_key_env", "author", "keyboard", "tokenizer", "monkey", "pass_at", "token_mean", "", "env"),
        *("eos_token_id", "bypass", "donkeys", "detokenize", "reuse_key_of", "stop_token", "answer_key", "tokens"),
    ],
)
def test_names_that_only_look_alike(name):
    assert not looks_secret(name)


def test_values_are_hidden_in_depth_and_switches_stay():
    config = {
        "rewards": [{"name": "judge", "params": {"api_key": "C", "api_key_env": "JUDGE_KEY", "tries": 3}}],
        "credentials": {"user": "C", "ids": ["C", 7], "empty": None, "on": True},
        "url": "https://me:C@host/x?y=1",
        "urls": ["http://127.0.0.1:8000"],
    }
    shown = masked(config)
    assert "C" not in json.dumps(shown).replace(HIDDEN, "").replace("JUDGE_KEY", "").split('"')
    assert shown["rewards"][0]["params"] == {"api_key": HIDDEN, "api_key_env": "JUDGE_KEY", "tries": 3}
    assert shown["credentials"] == {"user": HIDDEN, "ids": [HIDDEN, HIDDEN], "empty": None, "on": True}
    assert (shown["url"], shown["urls"]) == (f"https://{HIDDEN}@host/x?y=1", ["http://127.0.0.1:8000"])
    assert literal_secrets(config) == [("rewards", 0, "params", "api_key"), ("credentials",), ("url",)]
    assert literal_secrets(shown) == []


def test_no_key_of_the_configuration_looks_secret():
    """A value of ours that a page hides would be a page that does not say what was trained."""

    def names(node):
        if isinstance(node, dict):
            for key, value in node.items():
                yield from value if key == "properties" else ()
                yield from names(value)
        elif isinstance(node, list):
            for item in node:
                yield from names(item)

    known = set(names(json_schema()))
    assert {"max_tokens", "advantage_mode", "alpha"} <= known
    assert [name for name in known if looks_secret(name)] == []


def test_values_of_the_configuration_are_shown():
    """The defaults of every key, and of what is like a key."""
    defaults = Config().model_dump(mode="json")
    assert masked(defaults) == defaults
    ordinary = {
        "tokens": 48,
        "token": True,
        "stop_tokens": ["</s>", "<|im_end|>"],
        "header": False,
        "task": "basic arithmetic",
        "pattern": r"(?i)score\W*(-?\d+(?:\.\d+)?)",
        "model": "sk-learn-style-names/Qwen3-0.6B",
        "urls": ["http://127.0.0.1:8000/v1?limit=5"],
    }
    assert masked(ordinary) == ordinary
    assert literal_secrets(ordinary) == []


@pytest.mark.parametrize(
    "message",
    [
        "--set: write --set section.key=value, and an index for a list: --set rewards.0.weight=2",
        "run.toml:3:1: [[rewards.params]] api_key: looks like a secret; set api_key_env to the name of a variable",
        "password: required; token: 151643, tokens: 4711 of 9000, key: value1234, header: 12, X-Header: 1234abcd",
        "retrain train run.toml --resume auto --set model.path=Qwen3-0.6B",
    ],
)
def test_messages_are_shown_in_full(message):
    assert masked(message) == message


CANARY = "Canary4711Zz"


def test_user_and_password_of_an_address_are_hidden():
    for url in (f"https://me:p@{CANARY}@host/x", f"postgresql://me:{CANARY}@db/x"):
        for value in (url, f"before {url} after", json.dumps({"note": url})):
            shown = masked({"note": [value]})
            assert CANARY not in json.dumps(shown)
            assert masked(shown) == shown
            assert literal_secrets({"note": value}) == [("note",)]


def test_a_text_is_not_searched_for_what_it_names_itself():
    """A pattern hides `a` of `password = "a b c"`, and "Bearer" of a header, which looks as if it had worked."""
    for text in (f'password = "{CANARY} b c"', f"Authorization: Bearer {CANARY}", f"api_key: {CANARY}"):
        assert masked(text) == text


@pytest.mark.parametrize(
    "config",
    [
        {"passwords": {"db": CANARY}},
        {"params": {"Authorization": f"Bearer {CANARY} b c"}},
        {"headers": {"X-Mine": CANARY}},
        {"credentials": {"pin": 47114711}},
    ],
)
def test_every_value_under_the_name_of_a_secret_is_hidden(config):
    assert "4711" not in json.dumps(masked(config))
    assert len(literal_secrets(config)) == 1


def test_values_of_variables_are_hidden_wherever_they_turn_up(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_API_KEY", f" {CANARY}-1\n")
    monkeypatch.setenv("JUDGE", f"{CANARY}/2")
    monkeypatch.setenv("OTHER", f"{CANARY}-3")
    monkeypatch.setenv("VLLM_API_KEY", "EMPTY")
    monkeypatch.setenv("TOKEN_FILE_AUTH", str(tmp_path))
    assert masked(f"x{CANARY}-1x") == f"x{HIDDEN}x"
    assert masked(f"a {CANARY}/2") == f"a {CANARY}/2"
    hide_named({"rewards": [{"params": {"judge_env": "JUDGE", "env": ["OTHER"], "other_env": ["UNSET"]}}]})
    assert masked({"error": f"a {CANARY}/2, Canary4711Zz%2F2"}) == {"error": f"a {HIDDEN}, {HIDDEN}"}
    assert masked(f"{CANARY}-3") == f"{CANARY}-3"
    assert secret_from("OTHER") == f"{CANARY}-3"
    assert masked(f"{CANARY}-3") == HIDDEN
    monkeypatch.setenv("PHRASE_SECRET", "correct horse battery")
    for form in ("correct+horse+battery", "correct%20horse%20battery"):
        assert masked(f"say {form}") == f"say {HIDDEN}"
    assert masked(f"EMPTY {tmp_path}") == f"EMPTY {tmp_path}"
