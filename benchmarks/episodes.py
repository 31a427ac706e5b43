"""What episodes of several turns cost, in four parts.

The driver and the pool of live episodes: a sampler that takes no time and an environment that answers at once, 128
episodes of four turns.

Slow tools: a tool sleeps 0 to 300 ms, 16 groups of one episode in 8 workers, and a sampling call takes 50 ms whatever
it is asked for. Each worker's groups go on by themselves, and engines take requests as they come, against one barrier
at which all groups wait for the slowest.

Contexts: the next turn of 32 episodes in the embedded engine, a reply of 8 tokens to 8 new ones, by the length of what
the episodes have said before. CPU seconds if the engine keeps their keys and values, and if it computes them again.

Steps: a whole step of `configs/calculator.toml` against one of the same file with the task addition, which is
answered in one turn; in pairs on one thread, per sampled token. CPU time is the trainer's own; the wall time has the
workers of the environment in it.

    python benchmarks/episodes.py
"""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.config.load import load
from retrain.environments.contract import Limits
from retrain.environments.env_pool import EnvPool, Launch
from retrain.environments.env_process import Hello
from retrain.run.episodes import EpisodeRunner
from retrain.run.session import Resume, run
from retrain.training.chat import Chat
from retrain.types import Completion, Problem, Request, Sampling

LIMITS = Limits(8, 8, 64, 64)
REPLY = Completion((65, 66, 67, 0), (-0.5,) * 4, "stop")
SAMPLING_S = 0.05
CALCULATOR = (Path(__file__).parents[1] / "configs" / "calculator.toml").read_text()
SETTLING, STEPS = 2, 10


class Bytes:
    """A tokenizer of one byte each; 0 ends a reply."""

    chat_template, eos_token_id = None, 0
    added_tokens_decoder: Mapping[int, Any] = {}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token).decode()


class Instant:
    """A sampler that takes this many seconds for a call."""

    max_model_len = float("inf")

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        time.sleep(self.seconds)
        return [[REPLY] * request.count for request in requests]


class AsTheyCome(Instant):
    """Samples each request by itself, any number of them at once."""

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        await asyncio.sleep(self.seconds)
        return [REPLY] * request.count


def played(
    environment: str, sampler: Instant, workers: int, groups: int, count: int, lanes: int | None = None
) -> float:
    """Seconds to play this many groups of episodes."""
    hello = Hello(environment, f"slow_tools.{environment}", {}, (str(Path(__file__).parent),), 60.0, LIMITS)
    pool = EnvPool(Launch({"": hello}, memory_mb=0), workers, max_failed=0.0).start()
    pool.lanes = lanes or pool.lanes
    chat = Chat(Bytes(), 0)
    posed = [(Problem(str(n), "what?", "x"), chat.prompt("what?")) for n in range(groups)]
    requests = [Request(prompt.ids, count, LIMITS.max_tokens, n) for n, (_, prompt) in enumerate(posed)]
    began = time.perf_counter()
    rollouts = EpisodeRunner(sampler, chat, Sampling(stop_ids=(0,)), pool).roll(posed, requests)  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    assert {len(one.turns) for one in rollouts} == {4}
    pool.close()
    return seconds


def best(function: Callable[[], float], repetitions: int = 5) -> str:
    """The least and the median of some repetitions."""
    found = sorted(function() for _ in range(repetitions))
    return f"{found[0]:.3f} (median {statistics.median(found):.3f})"


def contexts() -> None:
    """What a turn costs in the embedded engine."""
    import torch
    import transformers as hf

    from retrain.engines.torch_engine import TorchEngine

    torch.set_num_threads(1)
    config = hf.Qwen3Config(
        vocab_size=128, hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=1, head_dim=32,
        intermediate_size=704, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    engine = TorchEngine(hf.Qwen3ForCausalLM(config).eval(), dtype="float32")
    for length in (64, 256, 1024):
        first = [Request(tuple([n + 1] * (length - 8)), 1, 8, n) for n in range(32)]

        def seconds(continued: bool, first: list[Request] = first) -> float:
            sampling = Sampling(continued=continued)
            rows = engine.sample(first, sampling)
            said = [(*request.ids, *row.ids, *range(8)) for request, [row] in zip(first, rows, strict=True)]
            requests = [Request(ids, 1, 8, 100 + n) for n, ids in enumerate(said)]
            began = time.process_time()
            engine.sample(requests, sampling)
            return time.process_time() - began

        kept, again = (min(seconds(continued) for _ in range(4)) for continued in (True, False))
        print(f"context {length:>5}: kept {kept:.3f} CPU s, computed again {again:.3f}, ratio {again / kept:.1f}")


def stepped(toml: str) -> tuple[float, float, float]:
    """Medians over some steps of a run: CPU and wall microseconds per sampled token, and sampled tokens a step."""
    rows: list[tuple[float, float, float]] = []
    clock = [time.process_time(), time.perf_counter()]

    def observe(event: str, details: Mapping[str, Any]) -> None:
        if event == "step":
            now, tokens = [time.process_time(), time.perf_counter()], details["tokens/response"] * 16 * 8
            cpu, wall = (1e6 * (after - before) / tokens for after, before in zip(now, clock, strict=True))
            rows.append((cpu, wall, tokens))
            clock[:] = now

    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "run.toml").write_text(toml)
        limits = [
            f"training.max_steps={SETTLING + STEPS}",
            "training.threads=1",
            "eval.problems=0",
            "checkpoint.every=0",
        ]
        run(load(file, [f'logging.dir="{folder}"', "logging.rollouts_every=0", *limits]), Resume(), observe)
    cpu, wall, tokens = (statistics.median(column) for column in zip(*rows[SETTLING:], strict=True))
    return cpu, wall, tokens


def steps(pairs: int = 5) -> None:
    """What a sampled token costs in a step of several turns and in one of a single turn."""
    single = re.sub(r"(?s)\[environment\].*?(?=\[training\])", "", CALCULATOR).replace('"sums"', '"addition"')
    found = [(stepped(CALCULATOR), stepped(single)) for _ in range(pairs)]
    for name, place in (("calculator", 0), ("one turn", 1)):
        cpu, wall, tokens = (statistics.median(column) for column in zip(*(pair[place] for pair in found), strict=True))
        print(f"a step of {name}: {cpu:.1f} CPU us, {wall:.1f} us wall a sampled token, {tokens:.0f} tokens")
    for clock in (0, 1):
        ratios = sorted(several[clock] / one[clock] for several, one in found)
        middle, name = statistics.median(ratios), ("CPU", "wall")[clock]
        print(f"  calculator / one turn, {name}: {middle:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")


def main() -> None:
    """Print all of it."""
    turns = 128 * 4
    print("driver and pool, ms a turn:", best(lambda: 1000 * played("at_once", Instant(), 1, 16, 8) / turns))
    print("slow tools, one barrier, s:", best(lambda: played("asleep", Instant(SAMPLING_S), 8, 16, 1, lanes=1), 3))
    print("slow tools, a barrier for each worker, s:", best(lambda: played("asleep", Instant(SAMPLING_S), 8, 16, 1), 3))
    print("slow tools, as they come, s:", best(lambda: played("asleep", AsTheyCome(SAMPLING_S), 8, 16, 1), 3))
    contexts()
    steps()


if __name__ == "__main__":
    main()
