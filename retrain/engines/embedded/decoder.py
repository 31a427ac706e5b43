"""Decoding loop of the embedded engine: chunks of prompts, one token per step, and a key-value cache of fixed width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from retrain.errors import EngineError
from retrain.functional.draws import draw
from retrain.functional.seeds import derive_seed
from retrain.system.event_loop import check_stop
from retrain.types import Completion, Request, Sampling

ATTENTION = "retrain_slots"
"""Name under which `slot_attention` is registered with transformers."""

Start = Callable[["Slots"], None]
"""Fills the first columns of new slots from cached keys and values."""


class Decoder(Protocol):
    """A model as `sample_chunk` uses it: `prefill` computes the prompts, `step` one token per row.

    Attributes:
        name: shown by the engine's `describe`.
        slots: cache of the current chunk.
        kind: class of the cache.
    """

    name: str
    slots: Slots
    kind: type[Slots]

    def load(self, weights: Mapping[str, Tensor]) -> None: ...

    def prefill(self, ids: Tensor, slots: Slots) -> Tensor: ...

    def step(self, tokens: Tensor) -> Tensor: ...


@torch.inference_mode()
def sample_chunk(
    decoder: Decoder, requests: Sequence[Request], sampling: Sampling, device: torch.device, start: Start | None = None
) -> tuple[Tensor, Tensor, list[SlotRows]]:
    """Sample the completions of every request.

    Args:
        decoder: the model.
        requests: the requests of the chunk.
        sampling: sampling parameters.
        device: device of the model.
        start: fills the first columns of the new slots from a cache and sets their `used`.
    Returns:
        (ids [R, S] int64, log-probs [R, S] float32, keys and values), for a total of R completions
        and the largest max_tokens S. Entries after a row's first stop id or after its max_tokens are
        undefined. Keys and values are those of all tokens but each row's last one if the sampling is
        continued, else empty.
    """
    ids, pad = left_padded([request.ids for request in requests], device)
    counts = torch.tensor([request.count for request in requests], device=device)
    # All random numbers are drawn in advance and on the CPU, so that a row depends neither on the
    # length of other rows nor on the device.
    uniform = uniforms(requests, sampling.seed).to(device)
    longest, count = uniform.shape
    budget = torch.tensor([request.max_tokens for request in requests], device=device).repeat_interleave(counts)
    stops = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)
    out = torch.zeros(count, longest, dtype=torch.long, device=device)
    logprobs = torch.zeros(count, longest, device=device)
    done = torch.zeros(count, dtype=torch.bool, device=device)
    slots = decoder.kind(pad, counts, ids.shape[1] + longest, sampling.continued)
    if start is not None:
        start(slots)
    logits = decoder.prefill(ids[:, slots.used :], slots).repeat_interleave(counts, 0)
    for step in range(longest):
        check_stop()
        tokens, chosen = draw(logits, uniform[step], sampling.temperature, sampling.top_k, sampling.top_p)
        out[slots.rows, step], logprobs[slots.rows, step] = tokens, chosen
        done |= torch.isin(tokens, stops) | (budget[slots.rows] == step + 1)
        running = len(done) - int(done.sum())
        if running == 0:
            break
        # Moving keys and values takes time, so finished rows are not removed one by one.
        if running <= slots.compact_below * len(done):
            rows = packed(done, running)
            tokens, done, uniform = tokens[rows], done[rows], uniform[:, rows]
            slots.keep(rows)
        logits = decoder.step(tokens)
    return out, logprobs, slots.left()


@torch.inference_mode()
def prefilled(decoder: Decoder, contexts: Sequence[Sequence[int]], device: torch.device) -> SlotRows:
    """Compute the keys and values of contexts, one row per context."""
    ids, pad = left_padded(contexts, device)
    slots = decoder.kind(pad, torch.ones_like(pad), ids.shape[1], leaves=True)
    decoder.prefill(ids, slots)
    (rows,) = slots.left()
    return rows


def uniforms(requests: Sequence[Request], seed: int) -> Tensor:
    """Draw one uniform number for every token that could be sampled.

    Every request uses a generator seeded with its stream, so its numbers depend neither on the
    other requests nor on which rows have finished.

    Returns:
        [S, R] float32 in [0, 1 - 2^-22], for the largest max_tokens S and R completions. The upper
        bound stays below 1 even after a float32 product with the sum of the probabilities, so that
        a token of probability 0 is never drawn.
    """
    longest = max(request.max_tokens for request in requests)
    table = torch.zeros(longest, sum(request.count for request in requests))
    first = 0
    for request in requests:
        generator = torch.Generator().manual_seed(derive_seed(seed, "prompt", request.stream))
        drawn = torch.rand(request.max_tokens, request.count, generator=generator)
        table[: request.max_tokens, first : first + request.count] = drawn
        first += request.count
    return table.mul_(1 - 2**-22)


def packed(done: Tensor, running: int) -> Tensor:
    """Return the indices of the unfinished rows, [running] int64, in an order that moves few of them.

    Unfinished rows among the first `running` stay in place; those after them replace finished ones.
    Moving a row means moving its keys and values.
    """
    rows = torch.arange(running, device=done.device)
    rows[done[:running]] = (~done[running:]).nonzero()[:, 0] + running
    return rows


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return prompts as ids [B, P], left-padded with 0, and the number of padding columns [B]."""
    width = max(len(prompt) for prompt in prompts)
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    pad = [width - len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(pad, device=device)


def completions(
    ids: Tensor, logprobs: Tensor, requests: Sequence[Request], sampling: Sampling, version: int
) -> list[list[Completion]]:
    """Convert rows [R, S] to completions, one list per request.

    A completion ends after its first stop id or at its request's max_tokens.

    Raises:
        EngineError: a log-prob is NaN, because weights are not finite.
    """
    stops = torch.tensor(sampling.stop_ids, dtype=torch.long, device=ids.device)
    stopped = torch.isin(ids, stops)
    # A row without a stop id gets a number beyond its end.
    first = torch.where(stopped.any(-1), stopped.int().argmax(-1) + 1, ids.shape[1] + 1).tolist()
    rows = iter(zip(ids.tolist(), logprobs.tolist(), first, strict=True))
    groups: list[list[Completion]] = []
    for request in requests:
        groups.append([])
        for _ in range(request.count):
            row, scores, stop = next(rows)
            end = min(stop, request.max_tokens)
            finish = "stop" if stop <= end else "length"
            groups[-1].append(Completion(tuple(row[:end]), tuple(scores[:end]), finish, version))
    # Only NaN is unequal to itself.
    if not all(score == score for group in groups for row in group for score in row.logprobs):
        raise EngineError(f"the sampler's log-probs are not numbers: the weights of version {version} are not finite")
    return groups


def chunks(requests: Sequence[Request], budget: int, size: Callable[[int, int, int, int], int]) -> Iterator[list[int]]:
    """Split requests into chunks that fit a memory budget, shortest context first.

    Args:
        requests: the requests.
        budget: memory limit in bytes. A chunk has at least one request, even if it exceeds the limit.
        size: (prompts, completions, tokens of the longest context, largest max_tokens) -> bytes.
    Yields:
        Indices of the requests of each chunk.
    """
    chunk: list[int] = []
    # Prompts of similar length need the least padding.
    for index in sorted(range(len(requests)), key=lambda index: len(requests[index].ids)):
        longer_chunk = [requests[member] for member in (*chunk, index)]
        rows, most = sum(request.count for request in longer_chunk), max(r.max_tokens for r in longer_chunk)
        if chunk and size(len(longer_chunk), rows, len(requests[index].ids), most) > budget:
            yield chunk
            chunk = []
        chunk.append(index)
    if chunk:
        yield chunk


class SlotRows(NamedTuple):
    """Keys and values of some rows of `Slots`.

    Attributes:
        keys, values: one tensor per layer, in the layout of `Slots`.
        rows: number of each row in the chunk.
        pad: number of padding columns of each row.
    """

    keys: list[Tensor]
    values: list[Tensor]
    rows: list[int]
    pad: list[int]


class Slots(Cache):
    """Key-value cache of fixed width: each prompt is computed once and repeated for its completions.

    Keys are stored transposed, [rows, kv_heads, head_dim, width], and values as
    [rows, kv_heads, width, head_dim], so that the attention of one new token is two plain matrix
    products. The first `used` columns are filled. Shorter prompts are left-padded, and `bias` masks
    the padding. A prefill fills several columns at once: the whole prompts, or the rest of them
    after columns that come from a cache.

    Args:
        pad: [B] padding columns of each prompt.
        counts: [B] completions of each prompt.
        width: columns, for the longest prompt with its completion.
        leaves: copy rows before they are dropped, so that `left` can return all rows.

    Attributes:
        used: columns filled so far; the next token is written to this column.
        prefilling: several tokens of each row are being computed.
        rows: [rows] int64, number of each row in the chunk; it stays when other rows are dropped.
        pad: [rows] int64, padding columns of each row.
        bias: [rows, 1, 1, width], -inf on padding and 0 elsewhere; None if no prompt is padded.
        compact_below: drop finished rows when the share of unfinished ones is at or below this.
    """

    compact_below = 0.8

    def __init__(self, pad: Tensor, counts: Tensor, width: int, leaves: bool = False) -> None:
        super().__init__(layers=[])
        self.counts, self.width = counts, width
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.used, self.prefilling = 0, True
        self._prompt_pad, self.pad = pad, pad.repeat_interleave(counts)
        self.rows = torch.arange(len(self.pad), device=pad.device)
        self._parts, self._leaves = list[SlotRows](), leaves
        self.bias: Tensor | None = None
        if bool(pad.any()):
            hidden = torch.arange(width, device=pad.device) < self.pad[:, None]
            self.bias = torch.zeros(hidden.shape, device=pad.device).masked_fill_(hidden, -torch.inf)[:, None, None]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Fill a layer from a prefill [B, kv_heads, t, head_dim], or append one token to every row.

        Returns:
            All keys and values that the new tokens may attend to. For a prefill: one row per
            prompt, in the layout of the arguments.
        """
        if not self.prefilling:
            return self.append(key_states[:, :, 0], value_states[:, :, 0], layer_idx)
        if not self.used:
            self.add_layer(key_states, value_states)
        end = self.used + key_states.shape[2]
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[..., self.used : end] = key_states.transpose(-1, -2).repeat_interleave(self.counts, 0)
        values[:, :, self.used : end] = value_states.repeat_interleave(self.counts, 0)
        # The prompts themselves have all keys; a prefill behind cached columns needs those as well.
        if not self.used:
            return key_states, value_states
        if len(self.counts) < len(self.pad):
            # One row per prompt: the rows of its completions are equal so far.
            first = self.counts.cumsum(0) - self.counts
            keys, values = keys[first], values[first]
        return keys[..., :end].transpose(-1, -2), values[:, :, :end]

    def add_layer(self, key: Tensor, value: Tensor) -> None:
        """Allocate a layer, with the heads, head size and dtype of key and value [.., heads, t, size]."""
        rows, heads = len(self.pad), key.shape[1]
        self.keys.append(key.new_empty(rows, heads, key.shape[-1], self.width))
        self.values.append(value.new_empty(rows, heads, self.width, value.shape[-1]))

    def places(self, length: int) -> Tensor:
        """Return the positions [B, length] of the tokens that a prefill computes."""
        columns = torch.arange(self.used, self.used + length, device=self.pad.device)
        return (columns - self._prompt_pad[:, None]).clamp_min(0)

    def mask(self, length: int) -> Tensor | None:
        """Return the attention mask of a prefill, [B, 1, length, columns]; None for a causal mask."""
        if self.bias is None and not self.used:
            return None
        columns = torch.arange(self.used + length, device=self.pad.device)
        rows = columns[self.used :, None]
        shown = (columns >= self._prompt_pad[:, None])[:, None] & (columns <= rows)
        # Padding attends to itself: a softmax over an empty row is NaN in some kernels.
        return (shown | (columns == rows))[:, None]

    def left(self) -> list[SlotRows]:
        """Return the filled columns of all rows, dropped ones included; empty without `leaves`."""
        self._leave(torch.ones_like(self.rows, dtype=torch.bool))
        return self._parts

    def _leave(self, gone: Tensor) -> None:
        """Copy the filled columns of the rows in the mask `gone`, if `left` must return them."""
        if self._leaves:
            keys = [tensor[gone, ..., : self.used] for tensor in self.keys]
            values = [tensor[gone, :, : self.used] for tensor in self.values]
            self._parts.append(SlotRows(keys, values, self.rows[gone].tolist(), self.pad[gone].tolist()))

    def append(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write one token's key and value [rows, kv_heads, head_dim]; return all filled columns."""
        end = self.used + 1
        self.keys[layer][..., self.used] = key
        self.values[layer][:, :, self.used] = value
        return self.keys[layer][..., :end], self.values[layer][:, :, :end]

    def step(self, compute: Callable[[Tensor, Tensor], Tensor], tokens: Tensor) -> Tensor:
        """Append a token [R] to every row with `compute(tokens, positions)`; return its logits [R, V]."""
        logits = compute(tokens, self.used - self.pad)
        self.used += 1
        return logits

    def visible(self) -> Tensor | None:
        """Return the attention bias over the filled columns and the next one; None without padding."""
        return None if self.bias is None else self.bias[..., : self.used + 1]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these [n] (int64), which become the first n. Requires rows[i] >= i."""
        self._leave(torch.ones_like(self.rows, dtype=torch.bool).index_fill_(0, rows, False))
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        sources = rows[moved]
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[moved, ..., : self.used] = keys[sources, ..., : self.used]
            values[moved, :, : self.used] = values[sources, :, : self.used]
        self.keys = [keys[: len(rows)] for keys in self.keys]
        self.values = [values[: len(rows)] for values in self.values]
        self.pad, self.rows = self.pad[rows], self.rows[rows]
        self.bias = None if self.bias is None else self.bias[rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.used

    def get_query_offset(self, layer_idx: int | None = None) -> int:
        return self.used

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.used + query_length, 0


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the attention of one new token per row over its slots.

    The query heads that share a key head are the rows of one matrix product.

    Args:
        query: [rows, heads, head_dim], scaled.
        keys, values: [rows, kv_heads, head_dim, t] and [rows, kv_heads, t, head_dim].
        bias: [rows, 1, 1, t] added to the scores, or None.
    Returns:
        [rows, heads, head_dim].
    """
    rows, heads, size = query.shape
    scores = torch.matmul(query.view(rows, keys.shape[1], -1, size), keys)
    if bias is not None:
        scores = scores + bias
    # In 16 bits the sum over a long context would lose its small terms.
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights, values).view(rows, heads, -1)


def slot_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Apply `attend` to keys and values in the layout of `Slots`, as a transformers attention function."""
    scaling = options.get("scaling")
    # The query is scaled, because it is smaller than the scores.
    scaled = query[:, :, 0] * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return attend(scaled, key, value, attention_mask)[:, None], None


AttentionInterface.register(ATTENTION, slot_attention)
