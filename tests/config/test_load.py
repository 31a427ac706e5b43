import json
from pathlib import Path

import pytest

from retrain import registry
from retrain.config.load import load
from retrain.config.rules import RULES
from retrain.config.rules.credit_rules import check_engine
from retrain.config.schema import Config
from retrain.errors import ComponentError
from retrain.registry import components

SHIPPED = Path(__file__).parents[2] / "configs"
CONFIGS = sorted({*SHIPPED.glob("*.toml")} - {SHIPPED / "smollm2.toml"})  # tests/run has the other recipes


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_configuration_is_valid(file, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert load(file).warnings == ()


def test_an_empty_file_is_the_default_run(loaded):
    result = loaded("")
    assert result.config.training.group_size == 8
    assert [bound.name for bound in result.all("loss")] == ["ppo_clip", "kl", "entropy"]
    assert result.optional("engine") is None
    assert result.warnings == ()
    assert result.name == "run"


def test_the_resolved_configuration_is_json_and_complete(loaded):
    result = loaded('[algorithm]\ntransform_mode = "gtpo"\n[gtpo]\nbeta = 0.3\n', "training.seed=7")
    resolved = json.loads(json.dumps(result.resolved()))
    assert resolved["training"]["seed"] == 7
    assert resolved["training"]["max_tokens"] == 64
    assert resolved["gtpo"] == {"beta": 0.3}
    params = {"beta": 0.3, "per": "episode"}
    assert resolved["components"]["transform"] == [{"name": "gtpo", "source": "built-in", "params": params}]


def test_every_section_with_rules_is_a_section_and_every_rule_says_what_it_demands():
    assert RULES.keys() <= Config.model_fields.keys()
    rules = [rule for several in RULES.values() for rule in several]
    assert len(rules) == len(set(rules)) > 20
    assert all(rule.__doc__ for rule in rules)


PLUGIN = """
from retrain import signal, transform

@signal("own_column_{tag}", table="own_table_{tag}")
def column(rewards, *, scale: float = 1.0):
    return rewards * scale

@transform("own_{tag}")
def own(advantages, own_column_{tag}, *, gain: float = 1.0):
    return advantages * gain

@transform("other_{tag}")
def other(advantages, *, shift: float = 0.0):
    return advantages + shift
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A file of the user's own with a transform and the signal that it reads; removed again afterwards."""
    from retrain.registry.component import REGISTERED

    monkeypatch.chdir(tmp_path)
    components()  # loads what is built in, so that it is in what is put back
    before = dict(REGISTERED)
    tag = f"t{abs(hash(tmp_path.name))}"
    (tmp_path / f"mod_{tag}.py").write_text(PLUGIN.format(tag=tag))
    yield tag
    REGISTERED.clear()
    REGISTERED.update(before)


def test_a_plugin_reads_its_slots_params_and_its_signal_its_table(loaded, plugin):
    text = f"""[algorithm]
transform_mode = ["gtpo", "mod_{plugin}.own", "mod_{plugin}:other"]
transform_params = {{gain = 2.0, shift = 0.5}}
[own_table_{plugin}]
scale = 3.0
"""
    components = loaded(text)
    assert [dict(bound.params) for bound in components.all("transform")] == [
        {"beta": 0.1, "per": "episode"},
        {"gain": 2.0},
        {"shift": 0.5},
    ]
    assert components.signal(f"own_column_{plugin}").params == {"scale": 3.0}


def test_parameters_come_from_the_table_and_then_from_the_entry(loaded):
    text = (
        '[format]\npattern = "a"\n[[rewards]]\nname = "format"\n[[rewards]]\nname = "format"\nparams = {pattern = "b"}'
    )
    rewards = loaded(text).all("reward")
    assert [bound.params["pattern"] for bound in rewards] == ["a", "b"]


def test_a_loss_has_the_weight_of_its_entry_or_of_its_table_or_its_default(loaded):
    terms = '[[loss]]\nname = "ppo_clip"\nweight = 2.0\n[[loss]]\nname = "kl"\n[[loss]]\nname = "entropy"'
    text = f"[kl]\nweight = 0.5\n{terms}"
    losses = loaded(text).all("loss")
    assert [bound.params["weight"] for bound in losses] == [2.0, 0.5, 0.0]


def test_documented_chains_expand_to_their_stages(loaded):
    def chain(mode):
        return [bound.name for bound in loaded(f"[algorithm]\ntransform_mode = {mode}").all("transform")]

    assert chain('"none"') == []
    assert chain('"gtpo"') == ["gtpo"]
    assert chain('"gtpo_hicra"') == ["gtpo", "hicra"]
    assert chain('"gtpo_sepa"') == chain('"sepa"') == ["sepa", "gtpo"]
    assert chain('["hicra"]') == ["hicra"]


def test_a_sampler_that_is_not_the_trainer_is_corrected_once(loaded):
    def names(text, exact):
        """(stages before the update, corrections in it)"""
        components = loaded(text)
        corrections = [one.name for one in components.objective(exact).corrections]
        return [stage.name for stage in components.credit[1:]], corrections

    assert names("", exact=True) == ([], [])
    assert names("", exact=False) == ([], ["tis"])
    named = "[algorithm]\ntransform_mode = ['gtpo', 'mis']"
    assert names(named, exact=False) == names(named, exact=True) == (["gtpo"], ["mis"])
    whole = "[algorithm]\nalgorithm_mode = 'plugins.my_algorithm.my_algorithm'"
    assert names(whole, exact=True) == ([], []), "an algorithm stands in place of the chain"
    assert names(whole, exact=False) == ([], ["tis"])
    within = "[algorithm]\ntransform_mode = ['tis', 'gtpo']"
    assert names(within, exact=False) == (["tis", "gtpo"], [])


ENTRY = """
def fn(rewards, *, knob: float = 1.0):
    return rewards

def plain(rewards, params):
    return [params["knob"] * reward for reward in rewards]

def context(ctx):
    return [[ctx.params["knob"]] * len(logprobs) for logprobs in ctx.logprobs_G]
"""
POINTS = """
[retrain.advantage]
entered = entry_code:fn
entered_plain = entry_code:plain
[retrain.transform]
entered_context = entry_code:context
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    from retrain.registry import lookup

    (tmp_path / "entry_code.py").write_text(ENTRY)
    (tmp_path / "entry-1.0.dist-info").mkdir()
    (tmp_path / "entry-1.0.dist-info" / "METADATA").write_text("Name: entry\nVersion: 1.0\n")
    (tmp_path / "entry-1.0.dist-info" / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    lookup._entry_points.cache_clear()
    yield
    lookup._entry_points.cache_clear()


@pytest.mark.parametrize(
    ("kind", "name", "table"),
    [
        ("advantage", "entered", "entered"),
        ("advantage", "entered_plain", "entered_plain"),
        ("advantage", "entered_plain", "algorithm.advantage_params"),
        ("transform", "entered_context", "entered_context"),
        ("transform", "entered_context", "algorithm.transform_params"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_imported_after_validation_and_read_from_its_table(loaded, kind, name, table):
    config = loaded(f'[algorithm]\n{kind}_mode = "{name}"\n[{table}]\nknob = 2.0\n')
    bound = config.one(kind)
    assert (bound.name, bound.source) == (name, "entry point")
    assert bound.params == {"knob": 2.0}
    assert not config.unread


@pytest.mark.parametrize(
    ("chain", "loss", "expected"),
    [
        ('["opsm", "mis"]', "ppo_clip", ["opsm", "mis"]),
        ('["opsm"]', "ppo_clip", ["opsm", "tis"]),
        ('["opsm"]', "ipo", ["opsm"]),
    ],
)
def test_a_correction_that_drops_tokens_stands_beside_one_that_weighs(loaded, chain, loss, expected):
    text = f'[algorithm]\ntransform_mode = {chain}\n[rollout]\noverlap = 1\n[[loss]]\nname = "{loss}"\n'
    assert [stage.name for stage in loaded(text).objective(exact=False).corrections] == expected


def test_only_engines_that_say_so_sample_beside_the_trainer():
    check_engine(registry.find("engine", "torch"))
    check_engine(registry.find("engine", "vllm-server"))
    for name in ("transformers", "vllm"):
        with pytest.raises(ComponentError, match=name):
            check_engine(registry.find("engine", name))


def test_every_key_that_depends_on_another_names_one_of_the_same_component():
    ties = [(component, key, tie) for component in components() for key, tie in component.traits.when.items()]
    assert len(ties) > 10
    for component, key, (other, values) in ties:
        assert {key, other} <= set(component.schema.model_fields), (component.name, key)
        assert values


@pytest.mark.parametrize(("steps", "count"), [(0, 0), (2, 1), (3, 0)])
def test_a_critic_that_warms_up_for_the_whole_run_is_warned_of(tmp_path, steps, count):
    file = tmp_path / "run.toml"
    file.write_text(
        f'[algorithm]\ntransform_mode = "gae"\n[critic]\nwarmup_steps = 2\n[training]\nmax_steps = {steps}\n'
    )
    warnings = load(file).warnings
    assert [warning.key for warning in warnings] == ["[critic] warmup_steps"] * count
