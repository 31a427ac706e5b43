"""Reuse of keys and values between requests of one call and between the turns of an episode."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from retrain.engines.embedded.decoder import Decoder, SlotRows, Slots, Start, prefilled
from retrain.types import Completion, Request, Sampling


class CachedPrefix(NamedTuple):
    """A cached context.

    Attributes:
        ids: its token ids.
        part: tensors that contain its keys and values.
        row: index of its row in these tensors. This is not an element of `part.rows`, which numbers
            the completions of a call.
    """

    ids: tuple[int, ...]
    part: SlotRows
    row: int


class PrefixCache:
    """Cache of keys and values for requests that extend contexts of earlier calls.

    All contexts of the cache were computed with the same weights and sampling settings. Each call of
    the engine adds its contexts, and removes those of the earlier calls that it extended. So the cache
    holds the latest call of each lane of episodes. The context of a turn extends the context of the turn
    before it, so a lookup finds the earlier context whatever other lanes call in between.

    Args:
        budget: largest size of one call's cached keys and values, in bytes.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._sampling: Sampling | None = None
        self._calls: list[list[CachedPrefix]] = []
        self._added: list[CachedPrefix] = []
        self._spent = 0

    def begin(self, sampling: Sampling) -> None:
        """Start a call; drop all contexts if the sampling settings differ from the previous call's."""
        # Another seed or temperature belongs to another step, whose contexts nobody will extend.
        if self._sampling != sampling:
            self._sampling, self._calls = sampling, []
        self._added, self._spent = [], 0

    def find(self, request: Request) -> tuple[CachedPrefix, int] | None:
        """Find the cached context that has the longest common prefix with a request.

        Only requests of one completion are looked up, such as later turns of an episode. In a sorted
        list, one of the two neighbours of the request's place has the longest common prefix.

        Returns:
            The context and the length of the prefix in tokens. None if the prefix is shorter than
            half of the request's context, or the request has several completions.
        """
        matches: list[tuple[int, CachedPrefix]] = []
        for call in self._calls if request.count == 1 else ():
            index = bisect(call, request.ids, key=attrgetter("ids"))
            matches += [(_shared(prefix.ids, request.ids), prefix) for prefix in call[max(0, index - 1) : index + 1]]
        shared, longest = max(matches, key=lambda pair: pair[0], default=(0, None))
        return None if longest is None or 2 * shared < len(request.ids) else (longest, shared)

    def known(self, requests: Sequence[Request]) -> dict[int, tuple[CachedPrefix, int]]:
        """Return the result of `find` for the requests that have one, by index."""
        return {index: prefix for index, request in enumerate(requests) if (prefix := self.find(request)) is not None}

    def add(
        self, parts: Iterable[SlotRows], requests: Sequence[Request], completions: Sequence[Sequence[Completion]]
    ) -> None:
        """Cache the keys and values of a call's completions, as far as the budget allows.

        The last token of a completion has no keys and values: it was sampled, but was not an input of
        the model.

        Args:
            parts: keys and values of the completions. Their `rows` are indices into the completions
                of all requests, in order.
            requests: requests of the call.
            completions: completions of each request.
        """
        rows = [(*r.ids, *reply.ids[:-1]) for r, group in zip(requests, completions, strict=True) for reply in group]
        for part in parts:
            # Counted even if it is over budget: a later, smaller part would be an arbitrary choice.
            self._spent += sum(tensor.nbytes for tensor in (*part.keys, *part.values))
            if self._spent <= self._budget:
                self._added += [CachedPrefix(rows[row], part, row_index) for row_index, row in enumerate(part.rows)]

    def end(self, extended: Iterable[CachedPrefix]) -> None:
        """End a call: store its contexts, and drop the earlier calls that one of its requests extended.

        Args:
            extended: cached contexts that the call extended.
        """
        gone = {id(prefix) for prefix in extended}
        self._calls = [call for call in self._calls if gone.isdisjoint(map(id, call))]
        if self._added:
            self._calls.append(sorted(self._added, key=attrgetter("ids")))
        self._added = []


