"""A key that nothing in the resolved run reads is a mistake, at its place and with what would read it."""

import pytest

from retrain.errors import ConfigError
from retrain.registry import components

PLUGINS = """
from retrain import transform


def context(ctx):
    return [[0.0] * len(row) for row in ctx.logprobs_G]


def by_params(rewards, params):
    return [params["scale"] * reward for reward in rewards]


@transform("scaled")
def scaled(advantages, *, scale: float = 1.0):
    return advantages * scale


@transform("shifted")
def shifted(advantages, *, shift: float = 0.0):
    return advantages + shift
"""
NOTHING = "nothing in this run reads it"
UNREAD: list[tuple[str, str, str, str, str]] = [
    ("params without a dotted transform", "[algorithm.transform_params]\nscale = 2.0", "2:1",
     "[algorithm.transform_params] scale", "only a dotted path reads this table; name one"),
    ("params beside a registered transform", '[algorithm]\ntransform_mode = "gtpo"\ntransform_params = {beta = 0.2}',
     "3:21", "[algorithm.transform_params] beta", "set it in [gtpo]"),
    ("params that no stage takes",
     '[algorithm]\ntransform_mode = ["unread_code.scaled", "unread_code.shifted"]\ntransform_params = {slide = 1.0}',
     "3:21", "[algorithm.transform_params] slide", "unread_code.scaled and unread_code.shifted do not take it"),
    ("params of an advantage that an algorithm replaces",
     '[algorithm]\nadvantage_params = {scale = 2.0}\n'
     'algorithm_mode = "unread_code.context"', "2:21", "[algorithm.advantage_params] scale", "only a dotted path"),
    ("the other HICRA's key", '[algorithm]\ntransform_mode = "hicra"\n[hicra]\nalpha = 0.3\nuse_planning_tokens = true',
     "5:1", "[hicra] use_planning_tokens", f'{NOTHING}; transform "hicra" always amplifies planning tokens'),
    ("an advantage that is not named", "[dca]\nbeta = 0.3", "2:1", "[dca] beta", 'or "dca_rloo", or remove'),
    ("the rate of a model that does not learn",
     '[algorithm]\ntransform_mode = ["process_rloo"]\n[prime]\nupdate = "none"\nreference = "policy"\nlr = 1e-5',
     "6:1", "[prime] lr", 'update = "none" does not read it; remove one of the two'),
    ("a weight in two places", '[kl]\nweight = 0.2\n[[loss]]\nname = "ppo_clip"\n[[loss]]\nname = "kl"\nweight = 0.1',
     "2:1", "[kl] weight", 'the entry that names "kl" sets it as well; keep one of the two'),
    ("a task's key beside the task", '[task]\nname = "jsonl"\nparams = {path = "x.jsonl", max_bad_fraction = 0.1}',
     "3:29", "[task.params] max_bad_fraction", 'on_bad_row = "error" does not read it'),
    ("the automatic schedule", '[algorithm]\ntransform_mode = "gtpo_sepa"\n[sepa]\nwarmup_steps = 9', "4:1",
     "[sepa] warmup_steps", 'schedule = "linear" does not read it'),
    ("a correction that the engine does not need", "[tis]\ncap = 3.0", "2:1", "[tis] cap", '"tis", or remove'),
]  # fmt: skip
"""(what, TOML, line:column, key, problem and fix)"""

READ = [
    '[algorithm]\ntransform_mode = "unread_code.context"\n[gtpo]\nbeta = 0.3\n[hicra]\nalpha = 0.3',
    '[algorithm]\nadvantage_mode = "unread_code.by_params"\n[algorithm.advantage_params]\nscale = 2.0',
    '[algorithm]\ntransform_mode = ["unread_code.scaled", "unread_code.shifted"]\n'
    "[algorithm.transform_params]\nscale = 2.0\nshift = 1.0",
    '[algorithm]\ntransform_mode = "unread_code.scaled"\n[scaled]\nscale = 2.0',
    '[algorithm]\ntransform_mode = "hicra_entropy"\n[hicra]\nuse_planning_tokens = true\nalpha = 0.3',
    '[logging]\nobserve = ["sepa_lambda"]\n[sepa]\nsteps = 9\n[planning]\nlog_semantic_entropy = false',
    '[tis]\ncap = 3.0\n[rollout]\nengine = "transformers"',
    '[tis]\ncap = 3.0\n[transformers]\nmax_rows = 8\n[torch]\nmemory_mb = 64\n[model]\npath = "some/model"',
]


