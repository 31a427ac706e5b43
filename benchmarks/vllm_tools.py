"""Episodes with slow tools on a real vLLM in this process: batches, against requests that join others.

32 episodes of 16 turns. A reply has four tokens, and the tool sleeps 0 to 300 ms before it answers. One worker with 32
threads, so that tools overlap either way: in batches every turn waits for the slowest of them. Seconds of pairs that
alternate, and their ratio; a model of 1.4 million parameters, float32.

    .venv-vllm/bin/python benchmarks/vllm_tools.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from retrain.engines.vllm.in_process import VllmEngine
from retrain.environments.contract import Limits
from retrain.environments.env_pool import EnvPool, Launch
from retrain.environments.env_process import Hello
from retrain.protocols import Sampler
from retrain.run.episodes import EpisodeRunner
from retrain.training.chat import Chat
from retrain.types import Completion, Problem, Request, Sampling

EPISODES, TURNS, PAIRS = 32, 16, 3
LIMITS = Limits(TURNS, 4, 64, TURNS * 4)


class Latin:
    """A tokenizer of one character each."""

    chat_template, eos_token_id = None, 0
    added_tokens_decoder: Mapping[int, Any] = {}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode("latin-1"))}

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("latin-1")


class InBatches(Sampler):
    """Samples in batches."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine, self.max_model_len = engine, engine.max_model_len

    def load_weights(self, weights: Any, version: int) -> None:
        """The engine has them."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return self.engine.sample(requests, sampling)


def seconds(sampler: Sampler, pool: EnvPool) -> float:
    """To play all episodes."""
    chat = Chat(Latin(), 0)
    posed = [(Problem(str(n), "what?", "x"), chat.prompt("what?")) for n in range(EPISODES)]
    requests = [Request(prompt.ids, 1, LIMITS.max_tokens, n) for n, (_, prompt) in enumerate(posed)]
    began = time.perf_counter()
    rollouts = EpisodeRunner(sampler, chat, Sampling(), pool).roll(posed, requests)
    assert {(len(one.turns), one.ended) for one in rollouts} == {(TURNS, "turns")}
    return time.perf_counter() - began


def engine(folder: Path) -> Any:
    """vLLM with a small model."""
    config = hf.Qwen3Config(
        vocab_size=256, hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=1, head_dim=32,
        intermediate_size=704, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    model = hf.Qwen3ForCausalLM(config).eval()
    found = VllmEngine(model, 0, torch.device("cpu"), folder, "float32", dtype="float32", kv_cache_mb=64)
    found.load_weights(model.state_dict(), 0)
    return found


def main() -> None:
    """Print all of it."""
    hello = Hello("always_asleep", "slow_tools.always_asleep", {}, (str(Path(__file__).parent),), 60.0, LIMITS)
    pool = EnvPool(Launch({"": hello}, memory_mb=0, threads=EPISODES)).start()
    pool.in_step = True  # batches wait for all episodes
    with tempfile.TemporaryDirectory() as folder:
        vllm = engine(Path(folder))
        seconds(vllm, pool)
        pairs = [(seconds(InBatches(vllm), pool), seconds(vllm, pool)) for _ in range(PAIRS)]
        vllm.close()
    pool.close()
    ratio = statistics.median(batches / free for batches, free in pairs)
    print("batches, s:", *(f"{batches:.2f}" for batches, _ in pairs))
    print("as they come, s:", *(f"{free:.2f}" for _, free in pairs))
    print(f"ratio, median of {PAIRS} pairs: {ratio:.2f}")


if __name__ == "__main__":
    main()
