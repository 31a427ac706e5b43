import json
import re
from pathlib import Path

import pytest

from retrain.config.load import load
from retrain.config.rules import RULES
from retrain.config.schema import Config
from retrain.errors import ConfigError
from retrain.registry import components
from retrain.run.before.data_checks import check_data

SHIPPED = Path(__file__).parents[2] / "configs"
CONFIGS = sorted({*SHIPPED.glob("*.toml")} - {SHIPPED / "smollm2.toml"})  # tests/run has the other recipes


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_configuration_is_valid(file, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert load(file).warnings == ()


def test_an_empty_file_is_the_default_run(loaded):
    result = loaded("")
    assert result.config.training.group_size == 8
    assert [bound.name for bound in result.components.all("loss")] == ["ppo_clip", "kl", "entropy"]
    assert result.components.optional("engine") is None
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


@pytest.mark.parametrize("inside", [True, False])
def test_completions_must_leave_room_for_a_prompt_in_the_context_of_a_local_model(loaded, tmp_path, inside):
    config = {"max_position_embeddings": 512}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"text_config": config} if inside else config))
    model = f'[model]\npath = "{tmp_path}/model"\n'
    loaded(f"{model}[training]\nmax_tokens = 511\n")
    text = f"{model}[training]\nmax_tokens = 512\n[eval]\nmax_tokens = 9000\n"
    with pytest.raises(ConfigError, match="no room for a prompt in the model's 512 positions") as caught:
        loaded(text)
    assert [problem.key for problem in caught.value.problems] == ["[training] max_tokens", "[eval] max_tokens"]


MODEL = '[model]\npath = "{path}"\n{more}\n'


@pytest.mark.parametrize(
    ("more", "warns"),
    [
        ('dtype = "bfloat16"\nrounding = "nearest"', True),
        ('dtype = "bfloat16"', False),
        ('dtype = "bfloat16"\nrounding = "nearest"\n[optimizer]\nlr = 2e-5', False),
        ('dtype = "bfloat16"\nrounding = "nearest"\n[model.lora]', False),
    ],
)
def test_updates_that_rounding_hides_are_warned_of(loaded, tmp_path, more, warns):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"dtype": "bfloat16"}')
    found = [one.key for one in loaded(MODEL.format(path=tmp_path / "model", more=more)).warnings]
    assert found == ["[model] dtype"] * warns
    (tmp_path / "model" / "config.json").write_text('{"dtype": "float32"}')
    assert not loaded(MODEL.format(path=tmp_path / "model", more=more)).warnings


@pytest.mark.parametrize("more", ['dtype = "float32"', "[model.lora]"])
def test_a_rounding_of_nothing_is_refused(loaded, more):
    with pytest.raises(ConfigError, match=r"rounding: .*round"):
        loaded(MODEL.format(path="a/b", more=f'rounding = "stochastic"\n{more}'))


def test_sections_with_mistakes_do_not_hide_other_mistakes(loaded):
    text = '[model]\npath = 3\n[[rewards]]\nweight = "x"\n[algorithm]\nuncertainty_kind = "x"\n[eval]\nevery = -1\n'
    with pytest.raises(ConfigError, match="uncertainty_kind") as caught:
        loaded(text)
    assert [problem.line for problem in caught.value.problems] == [2, 3, 4, 6, 8]


PHASES = [
    ("[eval]\npass_at = [8]\n[training]\nbacth_size = 4\nmicro_batch_tokens = 10\n", [4], ("bacth", "batch"), [2, 5]),
    ('[vllm]\nlora = "adapter"\n[eval]\nsamples = 2\npass_at = [3]\n[[rewards]]\nname = "exakt"\n', [7],
     ("exakt", "exact"), [2, 5]),
    ("[training]\ngrup_size = 6\nminibatches = 3\n", [2], ("grup", "group"), []),
]  # fmt: skip
"""TOML, the lines with mistakes in keys, what corrects those, and the lines that rules refuse then"""


@pytest.mark.parametrize(("text", "keys", "correction", "rules"), PHASES)
def test_rules_are_asked_once_the_keys_are_valid_and_then_all_of_them(loaded, text, keys, correction, rules):
    def lines(text):
        try:
            loaded(text)
        except ConfigError as error:
            return [problem.line for problem in error.problems]
        return []

    assert lines(text) == keys
    assert lines(text.replace(*correction)) == rules


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
    components = loaded(text).components
    assert [dict(bound.params) for bound in components.all("transform")] == [
        {"beta": 0.1, "per": "episode"},
        {"gain": 2.0},
        {"shift": 0.5},
    ]
    assert components.signal(f"own_column_{plugin}").params == {"scale": 3.0}


def test_mistakes_in_a_plugins_parameters_have_their_place(loaded, plugin):
    text = f"""[algorithm]
transform_mode = "mod_{plugin}.own"
[algorithm.transform_params]
gian = 2.0
"""
    with pytest.raises(ConfigError, match=r"run\.toml:4:1: \[algorithm\.transform_params\] gian: unknown key"):
        loaded(text)


def test_a_component_of_another_kind_is_refused(loaded, plugin):
    with pytest.raises(ConfigError, match="is a transform, not a advantage"):
        loaded(f'[algorithm]\nadvantage_mode = "mod_{plugin}.own"\n')


