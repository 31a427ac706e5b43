"""The audit of a policy whose every completion is enumerated, and of small runs."""

import json
from typing import Any

import pytest
import torch

from retrain.algorithms.advantages.group_baselines import grpo, rloo
from retrain.config.load import load
from retrain.functional.masked import expand
from retrain.lab.audit.credit_audit import MeasuredBatch, judge
from retrain.lab.audit.gradient_quality import quality
from retrain.lab.audit.methods import chain_of
from tests.commands import invoke
from tests.tabular_policy import STEPS, Tabular

GROUP, GROUPS = 2, 8
POLICY = Tabular()


def episodes(advantages):
    return lambda batch, index: expand(advantages(batch), batch.response_mask)


def late(batch, index):
    """Biased: the first token gets no credit."""
    return episodes(lambda one: grpo(one.rewards, one.group_ids))(batch, index) * torch.tensor([1, 0, 1, 1])


METHODS: dict[str, Any] = {
    "grpo": episodes(lambda batch: grpo(batch.rewards, batch.group_ids)),
    "rloo": episodes(lambda batch: rloo(batch.rewards, batch.group_ids)),
    "fixed baseline": episodes(lambda batch: batch.rewards - 0.7),
    "late": late,
}


def exact(method: Any):
    """(bias, noise) of a batch of GROUPS groups, from all pairs of completions."""
    pairs = torch.cartesian_prod(torch.arange(27), torch.arange(27))
    chances = POLICY.probabilities[pairs].prod(-1)
    batch = POLICY.batch(pairs.flatten(), GROUP)
    credit = method[pairs.flatten()] if isinstance(method, torch.Tensor) else method(batch, 0)
    rows = torch.einsum("nt,ntd->nd", credit[:, 1:].double(), POLICY.scores[pairs.flatten()])
    found = rows.view(-1, GROUP, rows.shape[-1]).mean(1)
    mean = chances @ found
    noise = (chances @ found.square().sum(-1) - mean @ mean) / GROUPS
    weights = POLICY.probabilities * POLICY.rewards
    true = torch.einsum("n,ntd->d", weights, POLICY.scores)
    return 1 - float(mean @ true / mean.norm() / true.norm()), float(mean @ mean / noise)


def worth(bias, noise):
    """1 / (squared bias + variance) of the gradient at its best scale."""
    cosine = 1 - bias
    return 1 / (1 / cosine**2 - 1 + 1 / (noise * cosine**2))


ORACLE = torch.cat([torch.zeros(27, 1), POLICY.advantages], 1)


@pytest.mark.slow
def test_bias_and_noise_are_those_of_the_enumeration_within_1_percent():
    count = 30_000
    drawn = POLICY.draw(count * GROUP * GROUPS, torch.Generator().manual_seed(3))
    batch = POLICY.batch(drawn, GROUP)

    def gradients(credit):
        rows = torch.einsum("nt,ntd->nd", credit[:, 1:].double(), POLICY.scores[drawn])
        return rows.view(count, GROUP * GROUPS, -1).mean(1)

    true = gradients(ORACLE[drawn])
    for name, method in {**METHODS, "oracle": ORACLE}.items():
        x = gradients(method(batch, 0) if callable(method) else method[drawn])
        found, (bias, noise) = quality(x, true, x.square().sum(-1)), exact(method)
        assert found.bias[0].item() == pytest.approx(bias, abs=0.01), name
        assert found.noise[0].item() == pytest.approx(noise, rel=0.01), name
    assert exact(METHODS["rloo"])[0] == pytest.approx(0, abs=1e-9)
    assert exact(METHODS["fixed baseline"])[0] == pytest.approx(0, abs=1e-9)
    assert exact(late)[0] > 0.02


