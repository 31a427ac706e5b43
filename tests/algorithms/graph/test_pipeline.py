import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.algorithms.graph.pipeline import Pipeline
from retrain.algorithms.planning.planning_mask import advantage_split
from retrain.errors import ComponentError
from retrain.registry import KINDS, Component, find
from tests.algorithms.conftest import make_batch
from tests.reference import credit

pytestmark = pytest.mark.numeric

SKIPPED = ("all_correct", "all_wrong", "other")
GIVEN = frozenset({"planning_mask", "sepa_lambda"})


def component(kind, target, name=None, contract="columns", **traits):
    name = name or target.__name__
    return Component(kind, name, target, name, contract, KINDS[kind].traits(**traits), "dotted path").bind()


def pipeline(advantage="grpo", transforms=(), signals=None, given=GIVEN, *, algorithm=None, uncertainty=None, **more):
    first = algorithm or (find("advantage", advantage).bind() if isinstance(advantage, str) else advantage)
    credit = [first, *(t if isinstance(t, Component) else find("transform", t).bind() for t in transforms)]
    computed = {"uncertainty": uncertainty or find("uncertainty", "surprisal").bind()} | (signals or {})
    return Pipeline.resolve(credit, find("filter", "uninformative").bind(), computed.get, given=given, **more)


def example(**columns):
    logprobs = [[-1.0, -3.0], [-0.5], [-2.0, -1.0, -0.1], [-0.2, -0.4]]
    batch = make_batch(logprobs, [1.0, 0.0, 1.0, 1.0], [4, 4, 4, 1], **columns)
    planning = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0]]).bool()
    return batch.replace(planning_mask=planning, sepa_lambda=0.5)


def rows_of(batch):
    return [batch.advantages[i][batch.response_mask[i]].tolist() for i in range(len(batch.rewards))]


def test_a_signal_that_flags_nothing_for_ten_batches_is_reported_once():
    mask = find("signal", "planning_mask").bind()
    flags = {"planning_mask": mask, "sepa_lambda": None}
    reads = pipeline("grpo", ["hicra"], flags, given=frozenset({"sepa_lambda"}))
    none = example().replace(planning_mask=torch.zeros(4, 3, dtype=torch.bool))
    assert [reads.unmarked(none) for _ in range(9)] == [""] * 9
    assert "no planning token in 10 steps, so hicra has no effect" in reads.unmarked(none)
    assert [reads.unmarked(none) for _ in range(9)] == [""] * 9
    assert [reads.unmarked(example()) for _ in range(3)] == [""] * 3
    assert not pipeline("maxrl").unmarked(none)


def test_maxrl_sepa_gtpo_hicra_equals_the_literal_chain():
    batch, _ = pipeline("maxrl", ["sepa", "gtpo", "hicra"]).credit(example())
    episode = [*credit.maxrl([1.0, 0.0, 1.0]), *credit.maxrl([1.0])]
    for i, row in enumerate(rows_of(batch)):
        mask = batch.response_mask[i]
        planning = batch.column("planning_mask")[i][mask].tolist()
        h = credit.sepa(credit.surprisal(batch.sampler_logprobs[i][mask].tolist()), planning, 0.5)
        assert row == pytest.approx(credit.hicra(credit.gtpo(episode[i], h, 0.1), planning, 0.2), abs=1e-12)
    assert batch.advantages[~batch.response_mask].tolist() == [0.0] * 4
    # what a condition logs and what stateful signals follow is the uncertainty before pooling
    assert batch.column("uncertainty")[0].tolist() == [1.0, 3.0, 0.0]


