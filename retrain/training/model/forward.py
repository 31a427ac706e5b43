"""Forward passes of any transformers causal LM, packed if the model allows it, otherwise padded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from retrain.errors import ComponentError
from retrain.functional.logprobs import predictors, token_scores
from retrain.protocols import WHOLE, Shards
from retrain.training.cpu_kernels import shorten
from retrain.training.model.packing import Packing
from retrain.training.settings import LOGITS_AT_ONCE, PolicySettings
from retrain.types import Batch

MicroBatch = tuple[Tensor, bool]
"""(row numbers of a micro-batch, True if they count).

One that does not count only gives its rank as many forward passes as the others.
"""
_TOLERANCE = 1e-3
"""Largest error of the packed forward in float32, relative to the logits' standard deviation."""
_CACHED_CELLS = 2048
"""Cells of a micro-batch on a CPU: 10% faster than larger ones, as activations stay in cache."""
_PARAMETERS_PER_CELL = 1 << 14
"""Parameters per cell of a micro-batch on a CPU, for large models.

Each micro-batch casts all weights, so a large model needs larger micro-batches.
"""


class Forward:
    """Scores response tokens with a causal LM.

    A probe tests the model's abilities: it compares the packed forward, and the output embedding of
    the last hidden state, with the model's own logits. A model that changes logits after the output
    embedding (soft caps) uses its own forward. A model that fails with the packed attention, or has
    sliding windows, runs padded with its own attention.

    Attributes:
        splits: logits are the output embedding of the last hidden state, so they can be computed in
            chunks.
        packed_limit: largest length of a row that can be packed; 0 if the model cannot pack.
        ragged: packed rows use `ragged_attention`.
        compiled: the model's layers and the scores of tokens are compiled (see `compile_layers`).
    """

    def __init__(self, model: Any, settings: PolicySettings, shards: Shards = WHOLE) -> None:
        """Probe the model; `shards` describes how its weights are sharded."""
        self.model, self.shards, self.temperature = model, shards, settings.temperature
        self.config: Any = model.config.get_text_config()  # part of the config in multimodal models
        self.device: torch.device = shards.device or model.device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.chunk = settings.logprob_chunk or max(1, LOGITS_AT_ONCE[self.device.type] // self.config.vocab_size)
        self.budget = settings.micro_batch_tokens
        if self.device.type == "cpu":
            large = min(self.chunk, sum(p.numel() for p in model.parameters()) // _PARAMETERS_PER_CELL)
            self.budget = min(self.budget, max(_CACHED_CELLS, large))
        shorten(model)
        self.splits, self.packed_limit, self.ragged, self.compiled = False, 0.0, False, False
        self._probe()
        if settings.compile and self.device.type == "cuda" and shards.device is None and self.packed_limit:
            from retrain.training.model.compiled import compile_layers

            self.compiled = compile_layers(model, self._trial)

    @torch.no_grad()
    def _probe(self) -> None:
        half = self.model.get_input_embeddings().weight.dtype != torch.float32
        # Compare float32 weights without rounding.
        with self._autocast() if half else nullcontext():
            self._try_forwards()

    def _try_forwards(self) -> None:
        device = self.device
        ids = torch.arange(10, device=device).view(2, 5) * 7 % self.config.vocab_size
        mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2], device=device)
        cells, none = mask.flatten(), torch.zeros_like(mask)
        expected = self.shards.run(lambda: self._padded(ids, mask)[cells])
        self.splits = True  # `_padded` and `_head` use it in the next line
        self.splits = self._agrees(expected, lambda: self._head(self._padded(ids, mask)[cells]))
        possible = self.splits and self._may_be_ragged()
        tried = [True] * possible + [False] * self.splits
        for self.ragged in tried:
            packing = Packing.of(ids, mask, none, self.ragged)
            with self._autocast() if self.ragged else nullcontext():  # FlashAttention computes in 16 bits only
                wanted = (
                    self.shards.run(lambda: self._head(self._padded(ids, mask)[cells])) if self.ragged else expected
                )
                with packed(self.model):
                    agrees = self._agrees(wanted, lambda packing=packing: self._head(self._packed(ids, packing)))
            if agrees:
                self.packed_limit = longest_packed_row(self.config)
                break
        if possible and not self.ragged:
            text = "this model uses padded attention for packed rows, because varlen_attn fails or gives other logits"
            logging.getLogger(__name__).warning(text)

    def _may_be_ragged(self) -> bool:
        if self.device.type != "cuda":
            return False
        from retrain.training.model.ragged import has_ragged_attention

        return has_ragged_attention(self.device, self.dtype)

    def _agrees(self, expected: Tensor, compute: Callable[[], Tensor]) -> bool:
        try:
            logits = self.shards.run(compute)
        except Exception:  # a model may raise anything; then its own forward is used
            self.shards.recover()
            return False
        # The root mean square and not the largest error: the largest of 100,000 logits in 16 bits grows with depth.
        slack = _TOLERANCE if expected.dtype == torch.float32 else 50 * _TOLERANCE
        error = (logits.float() - expected.float()).square().mean().sqrt()
        return bool(error <= slack * expected.float().std())

    def attention(self, width: int) -> AbstractContextManager[None]:
        """Select the attention for rows of this width, for both forward and backward pass."""
        return packed(self.model) if width <= self.packed_limit else nullcontext()

    def micro_batches(self, batch: Batch, rows: Sequence[int]) -> list[MicroBatch]:
        """Return this rank's micro-batches of these rows, within the token budget."""
        ranks = self.shards.ranks
        return deal(batch.attention_mask.sum(-1).tolist(), rows, self.budget, ranks.size)[ranks.rank :: ranks.size]

    def columns(self, batch: Batch, squares: bool = False) -> dict[str, Tensor]:
        """Compute the scores of `TokenScores` for response tokens, each [N, T], 0 elsewhere.

        logprobs and entropy have a gradient. Call this inside `attention(T)`.

        Args:
            batch: N rows of T tokens.
            squares: compute sum_pi_squared; otherwise it is 0.
        """
        return self.shards.run(self._columns, batch, squares)

    def _columns(self, batch: Batch, squares: bool) -> dict[str, Tensor]:
        ids, scored = batch.input_ids, batch.response_mask
        with self._autocast():
            hidden = self._hidden(batch)
            options: Any = {"chunk": self.chunk, "squares": squares}
            if self.compiled:
                from retrain.functional.fused_scores import fused

                options["scorer"] = fused
            scores = token_scores(hidden, self._head, ids[scored], temperature=self.temperature, **options)
        blank = scores.logprobs.new_zeros(ids.shape)
        return {name: blank.masked_scatter(scored, values) for name, values in vars(scores).items()}

    def _hidden(self, batch: Batch) -> Tensor:
        """Compute the last hidden states [n, d] that predict the n response tokens."""
        ids, mask, scored = batch.input_ids, batch.attention_mask, batch.response_mask
        packing = Packing.of(ids, mask, scored, self.ragged) if ids.shape[1] <= self.packed_limit else None
        cells = predictors(scored)
        index = cells if packing is None else packing.gather.reshape(-1)[cells]
        return (self._padded(ids, mask) if packing is None else self._packed(ids, packing)).index_select(0, index)

    @torch.no_grad()
    def logprobs(
        self, batch: Batch, columns: Sequence[str] = ("old_logprobs",), parts: Sequence[MicroBatch] | None = None
    ) -> dict[str, Tensor]:
        """Compute columns in one pass, each [N, T] float32 without gradient.

        Args:
            batch: N rows of T tokens.
            columns: names among old_logprobs, entropy, varentropy and sum_pi_squared.
            parts: this rank's micro-batches of the rows to score, the other rows being 0; None scores all rows.
        """
        tables = {name: batch.sampler_logprobs.new_zeros(batch.input_ids.shape) for name in columns}
        for part, counts in self.micro_batches(batch, range(len(batch.input_ids))) if parts is None else parts:
            rows = batch.rows(part)
            with self.attention(rows.input_ids.shape[1]):
                found = self.columns(rows, squares="sum_pi_squared" in columns)
            found["old_logprobs"] = found["logprobs"]
            for name, table in tables.items() if counts else ():
                table[part, : rows.input_ids.shape[1]] = found[name]
        return {name: self.shards.ranks.all_reduce(table) for name, table in tables.items()}

    def weights(self) -> Mapping[str, Tensor]:
        """Return the full state dict, unsharded on every rank; views if nothing is sharded."""
        return self.shards.whole(self.model.state_dict(keep_vars=True))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32 or self.shards.casts:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @contextmanager
    def in_float32(self) -> Generator[None]:
        """Compute matrix products in float32 inside this block, without what is for 16 bits or compiled for them."""
        before = self.dtype, self.ragged, self.compiled
        # Compiling for another dtype would take longer than a few passes without it.
        eager = torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()
        self.dtype, self.ragged, self.compiled = torch.float32, self.ragged and self.dtype == torch.float32, False
        try:
            with eager:
                yield
        finally:
            self.dtype, self.ragged, self.compiled = before

    def _padded(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Compute last hidden states [R*S, d] with the model's own attention.

        They are logits if `splits` is False.
        """
        body = self.model.base_model if self.splits else self.model
        return body(input_ids=input_ids, attention_mask=mask.long(), use_cache=False)[0].flatten(0, 1)

    def _packed(self, input_ids: Tensor, packing: Packing) -> Tensor:
        """Compute last hidden states [n, d] of the packed tokens; call it inside `attention`."""
        ids, places = input_ids[packing.kept][None], packing.position_ids
        return self.model.base_model(input_ids=ids, position_ids=places, packing=packing, use_cache=False)[0][0]

    def _trial(self, input_ids: Tensor, mask: Tensor, scored: Tensor) -> Tensor:
        packing = Packing.of(input_ids, mask, scored, self.ragged)
        with torch.enable_grad(), self._autocast(), self.attention(input_ids.shape[1]):
            hidden = self._packed(input_ids, packing).float()
            if hidden.requires_grad:
                hidden.square().mean().backward()
        return hidden.detach()

    def _head(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden) if self.splits else hidden


class ValueForward(Forward):
    """Computes one value for the prefix before each response token, by a head on hidden states.

    Args:
        head: maps hidden states [n, d] to [n, 1], in float32.
    Raises:
        ComponentError: the model's logits do not depend on the last hidden state alone.
    """

    def __init__(self, model: Any, settings: PolicySettings, shards: Shards, head: nn.Module) -> None:
        super().__init__(model, settings, shards)
        self.head = head
        if not self.splits:
            problem = "the critic needs a model whose logits are the output embedding of its last hidden state"
            raise ComponentError(problem, "name another model in [critic] path")

    def _columns(self, batch: Batch, squares: bool) -> dict[str, Tensor]:
        with self._autocast():
            hidden = self._hidden(batch)
        found = self.head(hidden.float())[:, 0]
        return {"predicted_values": found.new_zeros(batch.input_ids.shape).masked_scatter(batch.response_mask, found)}

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """Compute values [N, T] float32 without gradient, 0 outside response_mask."""
        table = batch.sampler_logprobs.new_zeros(batch.input_ids.shape)
        for part, counts in self.micro_batches(batch, range(len(batch.input_ids))):
            rows = batch.rows(part)
            with self.attention(rows.input_ids.shape[1]):
                found = self.columns(rows)["predicted_values"]
            if counts:
                table[part, : rows.input_ids.shape[1]] = found
        return self.shards.ranks.all_reduce(table)


def micro_batches(lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[Tensor]:
    """Split rows into micro-batches of at most `budget` cells (rows x longest row).

    Args:
        lengths: length of every row of the batch, in tokens.
        rows: numbers of the rows to split.
        budget: cells per micro-batch; a longer row gets one of its own.
    Returns:
        int64 row numbers of each micro-batch, by decreasing length, so that running out of memory
        happens at once.
    """
    parts: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > budget:
            parts.append([])
        parts[-1].append(row)
    return [torch.tensor(part) for part in parts]


def deal(lengths: Sequence[int], rows: Sequence[int], budget: int, ranks: int) -> list[MicroBatch]:
    """Split rows into `micro_batches` for several ranks, as many for each; k belongs to rank k % ranks.

    With sharded weights, ranks with different numbers of forward passes would deadlock. So the
    largest micro-batch is split until the number is even. If none can be split, the last one is
    repeated without counting.
    """
    parts = [part.tolist() for part in micro_batches(lengths, rows, budget)]
    while len(parts) % ranks and len(largest := max(parts, key=len)) > 1:
        place, half = parts.index(largest), (len(largest) + 1) // 2
        parts[place : place + 1] = [largest[:half], largest[half:]]
    idle = [(torch.tensor(part), False) for part in parts[-1:]] * (-len(parts) % ranks)
    return [(torch.tensor(part), True) for part in parts] + idle


NAME = "retrain_packed"


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute causal attention within each row of a packed list, as transformers' AttentionInterface.

    One gather pads the tokens to rows, and one scatter packs the result. Padding follows a row's
    tokens, so causality hides it.

    Args:
        query: [1, heads, n, d].
        key, value: [1, kv_heads, n, d].
        options: `packing`, which the model passes through, and the model's own `scaling`.
    Returns:
        [1, n, heads, d], and None for attention weights.
    """
    packing: Packing = options["packing"]
    scale: float | None = options.get("scaling")
    if packing.bounds is not None:
        from retrain.training.model.ragged import ragged_attention

        return ragged_attention(query, key, value, packing, scale), None
    rows, width = packing.gather.shape
    cells = packing.gather.reshape(-1)

    wide = query.device.type == "cpu"  # CPU attention is faster in float32, unlike matrix products
    grouped = query.shape[1] != key.shape[1]
    # With fewer key heads, torch's only GPU kernels are those that store all scores at once.
    if grouped and not wide:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))

    def padded(x: Tensor) -> Tensor:
        x = x.float() if wide else x
        return x[0].transpose(0, 1).index_select(0, cells).view(rows, width, x.shape[1], x.shape[3]).transpose(1, 2)

    with torch.autocast("cpu", enabled=False) if wide else nullcontext():
        out = functional.scaled_dot_product_attention(
            padded(query), padded(key), padded(value), is_causal=True, scale=scale, enable_gqa=grouped and wide
        )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, packing.scatter)[None].to(query.dtype), None


AttentionInterface.register(NAME, packed_attention)


@contextmanager
def packed(model: Any) -> Generator[None]:
    """Use the packed attention inside this block, for both forward and backward pass."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def longest_packed_row(config: Any) -> float:
    """Return the length up to which a row attends to all earlier tokens: the window, or inf."""
    kinds = set(getattr(config, "layer_types", None) or ())
    local = bool(kinds - {"full_attention"}) or (not kinds and getattr(config, "use_sliding_window", True))
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min([float(window) for window in windows if window and local], default=float("inf"))
