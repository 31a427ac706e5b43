"""The sampling loop: chunks of prompts, one token per step, finished rows compacted away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from retrain.engines.embedded.draw import draw
from retrain.engines.embedded.slots import Slots
from retrain.errors import EngineError
from retrain.types import Completion, Sampling

_COMPACT_BELOW = 0.8


class Decoder(Protocol):
    """A model as the loop drives it: start rows from prompts, then one token per row and step."""

    name: str

    @property
    def slots(self) -> Slots: ...

    def load(self, weights: Mapping[str, Tensor]) -> None: ...

    def prefill(self, ids: Tensor, pad: Tensor, group: int, width: int) -> Tensor: ...

    def step(self, tokens: Tensor) -> Tensor: ...


@torch.inference_mode()
def sample_chunk(
    decoder: Decoder, prompts: Sequence[Sequence[int]], uniform: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Sample `group_size` completions for each prompt.

    Args:
        uniform: [max_tokens, R] with R = prompts * group_size, on the decoder's device.
    Returns:
        ids [R, max_tokens] int64 and log-probs [R, max_tokens] float32. What follows a row's first stop id is
        without meaning.
    """
    device = uniform.device
    ids, pad = left_padded(prompts, device)
    count = uniform.shape[1]
    stops = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)
    out = torch.zeros(count, sampling.max_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(count, sampling.max_tokens, device=device)
    alive = torch.arange(count, device=device)
    done = torch.zeros(count, dtype=torch.bool, device=device)
    width = ids.shape[1] + sampling.max_tokens
    logits = decoder.prefill(ids, pad, sampling.group_size, width).repeat_interleave(sampling.group_size, 0)
    for step in range(sampling.max_tokens):
        tokens, chosen = draw(logits, uniform[step], sampling)
        out[alive, step], logprobs[alive, step] = tokens, chosen
        if len(stops):
            done |= torch.isin(tokens, stops)
        running = len(done) - int(done.sum())
        if running == 0 or step + 1 == sampling.max_tokens:
            break
        if running <= _COMPACT_BELOW * len(done):
            rows = packed(done, running)
            alive, tokens, done, uniform = alive[rows], tokens[rows], done[rows], uniform[:, rows]
            decoder.slots.keep(rows)
        logits = decoder.step(tokens)
    return out, logprobs


def packed(done: Tensor, running: int) -> Tensor:
    """The rows still running, [running] int64: those that lie behind fill the places of finished ones before them.

    As few rows as possible move, because moving a row means moving its keys and values.
    """
    rows = torch.arange(running, device=done.device)
    rows[done[:running]] = (~done[running:]).nonzero()[:, 0] + running
    return rows


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as ids [B, P], padded on their left with 0, and the padding of each, [B]."""
    width = max(len(prompt) for prompt in prompts)
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    pad = [width - len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(pad, device=device)


def completions(ids: Tensor, logprobs: Tensor, sampling: Sampling, version: int) -> list[list[Completion]]:
    """Rows [R, max_tokens] as completions, cut after their first stop id, one list per prompt."""
    stops = torch.tensor(sampling.stop_ids, dtype=torch.long, device=ids.device)
    stopped = torch.isin(ids, stops)
    ends = torch.where(stopped.any(-1), stopped.int().argmax(-1) + 1, ids.shape[1]).tolist()
    rows: list[Completion] = []
    for row, scores, end, stop in zip(ids.tolist(), logprobs.tolist(), ends, stopped.any(-1).tolist(), strict=True):
        finish = "stop" if stop else "length"
        rows.append(Completion(tuple(row[:end]), tuple(scores[:end]), finish, version))
    if not all(score == score for row in rows for score in row.logprobs):
        raise EngineError(f"the sampler's log-probs are not numbers: the weights of version {version} are not finite")
    size = sampling.group_size
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def chunks(lengths: Sequence[int], budget: int, row_bytes: Any) -> Iterator[list[int]]:
    """Indices of prompts, shortest first, in chunks that fit a memory budget.

    Args:
        lengths: prompt lengths in tokens.
        budget: bytes.
        row_bytes: bytes that one prompt with all its completions takes, as a function of its padded length.
    """
    chunk: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if chunk and (len(chunk) + 1) * row_bytes(lengths[index]) > budget:
            yield chunk
            chunk = []
        chunk.append(index)
    if chunk:
        yield chunk
