"""Rewards in killable processes: a hang, crash or exception costs one completion, never the run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from retrain.errors import ComponentError, UserCodeError
from retrain.registry import Bound
from retrain.rewards.signatures import form_of
from retrain.rewards.worker import RewardResult, Settings, evaluate, invalid, load
from retrain.system.crew import Crew
from retrain.system.sandbox import missing
from retrain.system.worker_process import Containment, TimedWorker, WorkerLost
from retrain.types import Score, fits_float32

_logger = logging.getLogger(__name__)

_LOOSEN = "rewards run without network and home directory: [reward_pool] sandbox and readable change that"
_GRACE_S = 5.0
"""What a worker gets beyond the deadline of coroutines, which it keeps itself."""
_LONGEST = 4000
"""Characters of a worker's message."""

_RewardCall = tuple[int, Sequence[Mapping[str, Any]]]
"""(number of the reward among those of the crew, the completions that it scores at once)."""


class Entry(NamedTuple):
    """A reward of the pool.

    Attributes:
        bound, weight: the reward, and its weight in the sum; weight 0 records a part only.
        timeout_s: seconds of one of its calls, of a whole batch if it scores one; unset: those of the pool.
        concurrency: completions that a coroutine function scores at once.
        network: it runs outside the sandbox.
    """

    bound: Bound
    weight: float
    timeout_s: float | None = None
    concurrency: int = 16
    network: bool = False

    @property
    def outside(self) -> bool:
        """Whether it has the network, by its entry or by its trait `network`."""
        return self.network or bool(self.bound.component.traits.get("network"))

    def seconds(self, pool: float) -> float:
        """Its deadline: the entry's, its trait `timeout_s`, or else that of the pool."""
        return self.timeout_s or float(self.bound.component.traits.get("timeout_s", pool))