def start_from(matches: Sequence[tuple[CachedPrefix, int]], requests: Sequence[Request]) -> Start:
    """Return a function that copies cached keys and values into new slots.

    It fills the leading positions that are cached for all requests. A request's last token is never copied,
    because the model must process it to return logits.

    Args:
        matches: (cached context, length of the common prefix) for each request.
        requests: the requests.
    """
    lengths = [len(request.ids) for request in requests]
    # All rows are left-padded to one width, so the row with the most left to compute decides.
    rest = max(length - min(shared, length - 1) for length, (_, shared) in zip(lengths, matches, strict=True))
    prefixes = [prefix for (prefix, _), request in zip(matches, requests, strict=True) for _ in range(request.count)]
    return partial(_fill, prefixes, max(lengths) - rest)


def longest_contexts(requests: Sequence[Request]) -> dict[int, tuple[int, ...]]:
    """Group the requests of a call whose contexts are prefixes of one another.

    A context with several different continuations belongs to the group of one of them.

    Returns:
        The longest context of the group, by index of the request. Requests without a group are left out.
    """
    longest: tuple[int, ...] = ()
    contexts: dict[int, tuple[int, ...]] = {}
    # In sorted order, a context comes directly before the contexts that start with it.
    for index in sorted(range(len(requests)), key=lambda index: requests[index].ids, reverse=True):
        ids = requests[index].ids
        longest = longest if longest[: len(ids)] == ids else ids
        contexts[index] = longest
    sharing = Counter(contexts.values())
    return {index: ids for index, ids in contexts.items() if sharing[ids] > 1}


def computed_contexts(
    decoder: Decoder, chunk: Sequence[tuple[int, ...]], contexts: Mapping[int, tuple[int, ...]], device: torch.device
) -> dict[int, CachedPrefix]:
    """Compute the keys and values of some contexts without sampling.

    Args:
        decoder: the model.
        chunk: the contexts to compute.
        contexts: the result of `longest_contexts`.
        device: device of the model.
    Returns:
        The computed context of each request whose longest context is in `chunk`, by the request's index.
    """
    part = prefilled(decoder, chunk, device)
    prefixes = {ids: CachedPrefix(ids, part, row) for row, ids in enumerate(chunk)}
    return {index: prefixes[ids] for index, ids in contexts.items() if ids in prefixes}


def _fill(prefixes: Sequence[CachedPrefix], used: int, slots: Slots) -> None:
    """Copy the first `used` columns of every row of `slots` from the row's cached context."""
    if used <= 0:
        return
    device = slots.pad.device
    for layer in zip(prefixes[0].part.keys, prefixes[0].part.values, strict=True):
        # Only shapes and dtype matter; the columns are filled below.
        slots.add_layer(layer[0].transpose(-1, -2), layer[1])
    for part in {id(prefix.part): prefix.part for prefix in prefixes}.values():
        mine = [index for index, prefix in enumerate(prefixes) if prefix.part is part]
        rows = torch.tensor(mine, device=device)
        sources = torch.tensor([prefixes[index].row for index in mine], device=device)
        shift = torch.tensor(part.pad, device=device)[sources] - slots.pad[rows]
        # Padding columns get copies of the outermost column: they are masked, but must not be NaN.
        columns = (torch.arange(used, device=device) + shift[:, None]).clamp(0, part.values[0].shape[2] - 1)
        for layer, (keys, values) in enumerate(zip(part.keys, part.values, strict=True)):
            slots.keys[layer][rows, ..., :used] = keys[sources[:, None], :, :, columns].permute(0, 2, 3, 1)
            slots.values[layer][rows, :, :used] = values[sources[:, None], :, columns].transpose(1, 2)
    slots.used = used


def _shared(ids: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    both = enumerate(zip(ids, other, strict=False))
    return next((index for index, (a, b) in both if a != b), min(len(ids), len(other)))
