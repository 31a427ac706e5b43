"""Forward passes of any transformers causal LM, packed if the model allows it, otherwise padded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from retrain.errors import ComponentError
from retrain.functional.logprobs import predictors, token_scores
from retrain.protocols import WHOLE, Shards
from retrain.training.cpu_kernels import shorten
from retrain.training.model.abilities import InFloat32, final_cap, poisoned, soft_capped
from retrain.training.model.packed_attention import longest_packed_row, packed
from retrain.training.model.packing import Packing
from retrain.training.settings import LOGITS_AT_ONCE, PolicySettings
from retrain.types import Batch

MicroBatch = tuple[Tensor, bool]
"""(row numbers of a micro-batch, True if they count).

One that does not count only gives its rank as many forward passes as the others.
"""
_TOLERANCE = 1e-4
"""Largest error of another way to compute logits in float32, relative to the logits' standard deviation."""
_ROUNDING = 5e-2
"""The same in 16 bits, for kernels that compute in nothing else: rounding alone gives up to 3%."""
_CACHED_CELLS = 2048
"""Cells of a micro-batch on a CPU: 10% faster than larger ones, as activations stay in cache."""
_PARAMETERS_PER_CELL = 1 << 14
"""Parameters per cell of a micro-batch on a CPU, for large models.

Each micro-batch casts all weights, so a large model needs larger micro-batches.
"""


