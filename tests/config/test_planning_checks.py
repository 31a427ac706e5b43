"""[planning], and the names of its keys in [hicra] and [logging]."""

import importlib.util
import json
import re

import pytest

from retrain.errors import ConfigError


def planning(result):
    return dict(result.components.signal("planning_mask").params)


def test_every_documented_key_is_accepted_in_hicra_and_reaches_its_reader(loaded, tmp_path):
    (tmp_path / "grams.json").write_text(json.dumps({"strategic_grams": ["let me think", "hm"]}))
    result = loaded(
        """
[algorithm]
transform_mode = "hicra_entropy"
[hicra]
alpha = 0.3
entropy_topk = 0.4
use_planning_tokens = true
threshold_rule = "strict"
strategic_grams_path = "grams.json"
sg_n_range = [3, 5]
log_semantic_entropy = false
log_planning_token_ratio = false
"""
    )
    (transform,) = result.components.all("transform")
    assert dict(transform.params) == {
        "alpha": 0.3,
        "entropy_topk": 0.4,
        "use_planning_tokens": True,
        "threshold_rule": "strict",
        "per": "episode",
    }
    params = planning(result)
    assert (params["strategic_grams_path"], params["sg_n_range"]) == ("grams.json", [3, 5])
    assert (params["log_semantic_entropy"], params["log_planning_token_ratio"]) == (False, False)
    assert planning(loaded("", "hicra.sg_n_range=[2, 2]"))["sg_n_range"] == [2, 2]
    assert planning(loaded('[hicra]\nstrategic_grams = "default"'))["strategic_grams"] == "default"


REFUSED = [
    ('[planning]\ndetector = "gram"', 2, 'there is no detector "gram"', 'did you mean "grams"'),
    ('[planning]\ndetector = "semantic"\nembedder = "nowhere"', 3, "no directory", "sentence-transformer"),
    ("[hicra]\nsg_n_range = [7, 9]", 2, "contains none of the 18", "2 to 3 words"),
    ("[hicra]\nsg_n_range = [2, 3]\n[planning]\nsg_n_range = [2, 3]", 2, "the same setting", "keep one"),
    ('[hicra]\nstrategic_grams = "[1]"', 2, "which is not a phrase", "as text with words"),
]


@pytest.mark.parametrize(("text", "line", "says", "fix"), REFUSED, ids=[row[0].replace("\n", " ") for row in REFUSED])
def test_mistakes_have_a_place_and_a_fix(loaded, text, line, says, fix):
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        loaded(text)
    problem = caught.value.problems[0]
    assert problem.line == line
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("text", "package", "key"),
    [
        ('[planning]\ndetector = "semantic"', "sklearn", "[planning] detector"),
        ('[planning]\ndetector = "semantic"\nembedder = "."', "sentence_transformers", "[planning] embedder"),
    ],
)
def test_a_missing_package_names_the_extra(loaded, monkeypatch, text, package, key):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else real(name, *a))
    with pytest.raises(ConfigError, match=f"{package} is not installed") as caught:
        loaded(text)
    [problem] = caught.value.problems
    assert problem.key == key
    assert "[grams]" in problem.fix


def test_keys_that_the_detector_does_not_read_are_refused(loaded, tmp_path):
    def refused(text):
        with pytest.raises(ConfigError, match="does not read it") as caught:
            loaded(f'[algorithm]\ntransform_mode = "hicra"\n{text}')
        return [(one.line, one.key, one.problem) for one in caught.value.problems]

    assert refused("[planning]\nmargin = 0.5") == [(4, "[planning] margin", 'detector = "grams" does not read it')]
    (tmp_path / "own_planning_file.py").write_text("def fn(texts):\n    return [[] for _ in texts]\n")
    text = '[planning]\ndetector = "own_planning_file.fn"\nwindow = 2\n[hicra]\nstrategic_grams = ["a b"]'
    assert [row[:2] for row in refused(text)] == [(5, "[planning] window"), (7, "[hicra] strategic_grams")]
