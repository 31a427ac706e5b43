"""Rewards in killable processes: a hang, crash or exception costs one completion, never the run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from retrain.errors import ComponentError, UserCodeError
from retrain.protocols import ALONE, Ranks
from retrain.registry import Bound, reward
from retrain.rewards.signatures import FIELDS, GROUP, form_of
from retrain.rewards.worker import RewardResult, Settings, evaluate, invalid, load, size
from retrain.system import event_loop
from retrain.system.sandbox import missing
from retrain.system.worker_pool import CallLost, WorkerPool
from retrain.system.worker_process import Containment, WorkerSpec
from retrain.types import Score, fits_float32

_logger = logging.getLogger(__name__)

_LOOSEN = "rewards run without network and home directory: [reward_pool] sandbox and readable change that"
_GRACE_S = 5.0
"""Extra seconds for a worker that enforces the deadline of coroutines itself."""
_INVALID_REPLY = "it sent an invalid reply"
_LONGEST = 4000
"""Characters of a worker's message."""

_RewardCall = tuple[int, Sequence[Mapping[str, Any]]]
"""(number of the reward among those of its workers, the completions or groups that it scores at once)."""


class Entry(NamedTuple):
    """A reward of the pool.

    Attributes:
        bound, weight: the reward, and its weight in the sum; weight 0 records a part only.
        timeout_s: seconds of one of its calls, of a whole batch if it scores one; unset: those of the pool.
        concurrency: completions, or groups of them, that a coroutine function scores at once.
        network: it runs outside the sandbox.
    """

    bound: Bound
    weight: float
    timeout_s: float | None = None
    concurrency: int = 16
    network: bool = False

    @property
    def outside(self) -> bool:
        """Return whether it may use the network, by its entry or by its trait `network`."""
        return self.network or reward.traits_of(self.bound.component).network

    def seconds(self, pool: float) -> float:
        """Its deadline: the entry's, its trait `timeout_s`, or else that of the pool."""
        return self.timeout_s or reward.traits_of(self.bound.component).timeout_s or pool


