import json

import pytest
import tomli

from retrain import registry
from retrain.config.load import load
from retrain.config.presets import FOLDER, preset_names, preset_summary
from retrain.run.before.explain import explain

DOCUMENTED = [
    *("grpo", "dr_grpo", "dapo", "gspo", "cispo", "maxrl", "dca", "grpo_lp", "hicra", "hicra_entropy", "sepa"),
    *("prime", "prime_literal", "mix", "chord", "gdpo", "opd", "sdpo", "ppo", "vapo", "luspo"),
    *("sapo", "gmpo", "pass_at_k"),
]
NEEDS = {
    **dict.fromkeys(("mix", "chord"), '[expert]\npath = "{expert}"\n'),
    "opd": '[teacher]\nmodel = "{teacher}"\n',
    "prime_literal": "[training]\nepochs = 2\n",
    "vapo": "[training]\nmax_tokens = 200\n",
    **dict.fromkeys(("gspo", "luspo", "sapo", "gmpo"), "[training]\nminibatches = 4\n"),
}
EXPERT = {"messages": [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "so 3"}]}


@pytest.fixture
def run(tmp_path):
    def go(text, *overrides):
        expert = tmp_path / "expert.jsonl"
        expert.write_text(json.dumps(EXPERT) + "\n")
        file = tmp_path / "run.toml"
        (tmp_path / "teacher").mkdir(exist_ok=True)
        (tmp_path / "teacher" / "config.json").touch()
        file.write_text(text.replace("{expert}", str(expert)).replace("{teacher}", str(tmp_path / "teacher")))
        return load(file, overrides)

    return go


def using(preset, more=""):
    return f'[algorithm]\nalgorithm_mode = "{preset}"\n' + more


def test_every_documented_preset_is_shipped():
    assert set(preset_names()) == set(DOCUMENTED)
    assert not set(preset_names()) & set(registry.names("algorithm"))
    assert all(len(preset_summary(name)) > 40 for name in preset_names())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_preset_expands_to_its_keys_and_no_warning(name, run):
    loaded = run(using(name, NEEDS.get(name, "")))
    assert loaded.warnings == ()
    written = tomli.loads((FOLDER / f"{name}.toml").read_text())
    resolved = loaded.resolved()
    for section, table in written.items():
        if section in ("loss", "rewards"):
            assert [entry["name"] for entry in resolved[section]] == [entry["name"] for entry in table]
        else:
            assert {key: resolved[section][key] for key in table} == table
    assert loaded.optional("algorithm") is None
    assert resolved["algorithm"]["algorithm_mode"] == name


def test_dapo_is_what_the_paper_names(run):
    loaded = run(using("dapo"))
    components = loaded.resolved()["components"]
    found = {kind: {entry["name"]: entry["params"] for entry in entries} for kind, entries in components.items()}
    assert found["loss"]["ppo_clip"]["eps_low"] == 0.2
    assert found["loss"]["ppo_clip"]["eps_high"] == 0.28
    assert found["loss"]["kl"]["weight"] == 0
    assert list(found["reward"]) == ["exact", "overlong"]
    assert found["filter"] == {"accuracy_band": {"low": 0.0, "high": 1.0, "inclusive": False}}
    assert loaded.config.rollout.resample == "uninformative"


def test_prime_literal_is_prime_without_normalization(run):
    components = [run(using(name)) for name in ("prime", "prime_literal")]
    plain, literal = (one.resolved()["components"] for one in components)
    plain_model, model = (one.signal("process_rewards").params for one in components)
    assert model == {**plain_model, "every": "epoch"}
    assert [one["name"] for one in literal["transform"]] == ["process_rloo"]
    assert literal["transform"][0]["params"] == plain["transform"][0]["params"] | {"norm": "none"}
    same = plain.keys() - {"transform"}
    assert {kind: literal[kind] for kind in same} == {kind: plain[kind] for kind in same}


