import json
from functools import cache
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from retrain.algorithms.planning.detectors import gram_detector
from retrain.algorithms.planning.gram_pattern import STRATEGIC_GRAMS
from retrain.algorithms.planning.planning_mask import PlanningMask
from retrain.algorithms.planning.token_text import TokenText
from retrain.registry import find

pytestmark = pytest.mark.numeric

CORPUS = [
    "wait let me think about the key insight, that\u2019s not right. 12+34=46 so we double check it",
    "another way to add: carry the one, then start over \u2014 caf\u00e9 \U0001f600 notice that it's fine",
] * 3
PARAGRAPH = (
    "We add 12+34. Wait, let me check: that\u2019s not right! Let me think \U0001f600 about caf\u00e9s. "
    "So the answer; DOUBLE\ncheck it, the key insight is 46."
)
END = ["<|end|>"]
PHRASES = ["Wait, let me", "let me check", "that\u2019s not right", "Let me think", "DOUBLE\ncheck", "the key insight"]


@cache
def tokenizer(kind):
    """Byte-level BPE of few merges, Metaspace BPE with byte fallback, and Unigram."""
    if kind == "bytes":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    elif kind == "metaspace":
        core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Metaspace()
        core.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=160, special_tokens=["<unk>", *END], show_progress=False, limit_alphabet=40
        )
    else:
        core = Tokenizer(models.Unigram())
        core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=90, special_tokens=["<unk>", *END], show_progress=False, unk_token="<unk>"
        )
    core.train_from_iterator([*CORPUS, PARAGRAPH], trainer)
    if kind == "metaspace":
        trained = json.loads(core.to_str())["model"]
        vocab = trained["vocab"] | {f"<0x{byte:02X}>": len(trained["vocab"]) + byte for byte in range(256)}
        merges = [tuple(merge) for merge in trained["merges"]]
        core.model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def overlapping(fast, ids, text):
    """Tokens that overlap a phrase, by decoding every prefix of the completion anew."""
    spans = [(text.index(phrase), text.index(phrase) + len(phrase)) for phrase in PHRASES]
    ends = [len(fast.decode(ids[: n + 1]).rstrip("\ufffd")) for n in range(len(ids))]
    starts = [0, *ends[:-1]]
    return [n for n in range(len(ids)) if any(starts[n] < end and ends[n] > start for start, end in spans)]


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "unigram"])
def test_the_marked_tokens_are_those_that_overlap_a_phrase(kind):
    fast = tokenizer(kind)
    ids = fast.encode(PARAGRAPH, add_special_tokens=False)
    text = fast.decode(ids)
    assert all(phrase in text for phrase in PHRASES)
    whole = set(PlanningMask(fast).mark([ids])[0][0])
    expected = set(overlapping(fast, ids, text))
    assert expected <= whole
    # what is left over are tokens that hold part of a character inside a phrase, and add no text
    for extra in whole - expected:
        assert extra - 1 in whole
        assert extra + 1 in whole


@cache
def word_tokenizer(kind):
    """Tokenizers that share nothing but their text: WordPiece, and one token per character."""
    letters = sorted(set("".join(VOCABULARY)))
    if kind == "wordpiece":
        pieces = ["let", "me", "th", "wa", *letters, "##ink", "##it", "##eck", *(f"##{letter}" for letter in letters)]
        vocab = {piece: i for i, piece in enumerate(["[UNK]", *dict.fromkeys(pieces)])}
        core = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        core.pre_tokenizer, core.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(cleanup=False)
    else:
        vocab = {letter: i for i, letter in enumerate(["[UNK]", " ", *letters])}
        core = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
        core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core)


VOCABULARY = (
    *("let", "me", "think", "check", "wait", "so", "the"),
    *("key", "insight", "is", "that's", "not", "right", "add"),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([*VOCABULARY, "let me think", "that's not right", "wait let me"]), max_size=14))