def test_a_reward_that_reads_what_no_completion_has_is_refused(loaded, tmp_path):
    (tmp_path / "odd_reward.py").write_text("def fn(completion, color):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"\[\[rewards\]\] name: .*color"):
        loaded('[[rewards]]\nname = "odd_reward.fn"\n')


def test_parameters_come_from_the_table_and_then_from_the_entry(loaded):
    text = (
        '[format]\npattern = "a"\n[[rewards]]\nname = "format"\n[[rewards]]\nname = "format"\nparams = {pattern = "b"}'
    )
    rewards = loaded(text).components.all("reward")
    assert [bound.params["pattern"] for bound in rewards] == ["a", "b"]


def test_a_loss_has_the_weight_of_its_entry_or_of_its_table_or_its_default(loaded):
    terms = '[[loss]]\nname = "ppo_clip"\nweight = 2.0\n[[loss]]\nname = "kl"\n[[loss]]\nname = "entropy"'
    text = f"[kl]\nweight = 0.5\n{terms}"
    losses = loaded(text).components.all("loss")
    assert [bound.params["weight"] for bound in losses] == [2.0, 0.5, 0.0]


def test_documented_chains_expand_to_their_stages(loaded):
    def chain(mode):
        return [bound.name for bound in loaded(f"[algorithm]\ntransform_mode = {mode}").components.all("transform")]

    assert chain('"none"') == []
    assert chain('"gtpo"') == ["gtpo"]
    assert chain('"gtpo_hicra"') == ["gtpo", "hicra"]
    assert chain('"gtpo_sepa"') == chain('"sepa"') == ["sepa", "gtpo"]
    assert chain('["hicra"]') == ["hicra"]


def test_a_sampler_that_is_not_the_trainer_is_corrected_once(loaded):
    def names(text, exact):
        """(stages before the update, corrections in it)"""
        components = loaded(text).components
        corrections = [one.name for one in components.objective(exact).corrections]
        return [one.name for one in components.stages().transforms], corrections

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
    bound = config.components.one(kind)
    assert (bound.name, bound.component.source) == (name, "entry point")
    assert bound.params == {"knob": 2.0}
    assert not config.unread


READS = {
    "return ctx.entropy_G": "reads entropy_G of its context, which has no such field; its fields: episode_advantages, ",
    "return [[x] for x in ctx.logprob_G]": 'did you mean "logprobs_G"?',
    "return ctx.rewards_G": "",
    "return ctx.entropy_G if hasattr(ctx, 'entropy_G') else ctx.logprobs_G": "",
    "try:\n        return ctx.entropy_G\n    except AttributeError:\n        return ctx.logprobs_G": "",
    "ctx.mine = ctx.rewards\n    return ctx.mine": "",
}


@pytest.mark.parametrize(("body", "says"), READS.items())
def test_a_field_that_no_context_has_is_refused(loaded, tmp_path, body, says):
    name = f"reads_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"def fn(ctx):\n    {body}\n")
    text = f'[algorithm]\ntransform_mode = "{name}.fn"\n'
    if not says:
        assert loaded(text)
        return
    with pytest.raises(ConfigError, match=r"run\.toml:2:1: \[algorithm\] transform_mode") as caught:
        loaded(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "more", "says"),
    [
        ("reward/meen", "", 'no step reports "reward/meen"; did you mean "reward/mean"'),
        ("loss/kl", "", 'the loss "kl" has weight 0; set [kl] weight above 0'),
        ("loss/kl", "[kl]\nweight = 0.1\n", ""),
        ("reward/exact", "", ""),
        ("reward/number", "", 'no step reports "reward/number"'),
        ("update/nonfinite", "", ""),
        ("eval/acuracy", "", 'no evaluation measures "eval/acuracy"; did you mean "eval/accuracy"'),
    ],
)
def test_a_run_stops_on_a_metric_that_its_steps_report(loaded, metric, more, says):
    text = f'[training]\nstop_when = {{ metric = "{metric}", above = 0.5 }}\n{more}'
    if not says:
        assert loaded(text).config.training.stop_when.metric == metric
        return
    with pytest.raises(ConfigError, match=re.escape(says)):
        loaded(text)


USERS_LOSS = """
from retrain import loss, signal

@loss("of_rows")
def of_rows(logprobs, advantages, response_mask):
    return -logprobs * advantages

@loss("of_micro_batch")
def of_micro_batch(logprobs, advantages, response_mask):
    return -logprobs * advantages / logprobs.detach()[response_mask].mean()

@signal("mean_of_step")
def mean_of_step(logprobs, response_mask):
    return float(logprobs[response_mask].mean())

@loss("of_step")
def of_step(logprobs, advantages, response_mask, mean_of_step):
    return -logprobs * advantages / mean_of_step
"""


@pytest.mark.parametrize("name", ["of_rows", "of_step", "of_micro_batch"])
def test_a_loss_that_depends_on_its_micro_batch_is_refused(loaded, tmp_path, name):
    (tmp_path / "users_loss.py").write_text(USERS_LOSS)
    result = loaded(f'[[loss]]\nname = "users_loss.{name}"\n')
    if name == "of_micro_batch":
        with pytest.raises(ConfigError, match=r"on a row depend on the other rows.*signal that reads logprobs"):
            check_data(result)
    else:
        check_data(result)
