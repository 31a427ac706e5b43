"""Small real checkpoints in transformers format, of several architectures, with random weights."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKS = ["<|pad|>", "<|eos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def make_tokenizer(chat: bool = False, pad: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 262 + 26 entries; the eos token is `<|end|>` with a template, `<|eos|>` without."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=288, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["what is the sum of one and two?\nthe answer is three\n"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>" if chat else "<|eos|>", pad_token="<|pad|>" if pad else None
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(family: str) -> Any:
    """Config of a few hundred thousand parameters: "llama" (GQA, untied), "qwen2" (biases, tied) or "gpt2"."""
    if family == "gpt2":
        return GPT2Config(
            vocab_size=288, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=1,
            resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
        )  # fmt: skip
    shape: dict[str, Any] = dict(
        vocab_size=288, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    if family == "qwen2":
        return Qwen2Config(**shape, tie_word_embeddings=True)
    return LlamaConfig(**shape, tie_word_embeddings=False)


def make_checkpoint(
    directory: Path, family: str = "llama", *, chat: bool = False, pad: bool = True, seed: int = 0
) -> Path:
    """Write model and tokenizer to `directory` with `save_pretrained` and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(make_config(family))
    model.save_pretrained(directory)
    make_tokenizer(chat, pad).save_pretrained(directory)
    return directory
