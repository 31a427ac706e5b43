"""What `[rollout] overlap` demands: everything that a thread does beside the trainer must leave it alone."""

from __future__ import annotations

from retrain.algorithms.graph.pipeline import Pipeline
from retrain.config.document import Document
from retrain.config.resolve import Resolved
from retrain.config.schema import Config
from retrain.errors import ComponentError
from retrain.registry import Component

_KEY = ("rollout", "overlap")


def check_overlap(config: Config, document: Document, resolved: Resolved, pipeline: Pipeline) -> None:
    """Record why batches of this configuration cannot be collected beside the update."""
    if not config.rollout.overlap:
        return
    engine, judge = resolved.optional("engine"), resolved.one("filter")
    if engine is not None:
        try:
            check_engine(engine.component)
        except ComponentError as error:
            document.refuse(_KEY, error.problem, error.fix)
    if config.reward_pool.workers == 0:
        problem = "with [reward_pool] workers = 0 rewards run beside the trainer and share its generators and signals"
        document.refuse(_KEY, problem, "use overlap = 0, or a worker")
    if config.rollout.resample != "none" and not pipeline.judges_rollouts:
        document.refuse(
            _KEY,
            f'to replace groups, "{judge.name}" reads what the policy scores, and that changes meanwhile',
            'use overlap = 0, resample = "none", or a filter of outcomes alone such as "accuracy_band"',
        )
    elif pipeline.judges_rollouts and judge.component.stateful:
        problem = f'the filter "{judge.name}" is a class: what it remembers would depend on timing'
        document.refuse(_KEY, problem, "use overlap = 0, or a function")


def check_engine(engine: Component) -> None:
    """ComponentError if an engine cannot sample while the trainer updates."""
    if not engine.traits.get("concurrent", False):
        raise ComponentError(
            f'engine "{engine.name}" shares generators or settings of the process with the '
            "trainer, and does not say that it can sample while the policy is updated",
            'use [rollout] overlap = 0, or engine = "torch" or "vllm-server"; your own says `concurrent=True`',
        )
