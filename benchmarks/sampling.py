"""Time of one sampling call, paired against transformers' generate on one core.

    python benchmarks/sampling.py [--repeats 9] [--threads 1]

Every engine samples the same prompts from the same weights; in a round each engine runs once, and the ratio is taken
within the round, so that other load on the machine falls on all of them. "full" makes every completion 64 tokens
long, whatever is sampled: the engines then do the same work. "ragged" has stop ids that end a completion after 31
tokens on average, which generate cannot use before its longest row has ended. The rows "with LoRA" multiply by the base
and by an adapter of rank 16 apart, as they do while LoRA is trained; without an adapter they are the rows above.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from retrain.engines.generate_engine import GenerateEngine
from retrain.engines.torch_engine import TorchEngine
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from retrain.types import Request, Sampling

PROMPTS, GROUP, TOKENS = 16, 8, 64
STOPS = {"full": (), "ragged": (2, 5, 7)}


def model() -> Qwen3ForCausalLM:
    """1.4 M parameters, random; its distributions are close to uniform over 128 tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=704,
        vocab_size=128,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def measure(stops: tuple[int, ...], repeats: int) -> dict[str, list[tuple[float, int]]]:
    """CPU seconds and tokens of every engine in every round."""
    trained = model()
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(6, 13, (PROMPTS,), generator=generator).tolist()
    prompts = [torch.randint(8, 128, (length,), generator=generator).tolist() for length in lengths]
    engines = {
        "transformers generate, float32": GenerateEngine(trained),
        "transformers generate, bfloat16": GenerateEngine(model().bfloat16()),
        "torch, general, float32": TorchEngine(trained, dtype="float32", fused=False),
        "torch, general, bfloat16": TorchEngine(trained, dtype="bfloat16", fused=False),
        "torch, fused, float32": TorchEngine(trained, dtype="float32"),
        "torch, fused, bfloat16": TorchEngine(trained, dtype="bfloat16"),
    }
    for dtype in ("float32", "bfloat16"):
        policy = TorchPolicy(model().to(getattr(torch, dtype)), PolicySettings(lora=LoraSettings()))
        engines[f"torch, fused, {dtype}, with LoRA"] = adapted = TorchEngine(policy.adapter, dtype=dtype)
        adapted.load_weights(policy.weights(), 0)
    rounds: dict[str, list[tuple[float, int]]] = {name: [] for name in engines}
    for turn in range(repeats + 1):
        sampling = Sampling(stop_ids=stops, seed=turn)
        requests = [Request(tuple(ids), GROUP, TOKENS, stream) for stream, ids in enumerate(prompts)]
        for name, engine in engines.items():
            start = time.process_time()
            groups = engine.sample(requests, sampling)
            seconds = time.process_time() - start
            if turn:  # the first round warms up
                rounds[name].append((seconds, sum(len(row.ids) for group in groups for row in group)))
    return rounds


def report(title: str, rounds: dict[str, list[tuple[float, int]]]) -> None:
    """One line per engine; the ratios are to both baselines, above 1 is faster."""
    exact, half = (rounds[f"transformers generate, {dtype}"] for dtype in ("float32", "bfloat16"))
    print(f"\n{title}: {PROMPTS} prompts x {GROUP} completions x <= {TOKENS} tokens, medians of {len(exact)} rounds")
    print(f"{'engine':36}{'CPU s':>8}{'tokens':>8}{'tokens/s':>10}{'x float32':>11}{'x bfloat16':>12}")
    for name, row in rounds.items():
        seconds, tokens = median(time for time, _ in row), median(count for _, count in row)
        ratios = [median(b[0] / r[0] for b, r in zip(base, row, strict=True)) for base in (exact, half)]
        print(f"{name:36}{seconds:8.3f}{tokens:8.0f}{tokens / seconds:10.0f}{ratios[0]:11.2f}{ratios[1]:12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for title, stops in STOPS.items():
        report(title, measure(stops, options.repeats))


if __name__ == "__main__":
    main()