class Forward:
    """Scores response tokens with a causal LM.

    A model whose logits are its output embedding, possibly with a soft cap, is scored in chunks. A model runs packed
    if its tokens meet only in an attention that `packed_attention` computes. Other models, and rows longer than a
    sliding window, run padded with the model's own attention.

    Attributes:
        splits: logits are the output embedding of the last hidden state, so they can be computed in
            chunks.
        cap: the soft cap of these logits; 0 if there is none.
        packed_limit: largest length of a row that can be packed; 0 if the model cannot pack.
        ragged: packed rows use `ragged_attention`.
        compiled: the model's layers and the scores of tokens are compiled (see `compile_layers`).
    """

    def __init__(self, model: Any, settings: PolicySettings, shards: Shards = WHOLE) -> None:
        """Test the model's abilities; `shards` describes how its weights are sharded.

        Raises:
            ComponentError: the model is not causal, or padding changes its logits.
        """
        self.model, self.shards, self.temperature = model, shards, settings.temperature
        self.config: Any = model.config.get_text_config()  # part of the config in multimodal models
        self.device: torch.device = shards.device or model.device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.chunk = settings.logprob_chunk or max(1, LOGITS_AT_ONCE[self.device.type] // self.config.vocab_size)
        self.budget = settings.micro_batch_tokens
        if self.device.type == "cpu":
            # At most a chunk: beyond it, the backward pass computes logits a second time.
            large = min(self.chunk, sum(p.numel() for p in model.parameters()) // _PARAMETERS_PER_CELL)
            self.budget = min(self.budget, max(_CACHED_CELLS, large))
        shorten(model)
        self.splits, self.cap, self.packed_limit, self.ragged, self.compiled = False, 0.0, 0.0, False, False
        self._probe()
        if settings.compile and self.device.type == "cuda" and shards.device is None and self.packed_limit:
            from retrain.training.model.compiled import compile_layers

            self.compiled = compile_layers(model, self._trial)

    @torch.no_grad()
    def _probe(self) -> None:
        """Find out what the model allows, on three rows of which the first two share a prompt of two tokens."""
        device = self.device
        # Multiples of 7, so that neighbours differ even in a small vocabulary.
        ids = torch.arange(1, 16, device=device).view(3, 5) * 7 % self.config.vocab_size
        ids[1, :2] = ids[0, :2]
        mask = torch.arange(5, device=device) < torch.tensor([[5], [3], [4]], device=device)
        scored = mask & (torch.arange(5, device=device) >= 2)
        half = self.model.get_input_embeddings().weight.dtype != torch.float32
        # FSDP gathers weights in their own dtype.
        exact = InFloat32() if half and self.shards.device is None else nullcontext()
        slack = _ROUNDING if self.shards.casts or (half and self.shards.device is not None) else _TOLERANCE
        with exact:
            logits = self.shards.run(self._padded, ids, mask)
            self._require_causal(logits.view(3, 5, -1), ids, slack)
            cap = self.shards.run(self._final_cap, ids, mask)
            # A cap of 0 is none; None is a model whose logits are made in another way.
            self.splits, self.cap = cap is not None, cap or 0.0
            if self.splits and self._packs(ids, mask, scored, slack):
                self.packed_limit = longest_packed_row(self.config)
        if self.packed_limit and self._may_be_ragged():
            self.ragged = True
            packing = Packing.of(ids, mask, scored, ragged=True)
            with self._autocast():  # FlashAttention computes in 16 bits only
                hidden = self.shards.run(self._padded, ids, mask)[packing.kept.flatten()]
                with packed(self.model):
                    self.ragged = self._agrees(hidden, lambda: self._packed(ids, packing), _ROUNDING)
            if not self.ragged:
                text = "this model uses padded attention for packed rows, because varlen_attn fails or differs"
                logging.getLogger(__name__).warning(text)

    def _require_causal(self, logits: Tensor, ids: Tensor, slack: float) -> None:
        """Raise ComponentError if later tokens or padding change the logits [3, 5, V] of the probe's rows."""
        name = type(self.model).__name__
        if not _close(logits[0, :2], logits[1, :2], slack):
            problem = f"{name} is not causal: later tokens change the logits of earlier ones"
            raise ComponentError(problem, "name a causal language model in [model] path")
        # The same row without its padding.
        alone = self.shards.run(self._padded, ids[1:2, :3], torch.ones_like(ids[1:2, :3], dtype=torch.bool))
        if not _close(logits[1, :3], alone, slack):
            problem = f"padding behind a text changes the logits of {name}, so texts of several lengths make no batch"
            raise ComponentError(problem, "name another model in [model] path")

    def _final_cap(self, ids: Tensor, mask: Tensor) -> float | None:
        def hidden() -> Tensor:
            return self.model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False)[0].flatten(0, 1)

        try:
            return final_cap(self.model, lambda: self._padded(ids, mask), hidden)
        except Exception:  # the head may be missing, or the body return something else: the own forward is used
            self.shards.recover()
            return None

    def _packs(self, ids: Tensor, mask: Tensor, scored: Tensor, slack: float) -> bool:
        """Return True if the packed forward is that of each row alone."""
        packing = Packing.of(ids, mask, scored)
        hidden = self.shards.run(self._padded, ids, mask)[packing.kept.flatten()]
        with packed(self.model):
            if not self._agrees(hidden, lambda: self._packed(ids, packing), slack):
                return False
            # Token 5 is all that is in the list of the second row, because its prompt is that of the first.
            with poisoned(self.model, token=5):
                finite = self.shards.run(self._packed, ids, packing).isfinite().all(-1)
        # NaN must reach its own token and no other.
        return not finite[5] and int(finite.sum()) == len(finite) - 1

    def _may_be_ragged(self) -> bool:
        if self.device.type != "cuda":
            return False
        from retrain.training.model.ragged import has_ragged_attention

        return has_ragged_attention(self.device, self.dtype)

    def _agrees(self, expected: Tensor, compute: Callable[[], Tensor], slack: float) -> bool:
        try:
            return _close(expected, self.shards.run(compute), slack)
        except Exception:  # a model may raise anything; then its own forward is used
            self.shards.recover()
            return False

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
            columns: names among old_logprobs, entropy, varentropy and sum_pi_squared; of a `ValueForward`
                predicted_values.
            parts: this rank's micro-batches of the rows to score, the other rows being 0; None scores all rows.
        """
        # Rows of other ranks stay 0, so that the sum over ranks is the whole table.
        tables = {name: batch.sampler_logprobs.new_zeros(batch.input_ids.shape) for name in columns}
        for part, counts in self.micro_batches(batch, range(len(batch.input_ids))) if parts is None else parts:
            rows = batch.rows(part)
            with self.attention(rows.input_ids.shape[1]):
                probed = self.columns(rows, squares="sum_pi_squared" in columns)
            if "logprobs" in probed:
                probed["old_logprobs"] = probed["logprobs"]
            for name, table in tables.items() if counts else ():
                table[part, : rows.input_ids.shape[1]] = probed[name]
        return {name: self.shards.ranks.all_reduce(table) for name, table in tables.items()}

    def weights(self) -> Mapping[str, Tensor]:
        """Return the full state dict, unsharded on every rank; views if nothing is sharded."""
        return self.shards.whole(self.model.state_dict(keep_vars=True))

    @contextmanager
    def _autocast(self) -> Generator[None]:
        if self.dtype == torch.float32 or self.shards.casts:
            yield
            return
        with torch.autocast(self.device.type, dtype=self.dtype):
            yield
        # torch keeps the casts of weights until the outermost autocast ends. A calling program's may surround this
        # one, and after an update its casts would be stale.
        torch.clear_autocast_cache()

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
        return soft_capped(self.model.get_output_embeddings()(hidden), self.cap) if self.splits else hidden


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
        values = self.head(hidden.float())[:, 0]
        return {"predicted_values": values.new_zeros(batch.input_ids.shape).masked_scatter(batch.response_mask, values)}


def _close(expected: Tensor, actual: Tensor, slack: float) -> bool:
    """Compare by the root mean square: the largest of 100,000 errors in 16 bits grows with the depth of the model."""
    error = (actual.float() - expected.float()).square().mean().sqrt()
    return bool(error <= slack * expected.float().std())


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
    # Rows of similar length waste the fewest cells.
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
    # Splitting costs less than a repeated micro-batch, whose result is thrown away.
    while len(parts) % ranks and len(largest := max(parts, key=len)) > 1:
        index, half = parts.index(largest), (len(largest) + 1) // 2
        parts[index : index + 1] = [largest[:half], largest[half:]]
    idle = [(torch.tensor(part), False) for part in parts[-1:]] * (-len(parts) % ranks)
    return [(torch.tensor(part), True) for part in parts] + idle