class RewardPool:
    """Scores completions with weighted rewards, each call under a deadline in another process.

    A worker runs in a sandbox (`retrain.system.sandbox`), with bounded memory, few environment variables and
    nowhere to print to, and ends with the process that made the pool. Its functions are loaded before any clock
    runs. The remaining calls of a killed worker go to another.

    Args:
        rewards: as fields of an `Entry`. Those with one deadline, and with the network or without, share workers.
        workers: processes; 0 calls the rewards right here, unprotected.
        timeout_s: wall-clock seconds for one call, where the entry says no other.
        memory_mb: what a worker may allocate; 0 for no limit.
        max_failed: share of a `score` call's completions above which failing is an error.
        sandbox: "auto" takes the sandbox where this machine has one; "require" refuses where it has none.
        env: names of environment variables that the workers see as well, besides those that a parameter of a
            reward named `*_env` names.
        readable: paths that they can read in spite of the sandbox.
        search_paths: where dotted paths are looked up, after the current directory.
        ranks: of several, rank 0 alone has workers: rewards may time out, so every rank must get the same ones.

    Raises:
        ComponentError: a reward cannot be loaded, or reads something that does not exist; no sandbox.
        UserCodeError: a reward's module breaks or hangs the worker that loads it.
    """

    def __init__(  # noqa: PLR0913 - its keyword-only parameters are its table
        self,
        rewards: Sequence[tuple[Any, ...]],
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
        max_failed: float = 0.5,
        sandbox: Literal["auto", "require", "off"] = "auto",
        env: Sequence[str] = (),
        readable: Sequence[str] = (),
        search_paths: Sequence[str | Path] = (),
        ranks: Ranks = ALONE,
    ) -> None:
        entries = [Entry(*one) for one in rewards]
        self._forms = [form_of(one.bound.component) for one in entries]
        self._weights = [one.weight for one in entries]
        self._judges = [reward.traits_of(one.bound.component).correctness for one in entries]
        self.names = unique_names([one.bound.name for one in entries])
        # Number of completions, or of groups of them, in a call; 0 is the whole batch.
        self._widths = [
            0 if form.batch else one.concurrency if form.is_async else 1
            for one, form in zip(entries, self._forms, strict=True)
        ]
        self._max_failed = max_failed
        self._reported: set[str] = set()
        paths = tuple(str(path) for path in search_paths)
        self._sandboxed = workers > 0 and _sandboxed(sandbox)
        shared: dict[tuple[float, bool, bool], list[int]] = {}
        for number, (one, form) in enumerate(zip(entries, self._forms, strict=True)):
            shared.setdefault((one.seconds(timeout_s), one.outside, form.is_async), []).append(number)
        self._scorers: list[tuple[list[int], _Scorer]] = []
        for (seconds, outside, is_async), numbers in shared.items():
            some = [entries[number].bound for number in numbers]
            targets = tuple((self.names[k], entries[k].bound.path, entries[k].bound.arguments) for k in numbers)
            shown = tuple(str(Path(path).expanduser()) for path in (*readable, *paths, *_homes(some)))
            containment = Containment(memory_mb, self._sandboxed and not outside, shown)
            size = min(workers, 1) if is_async else workers  # coroutines share one loop, and a judge its rate limit
            settings = Settings(targets, paths, seconds, is_async)
            scorer = _Scorer(settings, containment, [*env, *_variables(some)], size)
            self._scorers.append((numbers, scorer))
        self._ranks = ranks
        self._score_all([])  # Refuse a reward that cannot be loaded now, not at the first step.

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. A later `score` starts new ones."""
        for _, scorer in self._scorers:
            event_loop.run(scorer.close())

    def score(self, items: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One score per item, in order. An item maps names of FIELDS to their values.

        Items with one `group` are compared with each other; an item without it is a group of its own.

        Raises:
            UserCodeError: more than `max_failed` of the items could not be scored.
        """
        return self._score_all(items) if items else []

    def _score_all(self, items: Sequence[Mapping[str, Any]]) -> list[Score]:
        return self._ranks.on_rank0(lambda: self._score_here(items))

    def _score_here(self, items: Sequence[Mapping[str, Any]]) -> list[Score]:
        replies = self._call_all(items)
        scores = [self._combine(some) for some in replies]
        if items:
            self._report(items, replies, scores)
        return scores

    def _call_all(self, items: Sequence[Mapping[str, Any]]) -> list[list[RewardResult]]:
        """Return the replies of all rewards for every item."""
        by_item: list[dict[int, RewardResult]] = [{} for _ in items]
        calls = [
            [call for place, number in enumerate(numbers) for call in self._calls(place, number, items)]
            for numbers, _ in self._scorers
        ]

        answers = event_loop.gather(
            one.call_all([call for call, _ in some]) for (_, one), some in zip(self._scorers, calls, strict=True)
        )
        try:
            every = event_loop.run(answers)
        except BaseException:
            self.close()  # Cancelling a coroutine does not stop its worker.
            raise
        for (numbers, _), some, found in zip(self._scorers, calls, every, strict=True):
            for ((place, _), indices), results in zip(some, found, strict=True):
                for index, result in zip(indices, results, strict=True):
                    by_item[index][numbers[place]] = result
        return [[results[number] for number in range(len(self.names))] for results in by_item]

    def _calls(
        self, place: int, number: int, items: Sequence[Mapping[str, Any]]
    ) -> list[tuple[_RewardCall, list[int]]]:
        """The calls of a reward, each with the indices of its items.

        A call has one completion or group, as many as the reward scores at once, or all.
        """
        if GROUP in (reads := self._forms[number].reads):
            units = _groups(items)
            given = [{GROUP: [{k: items[i][k] for k in FIELDS if k in items[i]} for i in unit]} for unit in units]
        else:
            units = [[index] for index in range(len(items))]
            given = [{name: item[name] for name in reads} for item in items]
        width = self._widths[number] or max(1, len(given))
        return [
            ((place, given[first : first + width]), [index for unit in units[first : first + width] for index in unit])
            for first in range(0, len(given), width)
        ]

    def _combine(self, replies: Sequence[RewardResult]) -> Score:
        parts = {name: reply.value for name, reply in zip(self.names, replies, strict=True)}
        for name, reply in zip(self.names, replies, strict=True):
            parts |= {f"{name}/{key}": value for key, value in reply.parts.items()}
        failed = next((reply for reply in replies if reply.status != "ok"), None)
        if failed is not None:
            return Score(None, parts, None, cast("Any", failed.status), failed.detail)
        opinions = [(k, reply.value) for k, reply in enumerate(replies) if reply.value is not None]
        if not opinions:
            return Score(None, parts, None, "invalid", f"every reward ({', '.join(self.names)}) returned None")
        total = sum(self._weights[k] * value for k, value in opinions)
        if not fits_float32(total):
            return Score(None, parts, None, "invalid", f"the weighted sum of the rewards, {total:g}, is too large")
        verdict = next((value for k, value in opinions if self._judges[k]), opinions[0][1])
        return Score(total, parts, verdict > 0.5)

    def _report(
        self, items: Sequence[Mapping[str, Any]], replies: Sequence[Sequence[RewardResult]], scores: Sequence[Score]
    ) -> None:
        """Log each kind of failure once; raise when too many failed."""
        for reply in (reply for some in replies for reply in some):
            kind = reply.detail.partition(":")[0]
            if reply.status != "ok" and kind not in self._reported:
                self._reported.add(kind)
                _logger.warning("%s (logged once)\n%s", reply.detail, reply.trace)
        failed = [index for index, score in enumerate(scores) if score.value is None]
        if len(failed) <= self._max_failed * len(items):
            return
        first = failed[0]
        trace = next((reply.trace for reply in replies[first] if reply.trace), "")
        hint = f" ({_LOOSEN})" if self._sandboxed else ""
        sample = {name: str(items[first].get(name))[:500] for name in ("completion", "answer")}
        raise UserCodeError(
            f"{len(failed)} of {len(items)} completions could not be scored, more than [reward_pool] max_failed = "
            f"{self._max_failed:g} allows; the first: {scores[first].detail}; fix the reward, or raise the limit"
            f"{hint}\n"
            f"sample: completion {sample['completion']!r}, answer {sample['answer']!r}\n{trace}"
        )


