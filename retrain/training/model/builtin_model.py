"""`builtin:tiny`: a Qwen3-architecture model of about 1.4 million parameters and its own tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS = SPECIAL = ("<pad>", "<bos>", "<eos>")
MERGES = 29  # makes a vocabulary of 128 with the special tokens, printable ASCII, space and newline
ASCII = sorted("ĊĠ" + "".join(map(chr, range(33, 127))))  # ByteLevel's names of newline, space and the rest


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with single digits on these texts; equal texts give equal tokenizers.

    If the texts are printable ASCII, the vocabulary has 128 entries: pad, bos, eos, newline, printable ASCII and 29
    merges. Otherwise it has 320 entries with all 256 bytes, and can represent any text.

    Args:
        texts: prompts and solutions; a few thousand suffice.
    """
    core = Tokenizer.from_str(_trained(tuple(texts)))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS)


@lru_cache(maxsize=8)
def _trained(corpus: tuple[str, ...]) -> str:
    """Train a tokenizer and return it as JSON. It is cached, because it takes a tenth of the time of a short run."""
    plain = set().union(*corpus) <= {"\n", *map(chr, range(32, 127))}
    alphabet = ASCII if plain else sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE())
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    size = -(-(len(SPECIAL) + len(alphabet) + MERGES) // 64) * 64
    trainer = BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer.to_str()


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3ForCausalLM:
    """Build the model for this tokenizer in float32, with random weights; the global generator keeps its state.

    It has two layers of width 256, eight query heads on one key-value head, and tied embeddings. It learns a task in
    minutes on a CPU, and every engine supports its architecture.

    Args:
        tokenizer: determines the size of the vocabulary.
        seed: seed of the initial weights.
    """
    config = Qwen3Config(
        # Matrix products are fastest for multiples of 64.
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.04,  # learns in fewer steps than with the default of 0.02
        tie_word_embeddings=True,
        pad_token_id=SPECIAL.index(PAD),  # the trainer numbers special tokens first, in order
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