class RewardPool:
    """Scores completions with weighted rewards, each call under a deadline in another process.

    A worker runs in a sandbox (`retrain.system.sandbox`), with bounded memory, few environment variables and
    nowhere to print to, and ends with the process that made the pool. Its functions are loaded before any clock
    runs. What a worker had still to do when it is killed goes to another.

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
    ) -> None:
        entries = [Entry(*one) for one in rewards]
        self._forms = [form_of(one.bound.component) for one in entries]
        self._weights = [one.weight for one in entries]
        self._judges = [bool(one.bound.component.traits.get("correctness", True)) for one in entries]
        self.names = _unique([one.bound.name for one in entries])
        # How many completions a call takes; 0 is the whole batch.
        self._widths = [
            0 if form.batch else one.concurrency if form.later else 1
            for one, form in zip(entries, self._forms, strict=True)
        ]
        self._max_failed = max_failed
        self._told: set[str] = set()
        paths = tuple(str(path) for path in search_paths)
        self._sandboxed = workers > 0 and _sandboxed(sandbox)
        shared: dict[tuple[float, bool, bool], list[int]] = {}
        for number, (one, form) in enumerate(zip(entries, self._forms, strict=True)):
            shared.setdefault((one.seconds(timeout_s), one.outside, form.later), []).append(number)
        self._crews: list[tuple[list[int], _Crew]] = []
        for (seconds, outside, later), numbers in shared.items():
            some = [entries[number].bound for number in numbers]
            targets = tuple((self.names[k], entries[k].bound.path, entries[k].bound.arguments) for k in numbers)
            shown = tuple(str(Path(path).expanduser()) for path in (*readable, *paths, *_homes(some)))
            containment = Containment(memory_mb, self._sandboxed and not outside, shown)
            size = min(workers, 1) if later else workers  # coroutines share one loop, and a judge its rate limit
            crew = _Crew(Settings(targets, paths, seconds, later), containment, [*env, *_variables(some)], size)
            self._crews.append((numbers, crew))
        self._call_all([])  # what cannot be loaded is refused now, not at the first step

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. A later `score` starts new ones."""
        for _, crew in self._crews:
            crew.close()

    def score(self, items: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One score per item, in order. An item maps names of FIELDS to their values.

        Raises:
            UserCodeError: more than `max_failed` of the items could not be scored.
        """
        if not items:
            return []
        replies = self._call_all(items)
        scores = [self._combine(some) for some in replies]
        self._report(items, replies, scores)
        return scores

    def _call_all(self, items: Sequence[Mapping[str, Any]]) -> list[list[RewardResult]]:
        """For every item the replies of all rewards."""
        by_reward: list[list[RewardResult]] = [[] for _ in self.names]
        try:
            for numbers, crew in self._crews:
                calls = [call for place, number in enumerate(numbers) for call in self._calls(place, number, items)]
                for (place, _), found in zip(calls, crew.call_all(calls), strict=True):
                    by_reward[numbers[place]] += found
        except BaseException:
            self.close()
            raise
        return [list(some) for some in zip(*by_reward, strict=True)]

    def _calls(self, place: int, number: int, items: Sequence[Mapping[str, Any]]) -> list[_RewardCall]:
        """The calls of a reward: each with one completion, with as many as it scores at once, or with all."""
        width = self._widths[number] or max(1, len(items))
        given = [{name: item[name] for name in self._forms[number].reads} for item in items]
        return [(place, given[first : first + width]) for first in range(0, len(given), width)]

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
            if reply.status != "ok" and kind not in self._told:
                self._told.add(kind)
                _logger.warning("%s (told once)\n%s", reply.detail, reply.trace)
        failed = [index for index, score in enumerate(scores) if score.value is None]
        if len(failed) <= self._max_failed * len(items):
            return
        first = failed[0]
        trace = next((reply.trace for reply in replies[first] if reply.trace), "")
        hint = f" ({_LOOSEN})" if self._sandboxed else ""
        sample = {name: str(items[first].get(name))[:500] for name in ("completion", "answer")}
        raise UserCodeError(
            f"{len(failed)} of {len(items)} completions could not be scored, more than [reward_pool] max_failed = "
            f"{self._max_failed:g} allows; the first: {scores[first].detail}; mend the reward, or raise the limit"
            f"{hint}\n"
            f"sample: completion {sample['completion']!r}, answer {sample['answer']!r}\n{trace}"
        )


class _Crew(Crew[_RewardCall, "list[RewardResult]"]):
    """Workers that have loaded the same rewards; a reply for each completion of a call.

    Args:
        settings: what they load, and the seconds of one call.
        containment: what they are kept from. env: names of variables that they see besides the usual ones.
        size: how many; 0 calls the rewards right here, unprotected.
    """

    def __init__(self, settings: Settings, containment: Containment, env: Sequence[str], size: int) -> None:
        super().__init__(size, f" ({_LOOSEN})" if containment.sandboxed else "")
        self._settings, self._containment, self._env = settings, containment, env
        self._local = [load(*reward, settings) for reward in settings.rewards] if size == 0 else []

    def call_all(self, calls: Sequence[_RewardCall]) -> list[list[RewardResult]]:
        if self.size:
            return super().call_all(calls)
        return [_spread(evaluate(self._local[number], items), len(items)) for number, items in calls]

    def start(self) -> TimedWorker:
        seconds = self._settings.timeout_s + (_GRACE_S if self._settings.later else 0.0)
        hello = tuple(self._settings)
        return TimedWorker("a reward", "retrain.rewards.worker", hello, self._containment, self._env, seconds)

    def read(self, call: _RewardCall, answer: Any) -> list[RewardResult]:
        name = self._settings.rewards[call[0]][0]
        found = _spread([_reply(one, name) for one in answer] if isinstance(answer, list) else [], len(call[1]))
        if len(found) != len(call[1]):
            raise WorkerLost("it sent what is no reply")
        return found

    def lost(self, call: _RewardCall, status: str, detail: str) -> list[RewardResult]:
        return [RewardResult(status, detail=f"{self._settings.rewards[call[0]][0]} {detail}")] * len(call[1])

    def spent(self, result: list[RewardResult]) -> bool:
        # What fills its memory may be its own garbage.
        return any(reply.status == "error" and "MemoryError" in reply.detail for reply in result)


def _spread(found: list[RewardResult], count: int) -> list[RewardResult]:
    """A failure of a whole call is one of each completion."""
    return found * count if len(found) == 1 and found[0].status != "ok" else found


def _reply(answer: Any, name: str) -> RewardResult:
    """One answer as a reply; WorkerLost if it is not one. What runs in the worker may have written it."""
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
            raise WorkerLost("it sent what is no reply")


def _sandboxed(wanted: Literal["auto", "require", "off"]) -> bool:
    """Whether workers run in a sandbox; ComponentError if they must and cannot."""
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


def _unique(names: list[str]) -> list[str]:
    """The names, a repeated one numbered: exact, exact_2."""
    return [n if names[:i].count(n) == 0 else f"{n}_{names[:i].count(n) + 1}" for i, n in enumerate(names)]