@pytest.fixture(autouse=True)
def files(tmp_path):
    (tmp_path / "unread_code.py").write_text(PLUGINS)
    (tmp_path / "x.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')


def refused(loaded, text, *overrides):
    with pytest.raises(ConfigError, match=r"read|take|sets it") as caught:
        loaded(text, *overrides)
    return list(map(str, caught.value.problems))


@pytest.mark.parametrize(("text", "place", "key", "says"), [row[1:] for row in UNREAD], ids=[row[0] for row in UNREAD])
def test_it_is_refused_where_it_stands(loaded, text, place, key, says):
    (problem,) = refused(loaded, text)
    assert problem.startswith(f"run.toml:{place}: {key}: ")
    assert says in problem


@pytest.mark.parametrize("text", READ)
def test_what_something_reads_is_in_order(loaded, text):
    assert loaded(text).unread == {}


def test_every_key_is_named_at_once(loaded):
    algorithm = '[algorithm]\nadvantage_mode = "maxrl"\nparams = {x = 1}\n'
    text = f"[prime]\nbeta = 0.1\n[maxrl]\neps = 1e-3\n{algorithm}[dca]\nbeta = 0.0\n"
    places = [problem.split(": ")[0] for problem in refused(loaded, text)]
    assert places == ["run.toml:2:1", "run.toml:7:11", "run.toml:9:1"]


def test_an_override_that_nothing_reads(loaded):
    (problem,) = refused(loaded, "", "dca.beta=0.3")
    assert problem.startswith(f"--set dca.beta=0.3: [dca] beta: {NOTHING}")


def test_an_override_may_put_what_reads_a_key_of_the_file_out_of_use(loaded):
    text = '[algorithm]\nadvantage_mode = "dca"\n[dca]\nbeta = 0.3\n'
    assert loaded(text, "algorithm.advantage_mode=grpo").components.one("advantage").name == "grpo"
    assert loaded(text + "[maxrl]\neps = 0.1\n", "algorithm.advantage_mode=grpo").warnings == ()
    (problem,) = refused(loaded, text, "algorithm.advantage_mode=grpo", "dca.beta=0.4")
    assert problem.startswith("--set dca.beta=0.4: ")


def test_what_every_plug_in_is_shown_may_stand_in_any_file_and_is_warned_of(loaded):
    odd = loaded("[gtpo]\nbeta = 0.1\n[hicra]\nalpha = 0.2").warnings
    assert [str(one)[:25] for one in odd] == ["run.toml:2:1: [gtpo] beta", "run.toml:4:1: [hicra] alp"]
    odd = loaded("[sepa]\nsteps = 9\n[logging]\nstrategic_grams = 'let me check'").warnings
    assert [one.key for one in odd] == ["[sepa] steps", "[logging] strategic_grams"]
    assert all("[logging] observe" in one.fix for one in odd)
    (problem,) = refused(loaded, "[hicra]\nalpha = 0.2\nentropy_topk = 0.3")
    assert problem.startswith("run.toml:3:1: [hicra] entropy_topk: ")


def test_every_key_that_depends_on_another_names_one_of_the_same_component():
    ties = [(one, key, tie) for one in components() for key, tie in one.traits.when.items()]
    assert len(ties) > 10
    for component, key, (other, values) in ties:
        assert {key, other} <= set(component.schema.model_fields), (component.name, key)
        assert values
