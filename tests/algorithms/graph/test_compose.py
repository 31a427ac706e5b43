import math

import pytest

from retrain import TransformOutput, compute_composable_advantages
from retrain.errors import ComponentError
from tests.reference import credit

pytestmark = pytest.mark.numeric

REWARDS = [1.0, 0.0, 1.0, 1.0]
LOGPROBS = [[-1.0, -2.0, -0.5], [-0.3], [-0.1, -0.2], [-3.0, -1.0]]
PLANNING = [[1, 0, 0], [0], [0, 1], [1, 1]]


def compose(**options):
    return compute_composable_advantages(REWARDS, LOGPROBS, PLANNING, **options)


def literal(advantage, mode, lam=0.0):
    rows = []
    for a, logprobs, planning in zip(advantage(REWARDS), LOGPROBS, PLANNING, strict=True):
        h = credit.surprisal(logprobs)
        if "sepa" in mode:
            h = credit.sepa(h, planning, lam)
        row = [a] * len(h) if mode in ("none", "hicra") else credit.gtpo(a, h, 0.1)
        rows.append(credit.hicra(row, planning, 0.2) if "hicra" in mode else row)
    return rows


@pytest.mark.parametrize("mode", ["none", "gtpo", "hicra", "sepa", "gtpo_sepa", "gtpo_hicra"])
@pytest.mark.parametrize("advantage", ["grpo", "maxrl"])
def test_every_documented_combination_in_float64(advantage, mode):
    result = compose(advantage_mode=advantage, transform_mode=mode, sepa_lambda=0.7)
    for found, want in zip(result.token_advs, literal(getattr(credit, advantage), mode, 0.7), strict=True):
        assert found == pytest.approx(want, abs=1e-9)
    assert result.stats["hicra/planning_token_ratio"] == pytest.approx(4 / 8)
    assert result.stats["sepa/plan_entropy_mean"] == pytest.approx((1.0 + 0.2 + 3.0 + 1.0) / 4)
    assert result.extra_metrics == {}


def test_strengths_and_parameters_reach_their_stage():
    assert compose(transform_mode="gtpo", gtpo_beta=0.0).token_advs == compose().token_advs
    assert compose(transform_mode="hicra", hicra_alpha=1.0).token_advs[0][0] == pytest.approx(0.5)
    kept = compose(transform_mode=["surprisal_mask"], transform_params={"rho": 0.1}).token_advs
    assert sum(value != 0 for row in kept for value in row) == 1
    assert compose(advantage_mode="grpo_std", advantage_params={"ddof": 1}).token_advs[1][0] == pytest.approx(-1.5)


def test_lengths_and_correctness_may_differ_from_tokens_and_rewards():
    by_length = compose(advantage_mode="dca", lengths_G=[10, 20, 30, 40], correct_G=[True, False, True, True])
    expected = credit.dca([True, False, True, True], [10, 20, 30, 40], 0.2, False, False)
    assert [row[0] for row in by_length.token_advs] == pytest.approx(expected, abs=1e-9)


def test_plug_ins_by_dotted_path(tmp_path, monkeypatch):
    (tmp_path / "compose_plugins.py").write_text(
        "from retrain import TransformOutput\n"
        "def doubled(rewards, params):\n    return [params.get('scale', 2.0) * r for r in rewards]\n"
        "def shaped(ctx):\n"
        "    rows = [[a * ctx.params['scale'] + ctx.step for _ in lp]\n"
        "            for a, lp in zip(ctx.episode_advantages, ctx.logprobs_G)]\n"
        "    return TransformOutput(token_advs=rows, extra_metrics={'mine': ctx.hicra_alpha})\n"
    )
    monkeypatch.chdir(tmp_path)
    assert compose(advantage_mode="compose_plugins.doubled").token_advs[0] == [2.0] * 3
    result = compose(
        advantage_mode="compose_plugins.doubled",
        advantage_params={"scale": 1.0},
        transform_mode="compose_plugins.shaped",
        transform_params={"scale": 3.0},
        step=10,
        hicra_alpha=0.5,
    )
    assert result.token_advs == [[13.0] * 3, [10.0], [13.0] * 2, [13.0] * 2]
    assert result.extra_metrics == {"mine": 0.5}
    assert TransformOutput([]).extra_metrics == {}


def test_the_kind_of_uncertainty_can_be_chosen_and_typos_are_errors():
    found = compose(transform_mode="gtpo", uncertainty_kind="predictive_variance").token_advs[2]
    h = [math.exp(lp) * (1 - math.exp(lp)) for lp in LOGPROBS[2]]
    assert found == pytest.approx(credit.gtpo(0.25, h, 0.1), abs=1e-12)
    with pytest.raises(ComponentError, match='uncertainty "shannon_entropy" reads entropy'):
        compose(transform_mode="gtpo", uncertainty_kind="shannon_entropy")
    with pytest.raises(ComponentError, match='did you mean "surprisal"'):
        compose(uncertainty_kind="suprisal")
    with pytest.raises(ComponentError, match="rhoo"):
        compose(transform_mode="surprisal_mask", transform_params={"rhoo": 0.2})
    with pytest.raises(ComponentError, match="epss"):
        compose(advantage_mode="maxrl", advantage_params={"epss": 0.2})


def test_vanilla_is_another_name_of_grpo_std():
    assert compose(advantage_mode="vanilla").token_advs == compose(advantage_mode="grpo_std").token_advs
    with pytest.raises(ComponentError, match='did you mean "vanilla"'):
        compose(advantage_mode="vanila")


def test_edges():
    assert compute_composable_advantages([], [], []).token_advs == []
    assert compute_composable_advantages([1.0, 0.0], [[], [-1.0]], [[], [0]]).token_advs == [[], [-0.5]]
    with pytest.raises(ComponentError, match='did you mean "grpo"'):
        compose(advantage_mode="gpro")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs_G": [[-1.0]]}, "logprobs_G has 1 entries for 2 rewards"),
        ({"planning_masks_G": [[0], [0, 1]]}, r"planning_masks_G\[1\] has 2 entries for 1 log-probs"),
        ({"lengths_G": [1]}, "lengths_G has 1 entries for 2 rewards"),
    ],
)
def test_lists_that_do_not_fit_together_are_named(changes, message):
    fitting = {"rewards_G": [1, 0], "logprobs_G": [[-1.0], [-2.0]], "planning_masks_G": [[0], [1]]}
    with pytest.raises(ValueError, match=message):
        compute_composable_advantages(**(fitting | changes))
