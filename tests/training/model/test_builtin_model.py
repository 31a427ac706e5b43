import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.training.model.builtin_model import build_model, build_tokenizer

pytestmark = pytest.mark.numeric

TEXTS = [f"{a}+{b}?\nlet me think\n{a}+{b}={a + b}\nso {a + b}" for a in range(20, 40) for b in range(10, 30)]
PLAIN, BYTES = build_tokenizer(TEXTS), build_tokenizer([*TEXTS, "tab\t and ümlaut"])


def test_digits_stay_single_and_common_phrases_become_one_token():
    tokens = [PLAIN.decode([token]) for token in PLAIN("123+45?\nlet me think")["input_ids"]]
    assert tokens == ["1", "2", "3", "+", "4", "5", "?", "\n", "let", " me", " think"]


def test_vocabulary_is_128_for_ascii_and_holds_every_byte_otherwise():
    assert len(PLAIN) <= 128
    assert build_model(PLAIN).config.vocab_size == 128
    assert 128 < len(BYTES) <= 320
    assert build_model(BYTES).config.vocab_size == 320


@given(st.text())
@settings(deadline=None)
def test_any_text_round_trips_through_bytes(text):
    assert BYTES.decode(BYTES(text)["input_ids"]) == text


def test_model_is_seeded_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    one, same, other = build_model(PLAIN, 1), build_model(PLAIN, 1), build_model(PLAIN, 2)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)
    assert one.lm_head.weight is one.model.embed_tokens.weight
    assert 1_300_000 < sum(p.numel() for p in one.parameters()) < 1_500_000
