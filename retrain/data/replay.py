"""The source `replay`: groups of earlier steps, or of another run, in place of groups whose rewards are all equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from retrain.errors import DataError
from retrain.functional.seeds import digest_of
from retrain.protocols import RowSource
from retrain.registry import Finding, source
from retrain.system.files import NO_FILE_FIX
from retrain.system.model_paths import positions
from retrain.system.records import BadRow, checked, read_records
from retrain.types import Metrics, Observer, Rollout, State

_ROLLOUT = TypeAdapter(Rollout)
_FOREIGN = -1
"""`stored_at` of a group of another run."""


class StoredGroup(NamedTuple):
    """A group that may be replayed.

    Attributes:
        rollouts: all with a reward.
        stored_at: the step that sampled it.
        uses: how often it was replayed.
    """

    rollouts: tuple[Rollout, ...]
    stored_at: int
    uses: int = 0

    @property
    def spread(self) -> float:
        """Standard deviation of its rewards."""
        return pstdev(float(one.reward or 0.0) for one in self.rollouts)

    @property
    def tokens(self) -> int:
        """Length of its longest row."""
        return max(len(one.prompt_ids) + len(one.completion_ids) for one in self.rollouts)

    def state(self) -> State:
        """The group as JSON."""
        return {**self._asdict(), "rollouts": [one.row() for one in self.rollouts]}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> StoredGroup:
        """Return what `state` gave."""
        rollouts = tuple(map(Rollout.of_row, state["rollouts"]))
        return cls(rollouts, int(state["stored_at"]), int(state["uses"]))


def _informative(rollouts: Iterable[Rollout]) -> dict[int, tuple[Rollout, ...]]:
    """Rollouts with a reward of every group in which rewards differ, by the group's number."""
    groups: dict[int, list[Rollout]] = {}
    for one in rollouts:
        if one.reward is not None:
            groups.setdefault(one.group, []).append(one)
    return {group: tuple(some) for group, some in groups.items() if len({one.reward for one in some}) > 1}


def _rollout_files(path: str) -> list[Path]:
    """The files of rollouts at a path, in the order of their steps."""
    place = Path(path).expanduser()
    if place.is_dir():
        return sorted((*place.glob("step-*.jsonl.gz"), *place.glob("step-*.jsonl")))
    return [place] if place.is_file() else []


def _no_rollouts(path: str) -> str:
    return f'"{path}" is neither a file of rollouts nor a folder with any'


def read_groups(path: str) -> list[StoredGroup]:
    """Read the groups with different rewards of a file of rollouts, or of a folder of them in the order of the steps.

    Raises:
        DataError: there is no such file, or it has bad rows.
    """
    files = _rollout_files(path)
    if not files:
        raise DataError(f"{_no_rollouts(path)}; {NO_FILE_FIX}")
    found: list[StoredGroup] = []
    for file in files:
        groups = _informative(read_records(str(file), _rollout, " of rollouts"))
        found += [StoredGroup(group, _FOREIGN) for group in groups.values()]
    return found


def _rollout(place: str, row: Any) -> Rollout:
    """A row of a file of rollouts; BadRow if it is not one."""
    try:
        found = Rollout.of_row(row)
    except (AttributeError, KeyError, TypeError) as error:
        raise BadRow(f"it is not a rollout as a run stores it ({type(error).__name__}: {error})") from None
    found = checked(_ROLLOUT, dataclasses.asdict(found))
    if len(found.sampler_logprobs) != len(found.completion_ids):
        raise BadRow(f"{len(found.completion_ids)} completion ids have {len(found.sampler_logprobs)} log-probs")
    return found