def measured(count, continuations):
    """Batches whose truth is measured by halves of so many continuations."""
    generator, found = torch.Generator().manual_seed(5), []
    for _index in range(count):
        batch = POLICY.batch(POLICY.draw(GROUP * GROUPS, generator), GROUP)
        halves = []
        for _ in range(2):
            chances = POLICY.values[:, :STEPS]  # rewards are 0 and 1, so a value is a probability
            counts = torch.distributions.Binomial(continuations // 2, chances).sample()
            values = torch.cat([counts / (continuations // 2), POLICY.rewards[:, None]], 1)
            words = batch.input_ids[:, 1:] @ torch.tensor([9, 3, 1])
            halves.append(torch.cat([torch.zeros(len(words), 1), values.diff(dim=1)[words]], 1))
        first, second = halves
        found.append(MeasuredBatch(batch, first, second, {"first token": batch.response_mask & (torch.arange(4) == 1)}))
    return found


def test_intervals_hold_the_truth_and_noise_of_the_continuations_is_not_the_oracles():
    torch.manual_seed(7)
    batches = measured(100, continuations=4)
    reliability, verdicts = judge(
        batches, METHODS, POLICY.gradient, lambda batch: batch.response_mask / len(batch.rewards)
    )
    base, best = worth(*exact(METHODS["grpo"])), worth(*exact(ORACLE))
    for name, method in {**METHODS, "oracle": ORACLE}.items():
        (bias, noise), one = exact(method), verdicts[name]
        own = worth(bias, noise)
        ratios = (one.effective_batch, own / base), (one.oracle_ratio, own / best)
        for figure, truth in ((one.bias, bias), (one.noise, noise), *ratios):
            assert figure.low - 1e-6 <= truth <= figure.high + 1e-6, (name, figure, truth)
    spread = (POLICY.probabilities @ POLICY.advantages.square()).mean()
    values = POLICY.values[:, :STEPS]
    errors = POLICY.probabilities @ (values * (1 - values) / 4)
    own = float(spread / (spread + (errors.sum() + errors[1:].sum()) / STEPS))
    assert reliability == pytest.approx(own, abs=0.05)
    assert verdicts["oracle"].effective_batch.low > 1.1
    assert verdicts["oracle"].oracle_ratio == (1, 1, 1)
    assert all(one.oracle_ratio.high < 1 for name, one in verdicts.items() if name != "oracle")
    credit = METHODS["grpo"](POLICY.batch(torch.arange(27).repeat_interleave(2), GROUP), 0)
    assert credit.abs().sum() == 0  # two equal completions have no advantage
    _, low, high = verdicts["grpo"].correlation
    assert low
    assert high
    assert 0 < low < high < 1
    assert verdicts["late"].where["first token"] == 0
    assert verdicts["grpo"].where["first token"] == pytest.approx(1)


PLUGIN = """
from retrain import transform

def doubled(rewards):
    return [2 * reward for reward in rewards]

def halved(ctx):
    return [[a / 2] * len(row) for a, row in zip(ctx.episode_advantages, ctx.logprobs_G)]

@transform("late_half")
def late_half(advantages, response_mask):
    place = response_mask.cumsum(-1)
    return advantages * (place > place.amax(-1, keepdim=True) / 2)
"""


@pytest.mark.slow
def test_a_run_is_audited_from_its_start_to_its_end_with_methods_of_the_users(trained, cwd):
    (cwd / "mine.py").write_text(PLUGIN)
    before = {file: file.stat().st_mtime_ns for file in trained.rglob("*") if file.name != "lock"}
    methods = "mine.doubled,mine.doubled+gtpo,grpo+mine.halved,mine.late_half,hicra,oracle"
    words = ["audit", str(trained), "--methods", methods, "--batches", "4", "--continuations", "2"]
    more = ["--latex", "audit.tex", "--trust"]
    done = invoke(*words, "--all-checkpoints", "--json", "--html", "audit.html", "--figures", "drawn", *more, code=0)
    start, end = map(json.loads, done.stdout.splitlines())
    assert list(end) == ["run", "step", "reliability", "methods"]
    assert (end["run"], start["step"], end["step"]) == (str(trained), 0, 2)
    assert set(end["methods"]) == {"grpo", *methods.split(",")}
    for one in end["methods"].values():
        assert list(one) == ["effective_batch", "of_oracle", "bias", "noise", "correlation", "of_placebo"]
        assert all(list(figure) == ["value", "low", "high"] for figure in one.values() if figure)
    with_placebo = {name for name, one in end["methods"].items() if one["of_placebo"]}
    assert with_placebo >= {"oracle", "mine.doubled+gtpo", "mine.late_half"}
    assert not with_placebo & {"grpo", "mine.doubled", "grpo+mine.halved"}
    # Half the size is the same direction with the same noise.
    assert end["methods"]["grpo+mine.halved"]["effective_batch"]["value"] == pytest.approx(1, abs=1e-3)
    assert end["methods"]["mine.doubled+gtpo"] != end["methods"]["mine.doubled"]
    drawn = {file.name for file in (cwd / "drawn").iterdir() if file.suffix == ".svg"}
    assert drawn == {"effective-batch-step-0.svg", "effective-batch-step-2.svg"}
    page = (cwd / "audit.html").read_text()
    assert "Effective batch along the run" in page
    assert page.count("<h2>Step ") == 2
    assert "mine.late_half, against its weights shuffled within each row: " in page
    tex = (cwd / "audit.tex").read_text()
    assert tex.count(r"\begin{tabular}{lrrrrr}") == 2
    assert r"mine.late\_half & " in tex
    assert {file: file.stat().st_mtime_ns for file in trained.rglob("*") if file.name != "lock"} == before


@pytest.mark.parametrize(
    ("mode", "method", "stages"),
    [
        ('"none"', "sepa", "grpo sepa gtpo"),
        ('"none"', "maxrl+gtpo_sepa", "maxrl sepa gtpo"),
        ('"none"', "sepa+gtpo", "grpo sepa gtpo"),
        ('"none"', "sepa+shuffled", "grpo sepa gtpo shuffled"),
        ('"none"', "none", "grpo"),
        ('"sepa"', "grpo+sepa+gtpo", "grpo sepa gtpo"),
        ('["gtpo", "hicra"]', "gtpo_hicra", "grpo gtpo hicra"),
    ],
)
def test_the_name_of_a_chain_is_that_of_its_stages(tmp_path, mode, method, stages):
    (tmp_path / "run.toml").write_text(f"[algorithm]\ntransform_mode = {mode}\n")
    chain = chain_of(load(tmp_path / "run.toml"), method.split("+"))
    assert " ".join(stage.name for stage in chain) == stages


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--methods", "gtpo+shuffled+shuffled"], "write shuffled once"),
        (["--methods", "gropo"], 'did you mean "grpo"'),
        (["--methods", "gtpo+grpo"], "is not an advantage or an algorithm with transforms"),
        (["--methods", "gtpo+vine"], "is not an advantage or an algorithm"),
        (["--step", "7"], "no checkpoint of step 7"),
    ],
)
def test_what_cannot_be_audited_is_said(trained, words, text):
    done = invoke("audit", str(trained), *words, code=2)
    assert text in " ".join(done.output.split())


GAME = (
    *('task.name="numbers"', "numbers.top=7", 'environment.name="guess"', "guess={top=7,guesses=3,shaping=0.5}"),
    *("environment.max_turns=3", "environment.turn_tokens=3", "training.max_tokens=8", "training.max_steps=1"),
    *('algorithm.transform_mode="turn_returns"', "eval.problems=0"),
)


@pytest.mark.slow
def test_a_run_with_an_environment_is_audited_by_replaying_its_episodes(train):
    run = train(*GAME)
    words = ["audit", str(run), "--methods", "turn_returns,vine,gigpo", "--batches", "4", "--continuations", "2"]
    first, again = (invoke(*words, "--json") for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == again.stdout
    assert set(json.loads(first.stdout)["methods"]) == {"grpo", "turn_returns", "vine", "gigpo", "oracle"}


def test_a_run_whose_environment_cannot_be_replayed_is_refused_before_anything_is_sampled(train, tmp_path):
    (tmp_path / "remote.py").write_text(REMOTE)
    game = ('environment.name="remote.remote"', "training.max_steps=0", "warmup.steps=0")
    run = train(*GAME, "guess={}", f'plugins.search_paths=["{tmp_path}"]', *game)
    done = invoke("audit", str(run), "--trust", "--batches", "1000000", code=2)
    assert 'environment "remote.remote" cannot be replayed' in " ".join(done.output.split())


REMOTE = """
from retrain import environment

@environment("remote", replay=False)
def remote(answer):
    yield None
    return 1.0
"""
