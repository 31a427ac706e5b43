"""Names that look like secrets, and what is hidden because of them."""

import json

import pytest

from retrain.config.jsonschema import json_schema
from retrain.system.secret_names import HIDDEN, literal_secrets, looks_secret, masked


@pytest.mark.parametrize(
    "name", ["api_key", "API-KEY", "hubToken", "SMTP_PASS", "GH_PAT", "password", "auth", "judge_secret_file", "key_2"]
)
def test_words_of_secrets(name):
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "api_key_env", "author", "keyboard", "tokenizer", "monkey", "pass_at", "token_mean", ""],
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