def _bounds(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """A stored group is old enough to exist and young enough to be used; what the path names is there."""
    if config.rollout.overlap >= params["max_staleness"]:
        ahead = config.rollout.overlap
        problem = f"with [rollout] overlap = {ahead} the youngest stored group is {ahead + 1} steps old"
        yield Finding(("max_staleness",), problem, f"use at least {ahead + 1}")
    if int(params["share"] * config.training.batch_size + 1e-9) < 1:
        problem = f"is less than one of the {config.training.batch_size} groups of a step"
        yield Finding(("share",), problem, "raise it, or [training] batch_size", fatal=False)


def _files(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    if params["path"] is not None and not _rollout_files(params["path"]):
        yield Finding(("path",), _no_rollouts(params["path"]), NO_FILE_FIX, exit_code=DataError.exit_code)


@source("replay", brings=("rollouts",), read=("path", read_groups), check=_bounds, check_files=_files)
class Replay(RowSource):
    """Puts stored groups in the place of groups whose rewards are all equal.

    A step that asked for P prompts and got I groups with different rewards replays min(P - I, floor(share * P)) stored
    groups, or as many as there are, and leaves out as many groups of equal rewards. No completion is sampled for them.
    Groups with different rewards are stored. Those that were replayed least come first, and among them those of the
    highest `priority`. A tie goes to the younger group.

    Credit is computed again from the stored rewards. The update corrects for the weights that sampled a group: by `tis`
    if the run names no other correction, which is truncated and therefore biased, the more the older the group.
    A group of this run is at most `max_staleness` optimizer steps old. For groups of `path` no such bound can be given:
    only the correction knows how far the weights are that sampled them.

    Args:
        size: stored groups; the oldest is given up for a new one.
        share: largest share of a step's prompts whose groups are replaced.
        max_staleness: steps after which a group of this run is given up.
        priority: "spread" prefers a large standard deviation of rewards, "recent" the youngest.
        path: `rollouts/` of another run, or a file of it, whose groups are stored at the start. It must have the
            model's tokenizer, and these rewards.
    Raises:
        DataError: `path` cannot be read, or was sampled with another tokenizer.
    References: Trinity-RFT, arXiv:2505.17826, and the replay buffer of TRL, where a group's score is |A| times the
        deviation of its rewards; here credit is not known when a group is stored.
    """

    def __init__(  # noqa: PLR0913 - parts of the run
        self,
        chat: Any,
        model: Any,
        prompt_count: int,
        label: str,
        observe: Observer,
        *,
        size: Annotated[int, Field(ge=1)] = 64,
        share: Annotated[float, Field(ge=0, le=1)] = 0.25,
        max_staleness: Annotated[int, Field(ge=1)] = 8,
        priority: Literal["spread", "recent"] = "spread",
        path: Annotated[str, Field(min_length=1)] | None = None,
    ) -> None:
        self._prompts, self._label, self._priority = prompt_count, label, priority
        self._size, self._most = size, int(share * prompt_count + 1e-9)
        self._max_staleness = max_staleness
        self._groups: list[StoredGroup] = []
        self._data: str | None = None
        if path is not None:
            groups = [one for one in read_groups(path) if one.tokens <= positions(model)]
            self._groups = groups[-size:]
            for one in groups[:1]:
                if chat.decode(one.rollouts[0].completion_ids) != one.rollouts[0].text:
                    text = f"{path}: its completions were sampled with another tokenizer"
                    raise DataError(f"{text}; replay runs of one model")
            self._data = digest_of([one.state()["rollouts"] for one in groups])
            text = f"{path}: {len(groups)} groups with different rewards; {len(self._groups)} of them are stored"
            observe("message", {"text": text, "level": "info"})

    def take(self, step: int, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], Metrics]:
        """Return the step's groups, some of which stored ones replace; then store those with different rewards."""
        self._groups = [one for one in self._groups if self._age(one, step) <= self._max_staleness]
        fresh = _informative(rollouts)
        equal = [group for group in dict.fromkeys(one.group for one in rollouts) if group not in fresh]
        wanted = max(0, min(self._most, self._prompts - len(fresh)))
        chosen = sorted(range(len(self._groups)), key=self._rank)[:wanted]
        replaced = {*equal[: len(chosen)]}
        replayed = [self._groups[index] for index in chosen]
        ages = [self._age(one, step) for one in replayed if one.stored_at != _FOREIGN]
        for index in chosen:
            self._groups[index] = self._groups[index]._replace(uses=self._groups[index].uses + 1)
        self._groups += [StoredGroup(group, step) for group in fresh.values()]
        self._groups = self._groups[-self._size :]
        metrics = {f"{self._label}/groups": float(len(replayed)), f"{self._label}/stored": float(len(self._groups))}
        metrics |= {f"{self._label}/staleness": fmean(ages)} if ages else {}
        rows = [one for one in rollouts if one.group not in replaced]
        for number, one in enumerate(replayed):
            rows += (dataclasses.replace(rollout, group=number) for rollout in one.rollouts)
        return rows, metrics

    def _age(self, group: StoredGroup, step: int) -> int:
        """Optimizer steps since the oldest weights that sampled a group; 0 for one of another run."""
        return 0 if group.stored_at == _FOREIGN else step - min(one.weights_version for one in group.rollouts)

    def _rank(self, index: int) -> tuple[float, ...]:
        """Sort key of a stored group: the first is replayed first."""
        group = self._groups[index]
        return (group.uses, -group.spread if self._priority == "spread" else 0.0, -index)

    def fingerprint(self) -> str | None:
        """Hash of the groups of `path`."""
        return self._data

    def state_dict(self) -> State:
        """The stored groups."""
        return {"groups": [one.state() for one in self._groups]}

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`."""
        self._groups = list(map(StoredGroup.of_state, state["groups"]))
