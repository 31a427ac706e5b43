"""Keys and values that outlive a call: the next turn of an episode computes only what is new."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from retrain.engines.embedded.decoder import SlotRows, Slots, Start
from retrain.types import Completion, Request, Sampling


class CachedPrefix(NamedTuple):
    """A context whose keys and values are in a row of a part."""

    ids: tuple[int, ...]
    part: SlotRows
    row: int


class Kept:
    """What was computed of contexts, for requests that extend them under the same weights and sampling.

    A call's contexts take the place of those that it extended, so that one call is held for each worker's share of
    the episodes. What is found depends on these calls alone, and not on those of other shares or their timing.

    Args:
        budget: bytes that one call may leave.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._sampling: Sampling | None = None
        self._calls: list[list[CachedPrefix]] = []
        self._coming: list[CachedPrefix] = []
        self._spent = 0

    def begin(self, sampling: Sampling) -> None:
        """A call with this sampling begins; what another sampling left is dropped."""
        if self._sampling != sampling:
            self._sampling, self._calls = sampling, []
        self._coming, self._spent = [], 0

    def find(self, request: Request) -> tuple[CachedPrefix, int] | None:
        """The context that shares most with a request, and how many tokens it shares; None if less than half.

        Among sorted ids one of the two neighbours has the longest common prefix.
        """
        found: list[tuple[int, CachedPrefix]] = []
        for call in self._calls if request.count == 1 else ():
            place = bisect(call, request.ids, key=attrgetter("ids"))
            found += [(_shared(one.ids, request.ids), one) for one in call[max(0, place - 1) : place + 1]]
        shared, known = max(found, key=lambda pair: pair[0], default=(0, None))
        return None if known is None or 2 * shared < len(request.ids) else (known, shared)

    def known(self, requests: Sequence[Request]) -> dict[int, tuple[CachedPrefix, int]]:
        """What is found, by the index of its request."""
        return {index: one for index, request in enumerate(requests) if (one := self.find(request)) is not None}

    def start(self, found: Sequence[tuple[CachedPrefix, int]], requests: Sequence[Request]) -> Start:
        """Fills the columns of new slots that are known of every request; the last token is left to be computed."""
        lengths = [len(request.ids) for request in requests]
        rest = max(length - min(shared, length - 1) for length, (_, shared) in zip(lengths, found, strict=True))
        return partial(_fill, [known for known, _ in found], max(lengths) - rest)

    def add(
        self,
        parts: Iterable[SlotRows],
        requests: Sequence[Request],
        completions: Sequence[Sequence[Completion]],
    ) -> None:
        """Keep what was computed of these completions, but for their last tokens, as far as the budget goes."""
        rows = [(*r.ids, *one.ids[:-1]) for r, group in zip(requests, completions, strict=True) for one in group]
        for part in parts:
            self._spent += sum(tensor.nbytes for tensor in (*part.keys, *part.values))
            if self._spent <= self._budget:
                self._coming += [CachedPrefix(rows[row], part, place) for place, row in enumerate(part.rows)]

    def end(self, extended: Iterable[CachedPrefix]) -> None:
        """The call is over: what it computed takes the place of the calls that it extended."""
        gone = {id(one) for one in extended}
        self._calls = [call for call in self._calls if gone.isdisjoint(map(id, call))]
        if self._coming:
            self._calls.append(sorted(self._coming, key=attrgetter("ids")))
        self._coming = []


def _fill(known: Sequence[CachedPrefix], used: int, slots: Slots) -> None:
    if used <= 0:
        return
    device = slots.pad.device
    for layer in zip(known[0].part.keys, known[0].part.values, strict=True):
        slots.add_layer(layer[0].transpose(-1, -2), layer[1])
    for part in {id(one.part): one.part for one in known}.values():
        mine = [index for index, one in enumerate(known) if one.part is part]
        rows, sources = (torch.tensor(some, device=device) for some in (mine, [known[index].row for index in mine]))
        shift = torch.tensor(part.pad, device=device)[sources] - slots.pad[rows]
        # Padding gets what stands at the edge: hidden, but a number.
        columns = (torch.arange(used, device=device) + shift[:, None]).clamp(0, part.values[0].shape[2] - 1)
        for layer, (keys, values) in enumerate(zip(part.keys, part.values, strict=True)):
            slots.keys[layer][rows, ..., :used] = keys[sources[:, None], :, :, columns].permute(0, 2, 3, 1)
            slots.values[layer][rows, :, :used] = values[sources[:, None], :, columns].transpose(1, 2)
    slots.used = used


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    both = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in both if a != b), min(len(one), len(other)))