class _Scorer:
    """Workers that have loaded the same rewards; a reply for each completion of a call.

    Args:
        settings: rewards to load, and the seconds of one call.
        containment: sandbox settings. env: names of further environment variables that workers see.
        size: how many; 0 calls the rewards in the thread that waits, unprotected.
    """

    def __init__(self, settings: Settings, containment: Containment, env: Sequence[str], size: int) -> None:
        self._settings = settings
        spec = WorkerSpec(
            what="a reward",
            module="retrain.rewards.worker",
            hello=tuple(settings),
            containment=containment,
            seconds=settings.timeout_s + (_GRACE_S if settings.is_async else 0.0),
            variables=env,
            hint=f" ({_LOOSEN})" if containment.sandboxed else "",
        )
        self._workers = WorkerPool(spec, size) if size else None
        self._local = [] if size else [load(*reward, settings) for reward in settings.rewards]

    async def call_all(self, calls: Sequence[_RewardCall]) -> list[list[RewardResult]]:
        """Return the replies of each call; a call that kills its worker gets failed replies."""
        if self._workers is None:
            return await event_loop.call_in_caller(lambda: [self._score(*call) for call in calls])
        found = await self._workers.call_all(calls, lambda index, answer: self._read(calls[index], answer), _spent)
        return [
            self._lost(call, one) if isinstance(one, CallLost) else one for call, one in zip(calls, found, strict=True)
        ]

    async def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            await self._workers.close()

    def _score(self, number: int, items: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
        return _spread(evaluate(self._local[number], items), size(items))

    def _read(self, call: _RewardCall, answer: Any) -> list[RewardResult]:
        name = self._settings.rewards[call[0]][0]
        count = size(call[1])
        found = _spread([_reply(one, name) for one in answer] if isinstance(answer, list) else [], count)
        if len(found) != count:
            raise ValueError(_INVALID_REPLY)
        return found

    def _lost(self, call: _RewardCall, lost: CallLost) -> list[RewardResult]:
        return [RewardResult(lost.kind, detail=f"{self._settings.rewards[call[0]][0]} {lost}")] * size(call[1])


def _groups(items: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the indices of the items of each group, in the order of their first items."""
    found: dict[Any, list[int]] = {}
    for index, item in enumerate(items):
        found.setdefault(item.get(GROUP, f"item {index}"), []).append(index)
    return [*found.values()]


def _spent(result: list[RewardResult]) -> bool:
    """Return whether a worker must be replaced: garbage of earlier calls may fill its memory."""
    return any(reply.status == "error" and "MemoryError" in reply.detail for reply in result)


def _spread(found: list[RewardResult], count: int) -> list[RewardResult]:
    """Repeat the failure of a whole call for each completion."""
    return found * count if len(found) == 1 and found[0].status != "ok" else found


def _reply(answer: Any, name: str) -> RewardResult:
    """Return an answer as a reply; ValueError if invalid, since untrusted code may have written it."""
    match answer:
        case ["ok", None | float() as value, dict() as parts, "", ""] if all(
            type(one) is float for one in parts.values()
        ):
            finite = all(fits_float32(one) for one in (value or 0.0, *parts.values()))
            return (
                RewardResult("ok", value, parts)
                if finite
                else invalid(name, {**parts, "score": value} if parts else value)
            )
        case [("error" | "invalid" | "timeout") as status, None, {}, str(detail), str(trace)]:
            return RewardResult(status, detail=detail[:_LONGEST], trace=trace[-_LONGEST:])
        case _:
            raise ValueError(_INVALID_REPLY)


def _sandboxed(wanted: Literal["auto", "require", "off"]) -> bool:
    """Return whether workers run in a sandbox; ComponentError if required and unavailable."""
    if wanted == "off" or not (reason := missing()):
        return wanted != "off"
    if wanted == "require":
        raise ComponentError(f"there is no sandbox for rewards on this machine: {reason}", 'use sandbox = "auto"')
    _warn_unprotected(reason)
    return False


@cache
def _warn_unprotected(reason: str) -> None:
    _logger.warning("rewards run without a sandbox, which this machine does not have: %s", reason)


def _variables(rewards: Sequence[Bound]) -> list[str]:
    """The environment variables that parameters of the rewards name."""
    return [str(bound.params[key]) for bound in rewards for key in bound.params if key.endswith("_env")]


def _homes(rewards: Sequence[Bound]) -> list[str]:
    """The folders of the rewards' modules, which need not be on the search path."""
    modules = [sys.modules.get(bound.component.target.__module__.partition(".")[0]) for bound in rewards]
    return [str(Path(file).parent) for module in modules if (file := getattr(module, "__file__", None))]


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, a repeated one numbered: exact, exact_2."""
    return [n if names[:i].count(n) == 0 else f"{n}_{names[:i].count(n) + 1}" for i, n in enumerate(names)]
