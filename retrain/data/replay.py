"""Row source `replay`: replace groups whose rewards are all equal by groups of earlier steps or of another run."""

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
from retrain.system.files import NO_FILE_FIX, expanded
from retrain.system.model_paths import positions
from retrain.system.records import BadRow, checked, read_records
from retrain.types import Metrics, Observer, Rollout, State

_ROLLOUT_SCHEMA = TypeAdapter(Rollout)
_FOREIGN = -1
"""Value of `stored_at` for a group of another run."""


class StoredGroup(NamedTuple):
    """Stored group of rollouts that can be replayed.

    Attributes:
        rollouts: the rollouts, all of which have a reward.
        stored_at: the step that sampled the group; `_FOREIGN` for a group of another run.
        uses: number of times that it was replayed.
    """

    rollouts: tuple[Rollout, ...]
    stored_at: int
    uses: int = 0

    @property
    def spread(self) -> float:
        """Standard deviation of the rewards."""
        return pstdev(float(rollout.reward or 0.0) for rollout in self.rollouts)

    @property
    def tokens(self) -> int:
        """Number of tokens of the longest row, prompt and completion together."""
        return max(len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in self.rollouts)

    def state(self) -> State:
        """Return the group as JSON values."""
        return {**self._asdict(), "rollouts": [rollout.row() for rollout in self.rollouts]}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> StoredGroup:
        """Restore a group from the result of `state`."""
        rollouts = tuple(map(Rollout.of_row, state["rollouts"]))
        return cls(rollouts, int(state["stored_at"]), int(state["uses"]))


def _informative(rollouts: Iterable[Rollout]) -> dict[int, tuple[Rollout, ...]]:
    """Return the scored rollouts of every group whose rewards differ, by the number of the group."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            groups.setdefault(rollout.group, []).append(rollout)
    return {group: tuple(members) for group, members in groups.items() if len({r.reward for r in members}) > 1}


def _rollout_files(path: str) -> list[Path]:
    """Return the rollout file at a path, or the rollout files of a folder in the order of their steps."""
    folder = expanded(path)
    if folder.is_dir():
        return sorted((*folder.glob("step-*.jsonl.gz"), *folder.glob("step-*.jsonl")))
    return [folder] if folder.is_file() else []


def _no_rollouts_at(path: str) -> str:
    return f'"{path}" is neither a file of rollouts nor a folder with any'


def read_groups(path: str) -> list[StoredGroup]:
    """Read the groups whose rewards differ from a file of rollouts or a folder of such files.

    Args:
        path: the file or folder; the files of a folder are read in the order of their steps.
    Raises:
        DataError: there is no file of rollouts at the path, or it has bad rows.
    """
    files = _rollout_files(path)
    if not files:
        raise DataError(f"{_no_rollouts_at(path)}; {NO_FILE_FIX}")
    stored: list[StoredGroup] = []
    for file in files:
        groups = _informative(read_records(str(file), _rollout, " of rollouts"))
        stored += [StoredGroup(group, _FOREIGN) for group in groups.values()]
    return stored


def _rollout(line: str, row: Any) -> Rollout:
    """Parse a row of a file of rollouts; raise BadRow if it is invalid."""
    try:
        rollout = Rollout.of_row(row)
    except (AttributeError, KeyError, TypeError) as error:
        raise BadRow(f"not a rollout in the format of a run ({type(error).__name__}: {error})") from None
    rollout = checked(_ROLLOUT_SCHEMA, dataclasses.asdict(rollout))
    if len(rollout.sampler_logprobs) != len(rollout.completion_ids):
        raise BadRow(f"{len(rollout.completion_ids)} completion ids, but {len(rollout.sampler_logprobs)} log-probs")
    return rollout


def _check_bounds(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Check that groups can be replayed before they are too old."""
    if config.rollout.ahead >= params["max_staleness"]:
        ahead = config.rollout.ahead
        key = "max_staleness" if config.rollout.continuous else "overlap"
        problem = f"with [rollout] {key} = {ahead} the newest stored group is {ahead + 1} steps old"
        yield Finding(("max_staleness",), problem, f"use at least {ahead + 1}")