def test_metrics_are_sums_over_the_batch_and_of_what_is_computed():
    batch, metrics = pipeline("grpo").credit(example())
    third = 1 / 3
    assert metrics.keys() == {"advantage/mean", "advantage/abs_mean"} | {f"skipped/{why}" for why in SKIPPED}
    assert metrics["skipped/all_correct"] == 1.0
    split = advantage_split(batch)
    assert split["hicra/planning_advantage_mean"] == pytest.approx(third)
    assert split["hicra/execution_advantage_mean"] == pytest.approx((2 * third - 2 * third) / 5)
    amplified, metrics = pipeline("grpo", ["hicra"]).credit(example())
    assert metrics["hicra/amplified_token_ratio"] == pytest.approx(3 / 8)
    assert metrics["hicra/advantage_shift"] == pytest.approx(0.2 * 3 * third / 8)
    assert advantage_split(amplified)["hicra/planning_advantage_mean"] == pytest.approx(1.2 * third)
    assert pipeline().informative(batch)[0].tolist() == [True, True, True, False]


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(4)), st.integers(0, 5), st.floats(-3, 3))
def test_row_order_padding_and_a_constant_reward_do_not_matter(order, extra, constant):
    plan = pipeline("grpo_std", ["sepa", "gtpo", "hicra"])
    expected = rows_of(plan.credit(example())[0])
    batch = example()
    wide = {
        name: torch.nn.functional.pad(batch.column(name), (0, extra), value=float("nan") if name[0] == "s" else 0)
        for name in ("input_ids", "attention_mask", "response_mask", "sampler_logprobs", "advantages", "planning_mask")
    }
    shifted = batch.replace(**wide, rewards=batch.rewards + constant).rows(torch.tensor(order))
    found = rows_of(plan.credit(shifted)[0])
    for position, row in enumerate(order):
        assert found[position] == pytest.approx(expected[row], abs=1e-9)


def test_expert_rows_take_no_part():
    plan = pipeline("maxrl", ["gtpo", "whiten"])
    batch = example()
    joined = make_batch(
        [[-1.0, -3.0], [-9.0] * 5, [-0.5], [-2.0, -1.0, -0.1], [-0.2, -0.4]],
        [1.0, 50.0, 0.0, 1.0, 1.0],
        [4, 4, 4, 4, 1],
    ).replace(is_expert=torch.tensor([False, True, False, False, False]), sepa_lambda=0.5)
    planning = torch.zeros(5, 5, dtype=torch.bool)
    planning[[0, 2, 3, 4], :3] = batch.column("planning_mask")
    with_expert, metrics = plan.credit(joined.replace(planning_mask=planning))
    alone, alone_metrics = plan.credit(batch)
    assert metrics == pytest.approx(alone_metrics)
    torch.testing.assert_close(with_expert.advantages[[0, 2, 3, 4], :3], alone.advantages)
    assert with_expert.advantages[1].tolist() == [0.0] * 5
    assert with_expert.column("uncertainty").shape == (5, 5)
    assert plan.informative(with_expert)[0].tolist() == [True, True, True, True, True]


def test_without_rollouts_schedules_go_on_and_the_rest_is_zero():
    def schedule(step):
        return step / 10, {"schedule": step / 10}

    def doubled(schedule):
        return 2 * schedule

    def scores(rewards, schedule):
        raise AssertionError("there is nothing to score")

    signals = {one.__name__: component("signal", one) for one in (schedule, doubled, scores)}
    plan = pipeline(signals=signals, observed=("doubled", "scores"))
    batch = example().replace(is_expert=torch.ones(4, dtype=torch.bool), step=3)
    credited, metrics = plan.credit(batch)
    assert (credited.column("schedule"), credited.column("doubled")) == (0.3, 0.6)
    assert credited.column("scores").tolist() == batch.advantages.tolist()
    assert metrics == {"schedule": 0.3}
    keep, counts = plan.informative(credited)
    assert keep.all()
    assert counts == {}


def test_filters_and_signals_that_remember_never_see_expert_rows():
    seen = []

    class Remembers:
        def __call__(self, rewards):
            return rewards

        def before(self, batch):
            seen.append(("before", batch.rewards.tolist()))
            return {"remembered": 1.0}

        def after(self, batch):
            seen.append(("after", batch.column("remembers").tolist()))
            return {}

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    plan = pipeline(signals={"remembers": component("signal", Remembers, "remembers")}, observed=("remembers",))
    plan.build({})
    batch = example().replace(is_expert=torch.tensor([False, True, False, False]))
    assert plan.before(batch) == {"remembered": 1.0}
    credited, _ = plan.credit(batch)
    plan.after(credited)
    rollouts = batch.rewards[[0, 2, 3]].tolist()
    assert seen == [("before", rollouts), ("after", rollouts)]
    wrong = credited.replace(advantages=torch.zeros_like(credited.advantages))
    keep, counts = plan.informative(wrong)
    assert keep.tolist() == [False, True, False, False]
    assert sum(counts.values()) == len(wrong.group_ids[[0, 2, 3]].unique())
    nothing = batch.replace(is_expert=torch.ones(4, dtype=torch.bool))
    assert plan.before(nothing) == plan.after(nothing) == {}
    assert len(seen) == 2