def test_keys_of_the_file_and_of_the_command_line_win_and_lists_replace_lists(run):
    text = '[ppo_clip]\neps_high = 0.3\n[[loss]]\nname = "cispo"\n[[loss]]\nname = "ppo_clip"\nweight = 0.5\n'
    loaded = run(using("dapo", text), "rollout.max_resample=2", "algorithm.advantage_mode=grpo")
    assert [bound.name for bound in loaded.all("loss")] == ["cispo", "ppo_clip"]
    clip = loaded.all("loss")[1].params
    assert (clip["eps_low"], clip["eps_high"], clip["weight"]) == (0.2, 0.3, 0.5)
    assert loaded.config.rollout.max_resample == 2
    assert loaded.one("advantage").name == "grpo"
    assert loaded.preset is not None
    assert loaded.preset.overridden == {
        "[algorithm] advantage_mode": "--set algorithm.advantage_mode=grpo",
        "[rollout] max_resample": "--set rollout.max_resample=2",
        "loss": f"{loaded.file}:5",
        "[ppo_clip] eps_high": f"{loaded.file}:4",
    }
    assert loaded.overrides == ["--set rollout.max_resample=2", "--set algorithm.advantage_mode=grpo"]


MINE = """
[ppo_clip]
eps_high = 0.3
[training]
minibatches = 2
"""


def test_a_file_of_the_users_own_is_a_preset_relative_to_the_file_that_names_it(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "clip.toml").write_text(MINE)
    loaded = run(using("mine/clip.toml", "[training]\nminibatches = 4\n"))
    assert loaded.all("loss")[0].params["eps_high"] == 0.3
    assert loaded.config.training.minibatches == 4
    assert [one.problem for one in loaded.warnings] == ['replaces 2 of preset "mine/clip.toml"']
    assert loaded.config.algorithm.algorithm_mode is None, "it is expanded"
    alone = tmp_path / "elsewhere" / "run.toml"
    alone.parent.mkdir()
    alone.write_text(loaded.text)
    assert load(alone).resolved() == loaded.resolved(), "the text that a run directory keeps stands alone"


def test_a_list_in_a_line_of_its_own_is_kept_as_it_is(run):
    loaded = run('rewards = [{ name = "number" }]\n' + using("dapo"))
    assert [bound.name for bound in loaded.all("reward")] == ["number"]


def test_an_algorithm_of_the_users_still_replaces_the_chain(run):
    loaded = run(using("plugins.my_algorithm.my_algorithm"))
    assert loaded.preset is None
    assert loaded.optional("algorithm") is not None


def test_explain_shows_the_expansion_and_what_was_overridden(run):
    loaded = run(using("dapo", "[ppo_clip]\neps_high = 0.3\n"))
    rows = {row["key"]: row for row in explain(loaded)["preset"]}
    assert rows["[ppo_clip] eps_high"] == {
        "key": "[ppo_clip] eps_high",
        "dapo": "0.28",
        "overridden_at": f"{loaded.file}:4",
    }
    assert rows["[algorithm] advantage_mode"]["dapo"] == '"grpo_std"'
    assert rows["[algorithm] advantage_mode"]["overridden_at"] is None


CLIP = {"[ppo_clip] eps_low": 0.2, "[ppo_clip] eps_high": 0.2}
OTHER_CLIP = {
    "dapo": {"[ppo_clip] eps_low": 0.2, "[ppo_clip] eps_high": 0.28},  # arXiv:2503.14476, clip-higher
    "gspo": {},  # arXiv:2507.18071: a ratio per sequence, with bounds of its own
    "luspo": {},  # arXiv:2602.05261: as gspo, with wider bounds
    "cispo": {},  # arXiv:2506.13585: no clip
    "sapo": {},  # arXiv:2511.20347: a gate in the place of the clip
    "gmpo": {},  # arXiv:2507.20673: bounds of the log-ratio
    "vapo": {"[ppo_clip] eps_low": 0.2, "[ppo_clip] eps_high": 0.28},  # arXiv:2504.05118: clip-higher
    "opd": {},  # arXiv:2306.13649: no clip
    "sdpo": {},  # arXiv:2601.20802: a truncated ratio
}
"""Presets whose paper has another trust region than a symmetric 0.2."""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_presets_that_are_compared_have_one_clip(name, run):
    found = run(using(name, NEEDS.get(name, ""))).preset.keys
    assert {key: found[key] for key in CLIP if key in found} == OTHER_CLIP.get(name, CLIP)
