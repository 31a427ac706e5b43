"""One forward of any transformers causal LM: packed where the model allows it, padded otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from retrain.functional.logprobs import predictors, token_scores
from retrain.protocols import WHOLE, Shards
from retrain.training.model.operations import shorten
from retrain.training.model.packing import Packing
from retrain.training.settings import LOGITS_AT_ONCE, PolicySettings
from retrain.types import Batch

MicroBatch = tuple[Tensor, bool]
"""Row numbers of a micro-batch, and whether they count: one that does not keeps its rank in step with the others."""
_TOLERANCE = 1e-3
_CACHED_CELLS = 2048
"""A processor is a tenth faster on parts whose activations stay in its cache than on larger ones."""
_PARAMETERS_PER_CELL = 1 << 14
"""A large model's weights do not stay there: to cast them for every part costs more."""


class Forward:
    """Scores response tokens with a causal LM.

    What a model can do is found by trying: a probe compares the packed forward, and body plus output
    embedding, with the model's own logits. A model that changes logits after the output embedding (soft
    caps) keeps its own forward; a model that refuses the packed attention, or sees less than the whole row
    (sliding windows), is run padded with its own attention.

    Attributes:
        splits: logits = output embedding of the last hidden state, so they can be computed in chunks.
        packed_limit: longest row that may be packed; 0 if the model cannot pack.
        ragged: packed rows attend by the kernel for rows of different lengths, see `ragged_attention`.
    """

    def __init__(self, model: Any, settings: PolicySettings, shards: Shards = WHOLE) -> None:
        """`shards`: how the model's weights lie on the ranks."""
        self.model, self.shards, self.temperature = model, shards, settings.temperature
        self.config: Any = model.config.get_text_config()  # its own, but for a model that sees images as well
        self.device: torch.device = shards.device or model.device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.chunk = settings.logprob_chunk or max(1, LOGITS_AT_ONCE // self.config.vocab_size)
        self.budget = settings.micro_batch_tokens
        if self.device.type == "cpu":
            large = min(self.chunk, sum(p.numel() for p in model.parameters()) // _PARAMETERS_PER_CELL)
            self.budget = min(self.budget, max(_CACHED_CELLS, large))
        shorten(model)
        self.splits, self.packed_limit, self.ragged = False, 0.0, False
        self._probe()

    @torch.no_grad()
    def _probe(self) -> None:
        device = self.device
        ids = torch.arange(10, device=device).view(2, 5) * 7 % self.config.vocab_size
        mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2], device=device)
        cells, none = mask.flatten(), torch.zeros_like(mask)
        expected = self.shards.run(lambda: self._padded(ids, mask)[cells])
        self.splits = True  # the probe's premise
        self.splits = self._agrees(expected, lambda: self._head(self._padded(ids, mask)[cells]))
        possible = self.splits and self._may_be_ragged()
        for self.ragged in (True, False) if possible else (False,):
            packing = Packing.of(ids, mask, none, self.ragged)
            with packed(self.model):
                if self.splits and self._agrees(
                    expected, lambda packing=packing: self._head(self._packed(ids, packing))
                ):
                    self.packed_limit = longest_packed_row(self.config)
                    break
        if possible and not self.ragged:
            logging.getLogger(__name__).warning("this model's packed rows attend padded: varlen_attn does not fit it")

    def _may_be_ragged(self) -> bool:
        if self.device.type != "cuda":
            return False
        from retrain.training.model.ragged import has_ragged_attention

        return has_ragged_attention(self.device, self.dtype)

    def _agrees(self, expected: Tensor, compute: Callable[[], Tensor]) -> bool:
        try:
            logits = self.shards.run(compute)
        except Exception:  # whatever a model raises here, its own forward remains
            self.shards.recover()
            return False
        slack = _TOLERANCE if expected.dtype == torch.float32 else 50 * _TOLERANCE
        return torch.allclose(logits.float(), expected.float(), rtol=slack, atol=slack * float(expected.std()))

    def attention(self, width: int) -> AbstractContextManager[None]:
        """Holds the attention that rows of this width use; forward and backward both belong in it."""
        return packed(self.model) if width <= self.packed_limit else nullcontext()

    def micro_batches(self, batch: Batch, rows: Sequence[int]) -> list[MicroBatch]:
        """This rank's share of these rows, by length, in parts that fit the token budget."""
        ranks = self.shards.ranks
        return deal(batch.attention_mask.sum(-1).tolist(), rows, self.budget, ranks.size)[ranks.rank :: ranks.size]

    def columns(self, batch: Batch) -> dict[str, Tensor]:
        """logprobs, entropy (both with gradient) and varentropy of response tokens, [N, T], 0 elsewhere.

        Called within `attention(T)`.
        """
        return self.shards.run(self._columns, batch)

    def _columns(self, batch: Batch) -> dict[str, Tensor]:
        ids, mask, scored = batch.input_ids, batch.attention_mask, batch.response_mask
        packing = Packing.of(ids, mask, scored, self.ragged) if ids.shape[1] <= self.packed_limit else None
        cells = predictors(scored)
        index = cells if packing is None else packing.gather.reshape(-1)[cells]
        with self._autocast():
            hidden = (self._padded(ids, mask) if packing is None else self._packed(ids, packing)).index_select(0, index)
            scores = token_scores(hidden, self._head, ids[scored], temperature=self.temperature, chunk=self.chunk)
        blank = scores.logprobs.new_zeros(ids.shape)
        return {name: blank.masked_scatter(scored, values) for name, values in vars(scores).items()}

    @torch.no_grad()
    def logprobs(
        self, batch: Batch, columns: Sequence[str] = ("old_logprobs",), parts: Sequence[MicroBatch] | None = None
    ) -> dict[str, Tensor]:
        """old_logprobs, entropy, varentropy by name, each [N, T] float32 without gradient, in one pass.

        Args:
            parts: this rank's micro-batches of rows to score, others being 0; None: those of all rows.
        """
        tables = {name: batch.sampler_logprobs.new_zeros(batch.input_ids.shape) for name in columns}
        for part, counts in self.micro_batches(batch, range(len(batch.input_ids))) if parts is None else parts:
            rows = batch.rows(part)
            with self.attention(rows.input_ids.shape[1]):
                found = self.columns(rows)
            found["old_logprobs"] = found["logprobs"]
            for name, table in tables.items() if counts else ():
                table[part, : rows.input_ids.shape[1]] = found[name]
        return {name: self.shards.ranks.sum(table) for name, table in tables.items()}

    def weights(self) -> Mapping[str, Tensor]:
        """The full state dict, whole on every rank; views where nothing is sharded."""
        return self.shards.whole(self.model.state_dict(keep_vars=True))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32 or self.shards.casts:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _padded(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states [R*S, d] of all cells by the model's own attention; logits if it cannot split."""
        body = self.model.base_model if self.splits else self.model
        return body(input_ids=input_ids, attention_mask=mask.long(), use_cache=False)[0].flatten(0, 1)

    def _packed(self, input_ids: Tensor, packing: Packing) -> Tensor:
        """Last hidden states [n, d] of the packed tokens; called within `attention`."""
        ids, places = input_ids[packing.kept][None], packing.position_ids
        return self.model.base_model(input_ids=ids, position_ids=places, packing=packing, use_cache=False)[0][0]

    def _head(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden) if self.splits else hidden


def micro_batches(lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[Tensor]:
    """Rows in descending length, cut so that rows x longest row of a part stays within the budget.

    Args:
        lengths: tokens of every row of the batch.
        rows: the rows to distribute.
        budget: cells per part; a longer row stands alone.
    Returns:
        int64 row numbers per part; the longest part first, so that running out of memory happens at once.
    """
    parts: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > budget:
            parts.append([])
        parts[-1].append(row)
    return [torch.tensor(part) for part in parts]


def deal(lengths: Sequence[int], rows: Sequence[int], budget: int, ranks: int) -> list[MicroBatch]:
    """`micro_batches` for several ranks: part k goes to rank k % ranks, and every rank gets as many parts.

    Ranks whose numbers of forwards differ wait for each other for ever. So the largest part is cut in two until the
    parts come out even; where no part can be cut, the last one is repeated without counting.
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
    """Causal attention within each row of a packed list; transformers' attention interface.

    `options` holds `packing`, which the model passed through, and the model's own `scaling`.

    query is [1, heads, n, d], key and value are [1, kv_heads, n, d]: one gather pads them to rows, one
    scatter takes the result back to [1, n, heads, d]. Padding stands after a row's tokens, so causality hides it.
    """
    packing: Packing = options["packing"]
    scale: float | None = options.get("scaling")
    if packing.ragged:
        from retrain.training.model.ragged import ragged_attention

        return ragged_attention(query, key, value, packing, scale), None
    rows, width = packing.gather.shape
    cells = packing.gather.reshape(-1)

    wide = query.device.type == "cpu"  # a processor multiplies matrices faster in bfloat16, but attends slower
    grouped = query.shape[1] != key.shape[1]
    if grouped and not wide:  # of torch's kernels for a GPU those that take fewer key heads hold all scores at once
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
    """The model attends over packed tokens inside this block; forward and backward both belong in it."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def longest_packed_row(config: Any) -> float:
    """Rows up to this length see every earlier token: the attention window, or inf without one."""
    kinds = set(getattr(config, "layer_types", None) or ())
    local = bool(kinds - {"full_attention"}) or (not kinds and getattr(config, "use_sliding_window", True))
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min([float(window) for window in windows if window and local], default=float("inf"))
