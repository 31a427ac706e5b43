"""The registry of metrics names what the code writes, and knows which metrics a run reports."""

import re

import pytest

from retrain.config.load import load
from retrain.config.reported_metrics import metric_problem, reported_metrics
from retrain.metrics import find_metric, metrics

PLUGIN = """
from retrain import loss

@loss("gated"{trait})
def gated(logprobs, advantages):
    return -logprobs * advantages, {{"gated/open": advantages}}
"""


def configured(folder, text="", *overrides):
    (folder / "run.toml").write_text(f'[plugins]\nsearch_paths = ["{folder}"]\n{text}')
    loaded = load(folder / "run.toml", overrides)
    return loaded


def test_seven_metrics_come_first_and_say_how_to_read_them():
    first = [metric for metric in metrics().values() if metric.first]
    assert len(first) == 7
    assert all(metric.reading and metric.title for metric in first)


@pytest.mark.parametrize(
    ("logged", "name"),
    [
        ("loss/kl", "loss/kl"),
        ("loss/plugins.my_mix.my_sft", "loss/{loss}"),
        ("reward/rubric/style", "reward/{reward}"),
        ("mismatch/kl_stale_3", "mismatch/{figure}_stale_{age}"),
        ("env/ended_done", "env/ended_{end}"),
        ("expert_2/epoch", "{source}/epoch"),
        ("nonsense", None),
        ("reward/", None),
    ],
)
def test_a_logged_name_is_found(logged, name):
    metric = find_metric(logged)
    assert (metric.name if metric else None) == name


KL = '[[loss]]\nname = "ppo_clip"\n[[loss]]\nname = "kl"\n'


@pytest.mark.parametrize(
    ("text", "has", "lacks"),
    [
        (
            "",
            {"reward/mean", "loss/ppo_clip", "policy/clip_fraction"},
            {"loss/kl", "env/turns", "sepa/lambda", "time/wait_s"},
        ),
        (KL + "weight = 0.1\n", {"loss/kl"}, set()),
        (KL + "weight = 0\n", set(), {"loss/kl"}),
        ('[[loss]]\nname = "reinforce"\n', {"loss/reinforce"}, {"loss/ppo_clip", "policy/approx_kl"}),
        (
            '[algorithm]\nalgorithm_mode = "sepa"\n',
            {"sepa/lambda", "hicra/planning_token_ratio"},
            {"hicra/advantage_shift"},
        ),
        ('[logging]\nobserve = ["planning_mask"]\n', {"hicra/planning_token_ratio"}, {"sepa/lambda"}),
        ('[environment]\nname = "calculator"\n[task]\nname = "calculator"\n', {"env/turns", "env/ended_{end}"}, set()),
        ("[rollout]\noverlap = 1\n", {"time/wait_s"}, {"rollout/in_flight"}),
        ('[[rewards]]\nname = "exact"\n[[rewards]]\nname = "overlong"\n', {"reward/exact", "reward/overlong"}, set()),
    ],
)
def test_a_run_reports_what_its_components_report(text, has, lacks, tmp_path):
    loaded = configured(tmp_path, text)
    reported = reported_metrics(loaded)
    assert has <= reported.keys()
    assert not lacks & reported.keys()
    assert all(metric_problem(name, loaded) for name in lacks)
    assert not any(metric_problem(name, loaded) for name in has)


@pytest.mark.parametrize(
    ("name", "problem", "fix"),
    [
        ("reward/meen", 'no step reports "reward/meen"', 'did you mean "reward/mean"?'),
        ("loss/kl", 'no step reports "loss/kl": the loss "kl" has weight 0', "set [kl] weight above 0"),
    ],
)
def test_an_unknown_name_is_answered(name, problem, fix, tmp_path):
    assert metric_problem(name, configured(tmp_path, KL + "weight = 0\n")) == (problem, fix)


@pytest.mark.parametrize(
    ("trait", "name", "refused"),
    [
        ("", "gated/open", False),
        ("", "gated/opne", False),  # without a declaration any name may be the plug-in's own
        ("", "reward/meen", True),
        (', metrics={"gated/open": "share of open gates"}', "gated/open", False),
        (', metrics={"gated/open": "share of open gates"}', "gated/opne", True),
    ],
)
def test_a_plug_in_declares_its_metrics(trait, name, refused, tmp_path):
    module = f"gates_{abs(hash((trait, name)))}"
    (tmp_path / f"{module}.py").write_text(PLUGIN.format(trait=trait))
    loaded = configured(tmp_path, f'[[loss]]\nname = "{module}.gated"\n')
    assert bool(metric_problem(name, loaded)) == refused
    if trait:
        assert reported_metrics(loaded)["gated/open"].meaning == "share of open gates"


def test_charts_and_components_of_the_registry_exist():
    from retrain.registry import components

    names = {component.name for component in components()}
    assert [(metric.name, use) for metric in metrics().values() for use in metric.uses if use not in names] == []
    assert all(re.fullmatch(r"[a-z_{}]+/[a-z_{}]+(/\{figure\})?", name) for name in metrics())
