"""Every architecture gives its own log-probs, packed or padded, whatever the micro-batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from retrain.training.model.forward import Forward
from retrain.training.model.packed_attention import longest_packed_row
from retrain.training.settings import PolicySettings
from tests.training.small_models import MODELS, make_batch, make_model, values_and_gradients

pytestmark = pytest.mark.numeric

PACKED = ["qwen3", "qwen2", "llama", "mistral", "gpt2", "neox"]


def own_logprobs(model, batch, temperature=1.0):
    """Row by row through the model's own forward, without padding."""
    table = torch.zeros(batch.input_ids.shape)
    for n, length in enumerate(batch.attention_mask.sum(-1).tolist()):
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids[n : n + 1, :length], use_cache=False).logits[0]
        lp = torch.log_softmax(logits.float() / temperature, -1)
        for t in range(1, length):
            if batch.response_mask[n, t]:
                table[n, t] = lp[t - 1, batch.input_ids[n, t]]
    return table


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_models_own_forward(kind, temperature):
    model, batch = make_model(kind), make_batch(rows=8)
    forward = Forward(model, PolicySettings(temperature=temperature, micro_batch_tokens=30))
    found = forward.logprobs(batch)["old_logprobs"]
    torch.testing.assert_close(found, own_logprobs(model, batch, temperature), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", list(MODELS))
def test_what_is_packed_and_what_is_not(kind):
    forward = Forward(make_model(kind), PolicySettings())
    assert forward.packed_limit == (float("inf") if kind in PACKED else 6.0 if kind == "windowed" else 0.0)
    assert forward.splits
    assert forward.cap == (0.05 if kind == "capped" else 0)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("seed", range(3))
def test_rounding_in_many_layers_is_no_reason_not_to_pack(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=40, num_attention_heads=4
    )
    forward = Forward(LlamaForCausalLM(config).eval().bfloat16(), PolicySettings(dtype="bfloat16"))
    assert forward.packed_limit == float("inf")


@pytest.mark.parametrize("kind", PACKED)
def test_packed_and_padded_paths_agree_in_value_and_gradient(kind):
    model, batch = make_model(kind), make_batch()
    forward, results = Forward(model, PolicySettings()), []
    for limit in (float("inf"), 0.0):
        forward.packed_limit = limit
        results.append(values_and_gradients(forward, model, batch))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@given(seed=st.integers(0, 50), budget=st.integers(1, 120), chunk=st.integers(1, 30), padding=st.integers(0, 3))
@settings(deadline=None, max_examples=15)
def test_columns_do_not_depend_on_micro_batches_order_or_padding(seed, budget, chunk, padding):
    model, batch = make_model(), make_batch(seed=seed)
    whole = Forward(model, PolicySettings()).logprobs(batch, ("old_logprobs", "entropy", "varentropy"))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    shuffled = batch.rows(order)
    wide = shuffled.replace(
        **{
            name: torch.nn.functional.pad(getattr(shuffled, name), (0, padding))
            for name in ("input_ids", "attention_mask", "response_mask", "sampler_logprobs")
        }
    )
    parts = Forward(model, PolicySettings(micro_batch_tokens=budget, logprob_chunk=chunk))
    found = parts.logprobs(wide, tuple(whole))
    for name, table in whole.items():
        torch.testing.assert_close(found[name][:, : table.shape[1]], table[order], rtol=1e-5, atol=1e-5)
        assert not found[name][~wide.response_mask].any()


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({}, float("inf")),
        ({"sliding_window": 7}, 7),
        ({"sliding_window": 7, "use_sliding_window": False}, float("inf")),
        ({"sliding_window": 7, "layer_types": ["full_attention"]}, float("inf")),
        ({"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}, 7),
        ({"attention_chunk_size": 5, "layer_types": ["chunked_attention"]}, 5),
    ],
)
def test_rows_are_packed_only_within_the_attention_window(config, limit):
    assert longest_packed_row(type("Config", (), config)()) == limit