def test_signals_are_computed_once_before_their_first_reader():
    calls = []

    def base(rewards):
        calls.append("base")
        return rewards * 2, {"base/seen": 1.0}

    def planning_mask(base, response_mask):
        return response_mask & (base > 1)[:, None]

    signals = {
        "base": component("signal", base),
        "planning_mask": component("signal", planning_mask),
        "sepa_lambda": find("signal", "sepa_lambda").bind(),
    }
    plan = pipeline("grpo", ["gtpo", "hicra"], signals, frozenset(), observed=("sepa_lambda",))
    assert [stage.name for stage in plan.graph] == [
        "grpo", "surprisal", "gtpo", "base", "planning_mask", "hicra", "sepa_lambda", "uninformative",
    ]  # fmt: skip
    plan.build({"total_steps": 10})
    assert list(plan.stateful) == ["sepa_lambda"]
    batch = make_batch([[-1.0], [-2.0]], [1.0, 0.0])
    assert plan.before(batch) == {}
    credited, metrics = plan.credit(batch)
    assert plan.after(credited) == {}
    assert calls == ["base"]
    assert metrics["base/seen"] == 1.0
    assert metrics["sepa/gate_open"] == 1.0
    assert credited.column("base").tolist() == [2.0, 0.0]


def test_policy_columns_are_named_before_credit():
    assert pipeline().policy_columns == frozenset()
    assert pipeline("grpo", ["tis"]).policy_columns == {"old_logprobs"}
    entropy = find("uncertainty", "shannon_entropy").bind()
    assert pipeline(uncertainty=entropy).policy_columns == frozenset()
    assert pipeline("grpo", ["gtpo"], uncertainty=entropy).policy_columns == {"entropy"}
    assert pipeline(uncertainty=entropy, observed=("uncertainty",)).policy_columns == {"entropy"}


def test_an_unknown_column_and_a_cycle_are_named():
    def typo(advantages, planing_mask):
        return advantages

    with pytest.raises(ComponentError, match=r'"typo" reads column "planing_mask".*did you mean "planning_mask"'):
        pipeline(transforms=[component("transform", typo)])

    def a(b):
        return b

    def b(a):
        return a

    signals = {"a": component("signal", a), "b": component("signal", b)}
    with pytest.raises(ComponentError, match="a -> b -> a"):
        pipeline(signals=signals, observed=("a",))
    with pytest.raises(ComponentError, match='the run needs column "zebra"'):
        pipeline(observed=("zebra",))


def test_classes_are_built_from_the_runs_parts():
    class Scaled:
        def __init__(self, seed, *, by: float = 2.0):
            self.by = by + seed

        def __call__(self, advantages):
            return advantages * self.by

    plan = pipeline(transforms=[component("transform", Scaled, "scaled")])
    with pytest.raises(ComponentError, match="needs seed"):
        plan.build({})
    plan.build({"seed": 1})
    assert rows_of(plan.credit(example())[0])[0] == pytest.approx([1.0, 1.0])

    class Half(Scaled):
        def state_dict(self):
            return {}

    with pytest.raises(ComponentError, match="only one of state_dict and load_state_dict"):
        pipeline(transforms=[component("transform", Half, "half")]).build({"seed": 1})


def test_an_algorithm_replaces_the_advantage_and_transforms_change_its_result():
    def mine(rewards, response_mask):
        return rewards[:, None] * response_mask

    plan = pipeline(algorithm=component("algorithm", mine), transforms=["gtpo"])
    assert rows_of(plan.credit(example())[0]) != [[1, 1], [0], [1, 1, 1], [1, 1]]
    assert [stage.name for stage in plan.graph if stage.kind in ("advantage", "algorithm", "transform")] == [
        "mine",
        "gtpo",
    ]
    plan = pipeline(algorithm=component("algorithm", mine))
    assert rows_of(plan.credit(example())[0]) == [[1, 1], [0], [1, 1, 1], [1, 1]]
