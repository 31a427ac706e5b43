import math

import numpy as np
import pytest
import torch

from retrain import AlgorithmContext, AlgorithmOutput, TransformOutput
from retrain.errors import ComponentError, UserCodeError
from retrain.registry import Component
from tests.algorithms.graph.test_pipeline import example, pipeline, rows_of

pytestmark = pytest.mark.numeric


def plain(kind, target, **params):
    contract = "lists" if kind == "advantage" else "context"
    return Component(kind, "mine", target, "mine", contract, None, "dotted path").bind(params)


def test_an_advantage_gets_one_group_as_a_list():
    seen = []

    def mine(rewards):
        seen.append(rewards)
        return [2 * r for r in rewards]

    batch, _ = pipeline(plain("advantage", mine)).credit(example())
    assert seen == [[1.0], [1.0, 0.0, 1.0]]
    assert rows_of(batch) == [[2, 2], [0], [2, 2, 2], [2, 2]]


def test_an_advantage_may_take_params():
    def mine(rewards, params):
        return [params["scale"] * r for r in rewards]

    def keyword(rewards, *, scale: float = 1.0):
        return torch.tensor(rewards) * scale

    for target in (mine, keyword):
        batch, _ = pipeline(plain("advantage", target, scale=3.0)).credit(example())
        assert rows_of(batch)[0] == [3.0, 3.0]


def test_a_context_holds_the_group_without_padding():
    seen = []

    def mine(ctx):
        seen.append(ctx)
        rows = [[a] * len(row) for a, row in zip(ctx.episode_advantages, ctx.logprobs_G, strict=True)]
        return TransformOutput(rows, {"mine/size": float(len(rows))})

    bound = plain("transform", mine, scale=2)
    batch, metrics = pipeline(transforms=[bound], hyper={"gtpo_beta": 0.3, "hicra_alpha": 0.4}).credit(example(step=7))
    group = seen[1]
    assert group.episode_advantages == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert group.logprobs_G == [[-1.0, -3.0], [-0.5], [-2.0, -1.0, -0.1]]
    assert group.planning_masks_G == [[1, 0], [0], [0, 1, 1]]
    assert (group.sepa_lambda, group.step, group.gtpo_beta, group.hicra_alpha) == (0.5, 7, 0.3, 0.4)
    assert (group.rewards, group.lengths, group.correct) == ([1, 0, 1], [2, 1, 3], [True, False, True])
    assert group.params == {"scale": 2}
    assert metrics["mine/size"] == 2.0
    assert rows_of(batch)[2] == pytest.approx([1 / 3] * 3)


def test_an_algorithm_may_read_rewards_g_and_return_an_algorithm_output():
    def mine(ctx: AlgorithmContext) -> AlgorithmOutput:
        rows = [[ctx.rewards_G[i] for _ in logprobs] for i, logprobs in enumerate(ctx.logprobs_G)]
        return AlgorithmOutput(token_advs=rows, has_stats=False, extra_metrics={"mine/rows": 1.0})

    batch, metrics = pipeline(algorithm=plain("algorithm", mine)).credit(example())
    assert rows_of(batch) == [[1, 1], [0], [1, 1, 1], [1, 1]]
    assert metrics["mine/rows"] == 1.0


@pytest.mark.parametrize("kind", ["transform", "algorithm"])
def test_a_context_plug_in_may_return_a_plain_list_of_lists(kind):
    def mine(ctx):
        return [[float(len(row))] * len(row) for row in ctx.logprobs_G]

    bound = plain(kind, mine)
    batch, _ = (pipeline(algorithm=bound) if kind == "algorithm" else pipeline(transforms=[bound])).credit(example())
    assert rows_of(batch) == [[2, 2], [1], [3, 3, 3], [2, 2]]


def test_a_context_transform_must_not_undo_earlier_stages():
    bound = plain("transform", lambda ctx: None)
    with pytest.raises(ComponentError, match="would undo gtpo"):
        pipeline(transforms=["gtpo", bound])
    pipeline(transforms=["sepa", bound, "gtpo"])


@pytest.mark.parametrize(
    ("result", "match"),
    [
        ([1.0], r"1 advantages for 3"),
        ([1.0, "x", 1.0], r"advantages\[1\] is 'x', not a number"),
        ([1.0, math.nan, 1.0], r"advantages\[1\] is nan, not a finite number"),
    ],
)
def test_an_unusable_advantage_names_function_and_group(result, match):
    def mine(rewards):
        return result if len(rewards) == 3 else [0.0]

    with pytest.raises(UserCodeError, match=f'advantage "mine", group 4: .*{match}'):
        pipeline(plain("advantage", mine)).credit(example())


@pytest.mark.parametrize(
    ("result", "match"),
    [
        ([[1.0]], "list of 3 lists"),
        (None, "NoneType instead of a TransformOutput"),
        ([1.0, 1.0, 1.0], r"token_advs\[0\] are a float"),
        (TransformOutput([[1.0, 1.0], [1.0], [1.0]]), r"1 token_advs\[2\] for 3"),
        (TransformOutput([[1.0, 1.0], [1.0], [1.0] * 3], [3]), "a list, not a dict of metrics"),
        (TransformOutput([[1.0, 1.0], [1.0], [1.0] * 3], {"a": "b"}), "metric 'a' is 'b', not a number"),
    ],
)
def test_an_unusable_transform_names_function_and_group(result, match):
    def mine(ctx):
        return result if len(ctx.logprobs_G) == 3 else TransformOutput([[0.0, 0.0]])

    with pytest.raises(UserCodeError, match=f'transform "mine", group 4: .*{match}'):
        pipeline(transforms=[plain("transform", mine)]).credit(example())


def test_an_exception_names_function_and_group():
    def mine(rewards):
        return [1 / r for r in rewards]

    with pytest.raises(UserCodeError, match='"mine", group 4: raised ZeroDivisionError') as caught:
        pipeline(plain("advantage", mine)).credit(example())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def with_lists(rewards):
    return [reward - (sum(rewards) - reward) / max(len(rewards) - 1, 1) for reward in rewards]


def with_numpy(rewards):
    values = np.asarray(rewards, dtype=np.float32)
    return values - (values.sum() - values) / max(len(values) - 1, 1)


def with_tensors(rewards, group_ids):
    advantages = torch.empty_like(rewards)
    for group in group_ids.unique():
        members = rewards[group_ids == group]
        advantages[group_ids == group] = members - (members.sum() - members) / max(len(members) - 1, 1)
    return advantages


@pytest.mark.parametrize("reward", [0.2, 1 / 3, 1e-4, 1e4])
@pytest.mark.parametrize("style", [with_lists, with_numpy, with_tensors])
def test_a_group_of_equal_rewards_has_no_credit_whatever_its_mean_rounds_to(style, reward):
    if style is with_tensors:
        bound = Component("advantage", "mine", style, "mine", "columns", None, "dotted path").bind()
    else:
        bound = plain("advantage", style)
    equal = example().replace(rewards=torch.full((4,), reward), group_ids=torch.tensor([1, 1, 1, 1]))
    credit = pipeline(bound)
    batch, metrics = credit.credit(equal)
    assert not batch.advantages.any()
    assert metrics["advantage/abs_mean"] == 0
    assert credit.informative(batch)[0].tolist() == [False] * 4
    mixed, _ = credit.credit(equal.replace(rewards=torch.tensor([reward, 0.0, reward, 0.0])))
    assert credit.informative(mixed)[0].tolist() == [True] * 4
