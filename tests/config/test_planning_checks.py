"""[planning], and the names of its keys in [hicra] and [logging]."""

import json


def planning(result):
    return dict(result.signal("planning_mask").params)


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
    (transform,) = result.all("transform")
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
