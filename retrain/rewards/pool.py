"""Pool of worker processes that compute rewards: a hang, crash or exception fails a completion, not the run."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retrain.errors import UserCodeError
from retrain.protocols import ALONE, Ranks
from retrain.registry import Component, reward
from retrain.rewards.entry import Entry, unique_names
from retrain.rewards.signatures import FIELDS, GROUP, form_of
from retrain.rewards.worker import RewardResult, Settings, evaluate, load, size
from retrain.system import event_loop
from retrain.types import Score, is_reward

if TYPE_CHECKING:
    from retrain.system.worker_pool import WorkerPool

_logger = logging.getLogger(__name__)

_GRACE_S = 5.0
"""Additional seconds before a worker with coroutines is killed, in which it enforces each coroutine's limit itself."""

_RewardCall = tuple[int, Sequence[Mapping[str, Any]]]
"""(index of the reward among those of its workers, completions or groups of completions to score)."""


class RewardPool:
    """Pool of worker processes that scores completions with a weighted sum of rewards.

    Every call has a time limit, and every worker a memory limit and few environment variables. A worker ends with the
    process that created the pool.

    Loading the rewards does not count towards the time limit of the first call. The remaining calls
    of a killed worker go to another worker.

    Args:
        rewards: fields of an `Entry` for each reward. Rewards with the same time limit and
            kind of function (coroutine or not) share workers.
        workers: number of worker processes for each such set of rewards; coroutine functions use at
            most one. 0 calls the rewards in this process, without protection.
        timeout_s: default time limit of one call, in seconds.
        memory_mb: memory limit of a worker in MB; 0 for no limit.
        max_failed: share of the completions that may fail.
        window: number of completions over which that share is taken, or those of one call if it has more.
        env: names of environment variables that the workers get, in addition to those named by
            parameters `*_env` of the rewards.
        search_paths: directories that are searched for modules, after the current directory.
        log: file for what the workers print; "" discards it.
        ranks: process group. Rank 0 computes the scores and broadcasts them, because with time limits
            ranks could compute different scores.

    Raises:
        ComponentError: a reward cannot be loaded, or reads a field that does not exist.
        UserCodeError: the module of a reward raises, hangs, or ends the worker that loads it.
    """

    def __init__(  # noqa: PLR0913 - its keyword-only parameters are its table
        self,
        rewards: Sequence[tuple[Any, ...]],
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
        max_failed: float = 0.5,
        window: int = 1,
        env: Sequence[str] = (),
        search_paths: Sequence[str | Path] = (),
        log: str = "",
        ranks: Ranks = ALONE,
    ) -> None:
        entries = [Entry(*fields) for fields in rewards]
        self._forms = [form_of(entry.bound) for entry in entries]
        self._weights = [entry.weight for entry in entries]
        self._measures_correctness = [reward.traits_of(entry.bound).correctness for entry in entries]
        self.names = unique_names([entry.bound.name for entry in entries])
        # Number of completions, or of groups, in a call; 0 for the whole batch.
        self._batch_sizes = [
            0 if form.batch else entry.concurrency if form.is_async else 1
            for entry, form in zip(entries, self._forms, strict=True)
        ]
        self._max_failed = max_failed
        self._window = window
        self._scored = 0
        self._failed = 0
        self._first_failure = ""
        self._reported: set[tuple[str, str]] = set()
        paths = tuple(str(path) for path in search_paths)
        # A worker has one time limit, and runs either coroutines or plain functions.
        shared: dict[tuple[float, bool], list[int]] = {}
        for number, (entry, form) in enumerate(zip(entries, self._forms, strict=True)):
            shared.setdefault((entry.seconds(timeout_s), form.is_async), []).append(number)
        self._worker_groups: list[tuple[list[int], _RewardWorkers]] = []
        for (seconds, is_async), numbers in shared.items():
            bounds = [entries[number].bound for number in numbers]
            targets = tuple((self.names[k], entries[k].bound.path, entries[k].bound.arguments) for k in numbers)
            size = min(workers, 1) if is_async else workers  # a judge limits its request rate within one event loop
            settings = Settings(targets, paths, seconds, is_async)
            group = _RewardWorkers(settings, memory_mb, [*env, *_variables(bounds)], size, log)
            self._worker_groups.append((numbers, group))
        self._ranks = ranks
        # All rewards are loaded now, so that errors appear before the first step.
        ranks.on_rank0(lambda: self._score_on_this_rank([]))

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. A later `score` starts new ones."""
        for _, group in self._worker_groups:
            event_loop.run(group.close())

    def score(self, items: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Return one score per item, in order.

        Args:
            items: for each completion, a mapping from names in FIELDS to values. Items with the same
                `group` belong to one prompt; a reward that compares completions scores them together.
                An item without `group` forms its own group.
        Raises:
            UserCodeError: more than `max_failed` of the last `window` items or more could not be scored.
        """
        return self._ranks.on_rank0(lambda: self._score_on_this_rank(items)) if items else []

    def _score_on_this_rank(self, items: Sequence[Mapping[str, Any]]) -> list[Score]:
        results = self._call_all(items)
        scores = [self._combine(results_of_item) for results_of_item in results]
        if items:
            self._report(items, results, scores)
        return scores

    def _call_all(self, items: Sequence[Mapping[str, Any]]) -> list[list[RewardResult]]:
        """Return the results of all rewards for every item."""
        by_item: list[dict[int, RewardResult]] = [{} for _ in items]
        calls = [
            [call for position, number in enumerate(numbers) for call in self._calls(position, number, items)]
            for numbers, _ in self._worker_groups
        ]

        answers = event_loop.gather(
            workers.call_all([call for call, _ in group_calls])
            for (_, workers), group_calls in zip(self._worker_groups, calls, strict=True)
        )
        try:
            results_by_group = event_loop.run(answers)
        except BaseException:
            self.close()  # cancelling a coroutine does not interrupt its worker
            raise
        for (numbers, _), group_calls, group_results in zip(self._worker_groups, calls, results_by_group, strict=True):
            for ((position, _), indices), results in zip(group_calls, group_results, strict=True):
                for index, result in zip(indices, results, strict=True):
                    by_item[index][numbers[position]] = result
        return [[results[number] for number in range(len(self.names))] for results in by_item]

    def _calls(
        self, position: int, number: int, items: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[_RewardCall, list[int]]]:
        """Split the items into the calls of a reward.

        Args:
            position: index of the reward within the rewards of its workers.
            number: index of the reward in the pool.
            items: the completions.
        Yields:
            Each call, with the indices of the items that it scores.
        """
        if GROUP in (reads := self._forms[number].reads):
            # A reward that compares completions sees a whole group, even if one call carries several.
            units = _groups(items)
            given = [{GROUP: [{k: items[i][k] for k in FIELDS if k in items[i]} for i in unit]} for unit in units]
        else:
            units = [[index] for index in range(len(items))]
            given = [{name: item[name] for name in reads} for item in items]
        width = self._batch_sizes[number] or max(1, len(given))
        for first in range(0, len(given), width):
            part = slice(first, first + width)
            yield (position, given[part]), [index for unit in units[part] for index in unit]

    def _combine(self, results: Sequence[RewardResult]) -> Score:
        """Compute the score of a completion from the results of all rewards."""
        parts = {name: result.value for name, result in zip(self.names, results, strict=True)}
        for name, result in zip(self.names, results, strict=True):
            parts |= {f"{name}/{key}": value for key, value in result.parts.items()}
        # One failed reward fails the completion: a sum without it would compare unlike things.
        failed = next((result for result in results if result.status != "ok"), None)
        if failed is not None:
            return Score(None, parts, None, cast("Any", failed.status), failed.detail)
        opinions = [(k, result.value) for k, result in enumerate(results) if result.value is not None]
        if not opinions:
            return Score(None, parts, None, "invalid", f"every reward ({', '.join(self.names)}) returned None")
        if not any(self._weights[k] for k, _ in opinions) and any(self._weights):
            return Score(None, parts, None, "invalid", "every reward that has a weight returned None")
        total = sum(self._weights[k] * value for k, value in opinions)
        # Each value is in range, but a large weight can take their sum out of it.
        if not is_reward(total):
            return Score(None, parts, None, "invalid", f"the weighted sum of the rewards, {total:g}, is too large")
        # A format reward must not decide whether an answer is correct, unless no reward measures correctness.
        unjudged = 0.0 if any(self._measures_correctness) else opinions[0][1]
        verdict = next((value for k, value in opinions if self._measures_correctness[k]), unjudged)
        return Score(total, parts, verdict > 0.5)

    def _report(
        self, items: Sequence[Mapping[str, Any]], results: Sequence[Sequence[RewardResult]], scores: Sequence[Score]
    ) -> None:
        """Log each kind of failure once; raise UserCodeError if the share of failed items exceeds `max_failed`."""
        for result in chain.from_iterable(results):
            # What follows a colon, or was returned, differs from completion to completion.
            kind = result.status, re.split(":| returned ", result.detail)[0]
            if result.status != "ok" and kind not in self._reported:
                self._reported.add(kind)
                _logger.warning("%s (logged once)\n%s", result.detail, result.trace)
        self._scored += len(items)
        failed = [index for index, score in enumerate(scores) if score.value is None]
        if failed and not self._failed:
            first = failed[0]
            trace = next((result.trace for result in results[first] if result.trace), "")
            sample = {name: str(items[first].get(name))[:500] for name in ("completion", "answer")}
            self._first_failure = (
                f"{scores[first].detail}; fix the reward, or raise the limit\n"
                f"sample: completion {sample['completion']!r}, answer {sample['answer']!r}\n{trace}"
            )
        self._failed += len(failed)
        # A single failure of a group of two says nothing of a step.
        if self._scored < self._window:
            return
        total_failed = self._failed
        scored = self._scored
        self._failed = 0
        self._scored = 0
        if total_failed > self._max_failed * scored:
            raise UserCodeError(
                f"{total_failed} of {scored} completions could not be scored, more than [reward_pool] max_failed = "
                f"{self._max_failed:g} allows; the first: {self._first_failure}"
            )


