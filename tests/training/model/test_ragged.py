"""Rows that attend without padding, with a transcription of the kernel, which processors lack."""

import pytest
import torch

from retrain.training.model.forward import Forward
from retrain.training.settings import PolicySettings
from tests.training.model.test_forward import PACKED
from tests.training.small_models import make_batch, make_model, values_and_gradients

pytestmark = pytest.mark.numeric


def attend_rows(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size, enable_gqa=False):
    """What torch.nn.attention.varlen.varlen_attn gives, for which there is no kernel on processors, row by row."""
    assert window_size == (-1, 0)  # causal
    found = []
    for first, end, start, stop in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:], strict=False):
        queries = query[first:end]
        keys, values = (x[start:stop].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        assert len(queries) <= max_q
        assert len(keys) <= max_k
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (query.shape[-1] ** -0.5 if scale is None else scale)
        later = torch.ones(len(queries), len(keys)).triu(len(keys) - len(queries) + 1).bool()
        found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values))
    return torch.cat(found)


@pytest.mark.parametrize("kind", PACKED)
def test_rows_of_different_lengths_attend_without_padding_to_the_same_values_and_gradients(kind, monkeypatch):
    monkeypatch.setattr("retrain.training.model.ragged.varlen_attn", attend_rows)
    model, batch, results = make_model(kind), make_batch(), []
    forward = Forward(model, PolicySettings())
    for forward.ragged in (True, False):
        results.append(values_and_gradients(forward, model, batch))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def attend_16_bit_rows(query, key, value, *bounds, **options):
    """As the kernel, which refuses float32."""
    if query.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return attend_rows(query, key, value, *bounds, **options)


def test_float32_weights_attend_without_padding_where_products_are_in_16_bits(monkeypatch):
    monkeypatch.setattr("retrain.training.model.ragged.varlen_attn", attend_16_bit_rows)
    monkeypatch.setattr(Forward, "_may_be_ragged", lambda self: self.dtype == torch.bfloat16)
    model, batch = make_model(), make_batch()
    expected = Forward(model, PolicySettings()).logprobs(batch)["old_logprobs"]
    forward = Forward(model, PolicySettings(dtype="bfloat16"))
    assert forward.ragged
    found = forward.logprobs(batch)["old_logprobs"]
    assert 0 < (found - expected).abs().max() < 0.2
    with forward.in_float32():
        torch.testing.assert_close(forward.logprobs(batch)["old_logprobs"], expected)
    assert forward.ragged
    assert forward.dtype == torch.bfloat16