def _check_files(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Check that there are files of rollouts at `path`, with greedy rewards if credit subtracts them."""
    path = params["path"]
    if path is not None and not _rollout_files(path):
        yield Finding(("path",), _no_rollouts_at(path), NO_FILE_FIX, exit_code=DataError.exit_code)
    elif (
        path is not None
        and config.algorithm.advantage_mode == "remax"
        and not all(rollout.greedy is not None for group in read_groups(path) for rollout in group.rollouts)
    ):
        problem = f'"{path}" has groups without the reward of a greedy completion, which remax subtracts'
        yield Finding(("path",), problem, "use a run with remax", exit_code=DataError.exit_code)


@source("replay", brings=("rollouts",), read=("path", read_groups), check=_check_bounds, check_files=_check_files)
class Replay(RowSource):
    """Replace groups whose rewards are all equal by stored groups.

    Groups whose rewards differ are stored. A step that asked for P prompts and got I groups whose rewards differ
    replays min(P - I, floor(share * P)) stored groups, or as many as there are, and drops as many groups with equal
    rewards. Groups that were replayed least come first, among them those with the highest `priority`, and among these
    the newest. Replaying samples no completions.

    Advantages are computed again from the stored rewards. The update corrects for the weights that sampled a group. The
    default correction is `tis`, which truncates the importance ratio and is therefore biased, the more the older the
    group is. A group of this run is at most `max_staleness` optimizer steps old. Groups from `path` have no such bound.

    Args:
        size: maximum number of stored groups; a new group replaces the oldest.
        share: maximum share of a step's groups that are replaced.
        max_staleness: number of steps after which a group of this run is deleted.
        priority: "spread" prefers groups whose rewards have a large standard deviation, "recent" the newest groups.
        path: `rollouts/` of another run, or a file in it, whose groups are stored at the start. That run must have
            used the same tokenizer and the same rewards.
    Raises:
        DataError: `path` cannot be read, or was sampled with another tokenizer.
    References: Trinity-RFT, arXiv:2505.17826, and the replay buffer of TRL, which scores a group by |A| times the
        standard deviation of its rewards; here advantages are not known when a group is stored.
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
        self._size = size
        # The epsilon keeps 0.29 * 100 from becoming 28.
        self._max_replayed = int(share * prompt_count + 1e-9)
        self._max_staleness = max_staleness
        self._groups: list[StoredGroup] = []
        self._fingerprint: str | None = None
        if path is not None:
            groups = [group for group in read_groups(path) if group.tokens <= positions(model)]
            # The newest, as when a run stores its own groups.
            self._groups = groups[-size:]
            for group in groups[:1]:
                # One completion suffices: other token ids spell another text.
                if chat.decode(group.rollouts[0].completion_ids) != group.rollouts[0].text:
                    text = f"{path}: its completions were sampled with another tokenizer"
                    raise DataError(f"{text}; use a run of the same model")
            # Not the counts of uses, which change during the run.
            self._fingerprint = digest_of([group.state()["rollouts"] for group in groups])
            text = f"{path}: {len(groups)} groups with different rewards; {len(self._groups)} of them are stored"
            observe("message", {"text": text, "level": "info"})

    def take(self, step: int, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], Metrics]:
        """Replace groups of a step by stored groups, then store the step's groups whose rewards differ.

        Args:
            step: number of the step.
            rollouts: rollouts of the step.
        Returns:
            The rollouts of the step and of replayed groups, and metrics.
        """
        self._groups = [group for group in self._groups if self._age(group, step) <= self._max_staleness]
        fresh = _informative(rollouts)
        # In the order of the step, so that a resumed run drops the same groups.
        equal = [group for group in dict.fromkeys(rollout.group for rollout in rollouts) if group not in fresh]
        wanted = max(0, min(self._max_replayed, self._prompts - len(fresh)))
        chosen = sorted(range(len(self._groups)), key=self._sort_key)[:wanted]
        replaced = {*equal[: len(chosen)]}
        replayed = [self._groups[index] for index in chosen]
        ages = [self._age(group, step) for group in replayed if group.stored_at != _FOREIGN]
        for index in chosen:
            self._groups[index] = self._groups[index]._replace(uses=self._groups[index].uses + 1)
        # After the choice: a group must not be replayed in the step that sampled it.
        self._groups += [StoredGroup(group, step) for group in fresh.values()]
        self._groups = self._groups[-self._size :]
        metrics = {f"{self._label}/groups": float(len(replayed)), f"{self._label}/stored": float(len(self._groups))}
        metrics |= {f"{self._label}/staleness": fmean(ages)} if ages else {}
        rows = [rollout for rollout in rollouts if rollout.group not in replaced]
        for number, stored_group in enumerate(replayed):
            rows += (dataclasses.replace(rollout, group=number) for rollout in stored_group.rollouts)
        return rows, metrics

    def _age(self, group: StoredGroup, step: int) -> int:
        """Return the number of steps since the oldest weights that sampled a group; 0 for a group of another run."""
        # Weights of another run have no step of this one.
        return 0 if group.stored_at == _FOREIGN else step - min(rollout.weights_version for rollout in group.rollouts)

    def _sort_key(self, index: int) -> tuple[float, ...]:
        """Return the sort key of a stored group; groups with smaller keys are replayed first."""
        group = self._groups[index]
        # Least used, largest spread, newest: `-index` because new groups are appended.
        return (group.uses, -group.spread if self._priority == "spread" else 0.0, -index)

    def fingerprint(self) -> str | None:
        """Return a hash of the groups of `path`; None without a path."""
        return self._fingerprint

    def state_dict(self) -> State:
        """Return the stored groups."""
        return {"groups": [group.state() for group in self._groups]}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._groups = list(map(StoredGroup.of_state, state["groups"]))