def test_the_marked_characters_are_the_same_for_every_tokenizer(words):
    text = " ".join(words)
    marked = {}
    for kind in ("bytes", "metaspace", "unigram", "wordpiece", "characters"):
        fast = word_tokenizer(kind) if kind in ("wordpiece", "characters") else tokenizer(kind)
        ids = fast.encode(text, add_special_tokens=False)
        mask = PlanningMask(fast)
        pieces = mask._text.pieces(ids)
        assert "".join(pieces).split() == text.split()
        [(positions, _)] = mask.mark([ids])
        flags = "".join(
            ("#" if i in positions else ".") * len("".join(piece.split())) for i, piece in enumerate(pieces)
        )
        marked[kind] = flags
    assert len(set(marked.values())) == 1, marked
    found = gram_detector(STRATEGIC_GRAMS)([text])[0]
    expected = "".join("#" if any(a <= i < b for a, b, _ in found) else "." for i, c in enumerate(text) if c != " ")
    assert marked["characters"] == expected


def test_special_tokens_have_a_text_where_people_look_at_tokens():
    fast = tokenizer("bytes")
    fast.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    ids = [*fast.encode("ok \U0001f600", add_special_tokens=False), fast.convert_tokens_to_ids("<|end|>")]
    assert len(ids) > 5
    shown = TokenText(fast, special=True).pieces(ids)
    assert (shown[-1], "".join(shown)) == ("<|end|>", "ok \U0001f600<|end|>")
    assert "".join(TokenText(fast).pieces(ids)) == "ok \U0001f600"


def test_mask_is_over_response_tokens_of_a_padded_batch():
    fast = tokenizer("bytes")
    prompt, response = fast.encode("let me think "), fast.encode("let me think")
    plain = fast.encode("12+34=46")
    width = max(len(prompt) + len(response), len(plain)) + 3
    ids = torch.zeros(2, width, dtype=torch.long)
    mask = torch.zeros(2, width, dtype=torch.bool)
    ids[0, : len(prompt) + len(response)] = torch.tensor(prompt + response)
    mask[0, len(prompt) : len(prompt) + len(response)] = True
    ids[1, : len(plain)] = torch.tensor(plain)
    mask[1, : len(plain)] = True
    detector = find("signal", "planning_mask").bind().build({"tokenizer": fast, "search_paths": ()})
    found, metrics = detector(ids, mask)
    assert torch.equal(found[0], mask[0])
    assert not found[1].any()
    assert metrics == {
        "hicra/planning_token_ratio": len(response) / (len(response) + len(plain)),
        "hicra/semantic_entropy": 0.0,
        "hicra/semantic_entropy_norm": 0.0,
        "hicra/distinct_sg": 1.0,
    }


def test_no_span_reaches_across_what_an_environment_said():
    core = tokenizer("bytes")
    halves = [core.encode("let me", add_special_tokens=False), core.encode(" check", add_special_tokens=False)]
    ids = torch.tensor([[*halves[0], *halves[1]]])
    turns = torch.tensor([[0] * len(halves[0]) + [1] * len(halves[1])])
    detect = PlanningMask(core)
    every = torch.ones_like(ids).bool()
    assert detect(ids, every)[0].any()
    assert not detect(ids, every, turns)[0].any()
    assert detect(ids, every, turns * 0)[0].all()


def test_semantic_entropy_sums_counts_over_the_batch():
    fast = tokenizer("bytes")
    rows = [fast.encode(t) for t in ("let me think, let me think", "double check; let me think", "nothing to see")]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    _, metrics = PlanningMask(fast)(ids, mask)
    entropy = -(0.75 * log(0.75) + 0.25 * log(0.25))
    assert metrics["hicra/semantic_entropy"] == pytest.approx(entropy)
    assert metrics["hicra/semantic_entropy_norm"] == pytest.approx(entropy / log(2))
    assert metrics["hicra/distinct_sg"] == 2


def test_special_tokens_are_no_text():
    fast = tokenizer("bytes")
    ids = [*fast.encode("let me"), fast.eos_token_id, *fast.encode(" think")]
    [(marked, _)] = PlanningMask(fast).mark([[*ids, fast.eos_token_id]])
    assert marked == list(range(len(ids)))