class _RewardWorkers:
    """Workers that have loaded the same rewards.

    Args:
        settings: the rewards, and the time limit of one call.
        memory_mb: memory limit of a worker in MB; 0 for no limit.
        env: names of environment variables that the workers get in addition to the default ones.
        size: number of workers; 0 calls the rewards in the calling thread, without protection.
        log: file for what the workers print.
    """

    def __init__(self, settings: Settings, memory_mb: int, env: Sequence[str], size: int, log: str) -> None:
        self._settings = settings
        self._workers: WorkerPool | None = None
        self._local = [] if size else [load(*reward, settings) for reward in settings.rewards]
        if not size:
            return
        from retrain.system.worker_pool import WorkerPool
        from retrain.system.worker_process import WorkerSpec

        spec = WorkerSpec(
            what="a reward",
            module="retrain.rewards.worker",
            hello=tuple(settings),
            memory_mb=memory_mb,
            seconds=settings.timeout_s + (_GRACE_S if settings.is_async else 0.0),
            variables=env,
            log=log,
        )
        self._workers = WorkerPool(spec, size)

    async def call_all(self, calls: Sequence[_RewardCall]) -> list[list[RewardResult]]:
        """Return the results of each call, one per completion. If a call ends its worker, its completions fail."""
        if self._workers is None:
            return await event_loop.call_in_caller(
                lambda: [evaluate(self._local[number], items) for number, items in calls]
            )
        answers = await self._workers.call_all(
            calls, lambda answer: [RewardResult(*fields) for fields in answer], _spent
        )
        return [
            answer
            if isinstance(answer, list)
            else [RewardResult(answer.kind, detail=f"{self._settings.rewards[number][0]} {answer}")] * size(items)
            for (number, items), answer in zip(calls, answers, strict=True)
        ]

    async def close(self) -> None:
        """Kill the workers, or close the event loops of rewards in this process. A later call starts new ones."""
        if self._workers is not None:
            await self._workers.close()
        for loaded in self._local:
            # Where they run: a loop cannot end another one in its own thread.
            await event_loop.call_in_caller(loaded.runner.close)
        self._local = [loaded._replace(runner=asyncio.Runner()) for loaded in self._local]


def _groups(items: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the indices of each group's items; groups are ordered by their first item."""
    indices: dict[Any, list[int]] = {}
    for index, item in enumerate(items):
        indices.setdefault(item.get(GROUP, f"item {index}"), []).append(index)
    return [*indices.values()]


def _spent(result: list[RewardResult]) -> bool:
    """Return True if a worker must be replaced: its memory is full, perhaps with garbage of earlier calls."""
    return any(reward_result.status == "error" and "MemoryError" in reward_result.detail for reward_result in result)


def _variables(rewards: Sequence[Component]) -> list[str]:
    """Return the names of environment variables that are values of parameters `*_env` of the rewards."""
    named = [bound.params[key] for bound in rewards for key in bound.params if key.endswith("_env")]
    return [name for names in named for name in ([names] if isinstance(names, str) else names or ())]
