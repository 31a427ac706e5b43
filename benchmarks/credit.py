"""Time of credit assignment and of planning detection per 1,000,000 tokens on one core.

python benchmarks/credit.py [--tokens 1000000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from retrain.algorithms.graph.pipeline import Pipeline
from retrain.algorithms.planning.planning_mask import PlanningMask
from retrain.registry import find
from retrain.types import Batch

CHAINS = {
    "maxrl": [],
    "maxrl + gtpo": ["gtpo"],
    "maxrl + gtpo + hicra": ["gtpo", "hicra"],
    "maxrl + sepa + gtpo": ["sepa", "gtpo"],
    "maxrl + sepa + gtpo + hicra": ["sepa", "gtpo", "hicra"],
}
WORDS = "the sum of two odd numbers so we add carry and write digit then step by 7 12 x y = + ( ) wait let me think"


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = _batch(options.tokens)
    print(f"{'1 core, ' + format(int(batch.response_mask.sum()), ',') + ' tokens':<32}{'median s':>10}{'worst s':>10}")
    for name, chain in CHAINS.items():
        pipeline = _pipeline(chain)
        _report(name, [_timed(lambda p=pipeline: p.credit(batch)) for _ in range(options.repeats)])
    tokenizer, ids = _text(options.tokens)
    mask = torch.ones_like(ids, dtype=torch.bool)
    first = _timed(lambda: PlanningMask(tokenizer)(ids, mask))
    _report("planning mask, first batch", [first])
    detector = PlanningMask(tokenizer)
    _report("planning mask", [_timed(lambda: detector(ids, mask)) for _ in range(options.repeats)])


def _timed(call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _report(name: str, seconds: list[float]) -> None:
    print(f"{name:<32}{statistics.median(seconds):>10.3f}{max(seconds):>10.3f}")


def _pipeline(chain: list[str]) -> Pipeline:
    return Pipeline.resolve(
        [find("advantage", "maxrl").bind(), *(find("transform", name).bind() for name in chain)],
        find("filter", "uninformative").bind(),
        {"uncertainty": find("uncertainty", "surprisal").bind()}.get,
        given=frozenset({"planning_mask", "sepa_lambda"}),
    )


def _batch(tokens: int, group: int = 8, width: int = 1024) -> Batch:
    """Groups of 8 completions of 512 to 1024 tokens, `tokens` in all."""
    generator = torch.Generator().manual_seed(0)
    rows = tokens // (width * 3 // 4) // group * group
    lengths = torch.randint(width // 2, width + 1, (rows,), generator=generator)
    mask = torch.arange(width) < lengths[:, None]
    logprobs = -torch.rand(rows, width, generator=generator) * mask
    rewards = torch.randint(0, 2, (rows,), generator=generator).float()
    return Batch(
        input_ids=torch.zeros(rows, width, dtype=torch.long),
        attention_mask=mask,
        response_mask=mask,
        sampler_logprobs=logprobs,
        rewards=rewards,
        correct=rewards > 0.5,
        lengths=lengths,
        group_ids=torch.arange(rows) // group,
        is_expert=torch.zeros(rows, dtype=torch.bool),
        advantages=torch.zeros(rows, width),
        extra={"planning_mask": torch.rand(rows, width, generator=generator) < 0.1, "sepa_lambda": 0.5},
    )


def _text(tokens: int, width: int = 500) -> tuple[PreTrainedTokenizerFast, torch.Tensor]:
    """Sampled-looking prose under a byte-level BPE tokenizer of 8,000 entries: half known words, half rare ones."""
    rng = random.Random(0)
    letters = "etaoinshrdlu"
    rare = ["".join(rng.choices(letters, k=rng.randint(2, 10))) for _ in range(6000)]
    words = [rng.choice(rare) if rng.random() < 0.5 else rng.choice(WORDS.split()) for _ in range(30_000)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [" ".join(words)], trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = core.encode(" ".join(words)).ids
    rows = [[ids[(start * 37 + t) % len(ids)] for t in range(width)] for start in range(tokens // width)]
    return tokenizer, torch.tensor(rows)


if __name__ == "__main__":
    main()
