"""One whole training step of `retrain` against TRL's GRPOTrainer: same model, prompts per step, task and core.

A step is everything that a user waits for: sampling, reward, credit, update, weights back to the sampler
and logging. Repetitions alternate between the systems, each in a fresh process; a figure is the median over
the steps of a repetition, and a ratio pairs the two figures of one repetition.

At the smallest shape the model is warm-started and the reward is that of the addition task. At the others (`shapes.py`)
weights are random, every completion has its full length, and the reward differs between completions, so that every
row is live.

    python benchmarks/step.py --steps 10 --repetitions 3 [--shape 135M] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from shapes import SHAPES, Shape, spread

LEARNING_RATE, BETAS = 2e-4, (0.9, 0.95)
SETTLING = 2  # first steps of a process, not counted: allocations, caches
TINY = SHAPES["1.4M"]


class Stepper(Protocol):
    """A trainer that runs `steps` whole steps and reports each."""

    def run(self, model: Path, shape: Shape, dtype: str, steps: int, device: str) -> list[dict[str, float]]:
        """One row a step: wall_s, cpu_s, tokens (mean completion length), reward (mean)."""
        ...


class Stopwatch:
    """Wall and CPU time between calls of `lap`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.start()

    def start(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def lap(self, **facts: float) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.rows.append({"wall_s": wall - self.wall, "cpu_s": cpu - self.cpu, **facts})
        self.start()


class Retrain:
    """`retrain train`, through the function that the command calls."""

    def run(self, model: Path, shape: Shape, dtype: str, steps: int, device: str) -> list[dict[str, float]]:
        from retrain.config.load import load
        from retrain.run.session import Resume, run

        stopwatch = Stopwatch()

        def observe(event: str, details: Any) -> None:
            if event == "step":
                stopwatch.lap(tokens=details["tokens/response"], reward=details["reward/mean"])

        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "bench.toml"
            config.write_text(self.toml(model, dtype, steps, folder, shape=shape, device=device))
            run(load(config), Resume(), observe)
        return stopwatch.rows

    def toml(  # noqa: PLR0913 - what a file says
        self,
        model: Path,
        dtype: str,
        steps: int,
        folder: str,
        threads: int = 1,
        shape: Shape = TINY,
        device: str = "cpu",
    ) -> str:
        reward = "exact" if shape is TINY else "benchmarks.shapes.spread"
        return f"""
            model = {{ path = "{model.resolve()}", dtype = "{dtype}" }}
            torch = {{ dtype = "{dtype}" }}
            task = {{ name = "addition" }}
            optimizer = {{ lr = {LEARNING_RATE}, betas = {list(BETAS)} }}
            warmup = {{ steps = 0 }}
            eval = {{ every = 0, problems = 8 }}
            checkpoint = {{ every = 0 }}
            logging = {{ dir = "{folder}", rollouts_every = 0 }}
            rewards = [{{ name = "{reward}" }}]
            [training]
            seed = 1
            max_steps = {steps}
            batch_size = {shape.prompts}
            group_size = {shape.group}
            max_tokens = {shape.tokens}
            temperature = 1.0
            threads = {threads}
            device = "{device}"
        """


def train_apart(folder: str, text: str, name: str, *flags: str) -> list[dict[str, float]]:
    """Train this TOML, whose logging directory is the folder, in a fresh process; returns its rows of metrics."""
    config = Path(folder) / "bench.toml"
    config.write_text(text)
    command = [sys.executable, "-m", "retrain", "train", str(config), "--plain", "--set", "logging.name=one", *flags]
    variables = {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    lines = (Path(folder) / "one" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


class Trl:
    """TRL's GRPOTrainer with transformers' generate."""

    def run(self, model: Path, shape: Shape, dtype: str, steps: int, device: str) -> list[dict[str, float]]:
        from datasets import Dataset
        from transformers import AutoTokenizer, TrainerCallback
        from trl import GRPOTrainer

        stopwatch = Stopwatch()

        class Laps(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                stopwatch.start()

            def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
                if "completions/mean_length" in logs:
                    stopwatch.lap(tokens=float(logs["completions/mean_length"]), reward=float(logs["reward"]))

        with tempfile.TemporaryDirectory() as folder:
            trainer = GRPOTrainer(
                model=str(model),
                reward_funcs=[exact if shape is TINY else spreads],
                args=self.config(folder, shape, dtype, steps, device),
                train_dataset=Dataset.from_list(addition_rows(shape.prompts * (steps + 1))),
                processing_class=AutoTokenizer.from_pretrained(str(model), padding_side="left"),
                callbacks=[Laps()],
            )
            trainer.train()
        return stopwatch.rows

    def config(self, folder: str, shape: Shape, dtype: str, steps: int, device: str) -> Any:
        from trl import GRPOConfig

        return GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=shape.prompts * shape.group,
            num_generations=shape.group,
            max_completion_length=shape.tokens,
            temperature=1.0,
            scale_rewards="none",
            beta=0.0,
            learning_rate=LEARNING_RATE,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            bf16=dtype == "bfloat16",
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            use_cpu=device == "cpu",
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
            seed=1,
        )


def addition_rows(count: int) -> list[dict[str, str]]:
    """The training problems of the addition task, as TRL wants them."""
    from retrain.data.addition import Addition

    task = Addition(1)
    return [{"prompt": str((problem := task.problem(i)).prompt), "answer": problem.answer} for i in range(count)]


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the number after the final `so` is the answer."""
    found = [re.search(r"so (\d+)\s*$", completion) for completion in completions]
    return [float(match is not None and match[1] == right) for match, right in zip(found, answer, strict=True)]


def spreads(completions: list[str], **_: Any) -> list[float]:
    return [spread(completion) for completion in completions]


def prepare(folder: Path) -> Path:
    """A warm-started `builtin:tiny`, in transformers format."""
    from retrain.data.addition import Addition
    from retrain.training.model.loading import load_model
    from retrain.training.warmup import WarmupSettings, warm_start

    task = Addition(0)
    problems = [task.problem(index) for index in range(12_800)]
    loaded = load_model("builtin:tiny", problems=problems[:2000])
    warm_start(loaded, problems, WarmupSettings(), lambda event, details: None)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


STEPPERS: dict[str, Stepper] = {"retrain": Retrain(), "trl": Trl()}


def measure(system: str, model: Path, dtype: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Medians of one repetition, run in a process of its own on one thread."""
    command = [sys.executable, __file__, "--one", system, "--dtypes", dtype, "--model", str(model)]
    command += ["--shape", arguments.shape, "--device", arguments.device]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, "--steps", str(arguments.steps + arguments.settling)],
        env={**os.environ, **threads, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{system} failed:\n{done.stderr[-3000:]}")
    rows = json.loads(done.stdout.splitlines()[-1])[arguments.settling :]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def compare(arguments: argparse.Namespace, model: Path) -> None:
    """Alternate the systems and print one table."""
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(arguments.repetitions):
        for dtype in arguments.dtypes:
            for system in arguments.systems:
                row = measure(system, model, dtype, arguments)
                results.setdefault((dtype, system), []).append(row)
                print(
                    dtype, system, {name: round(value, 3) for name, value in row.items()}, file=sys.stderr, flush=True
                )
    print(f"{'dtype':10}{'system':10}{'wall s':>9}{'CPU s':>9}{'tokens':>9}{'reward':>9}")
    for (dtype, system), rows in results.items():
        middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print(f"{dtype:10}{system:10}" + "".join(f"{middle[name]:9.3f}" for name in middle))
    for dtype in arguments.dtypes if {"retrain", "trl"} <= set(arguments.systems) else ():
        pairs = list(zip(results[dtype, "trl"], results[dtype, "retrain"], strict=True))
        for clock in ("wall_s", "cpu_s"):
            ratios = [trl[clock] / own[clock] for trl, own in pairs]
            by_token = [trl[clock] * own["tokens"] / (own[clock] * trl["tokens"]) for trl, own in pairs]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"{dtype}, {clock}: trl / retrain = {statistics.median(ratios):.2f} ({spread}); "
                f"per sampled token {statistics.median(by_token):.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="counted steps per repetition")
    parser.add_argument("--settling", type=int, default=SETTLING, help="first steps of a process, not counted")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="1.4M")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--systems", nargs="+", default=["trl", "retrain"], choices=STEPPERS)
    parser.add_argument("--model", type=Path, help="a model directory; default: a warm-started builtin:tiny")
    parser.add_argument("--one", choices=STEPPERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        shape, dtype = SHAPES[arguments.shape], arguments.dtypes[0]
        print(json.dumps(STEPPERS[arguments.one].run(arguments.model, shape, dtype, arguments.steps, arguments.device)))
        return
    make = prepare if arguments.shape == "1.4M" else SHAPES[arguments.shape].save
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments, arguments.model or make(Path(folder)))


if __name__ == "__main__":
    main()
