"""Training steps of `retrain` against TRL's GRPOTrainer on a real model: SmolLM2-135M-Instruct learns sums.

Both train on `configs/data/two_digit_sums.jsonl` from the same weights: 4 prompts x 8 completions x at most 48 tokens
a step, reward `number`, GRPO without division by the standard deviation, AdamW, no KL term. A step is everything that a
user waits for: sampling, reward, credit, update, weights back to the sampler and logging.
Repetitions alternate between the systems, each in a fresh process; a figure is the mean over the counted steps of a
repetition, because steps differ in length and in what they can learn from, and a ratio pairs the two figures of one
repetition. The table has the median over repetitions.

Each system samples its own completions, so lengths and shares of live groups differ. Both are printed, with two more
ratios: per sampled token, and per trained token, which is a token of a live group: one whose rewards differ. TRL's
update spends the same on the others; retrain leaves them out.

    retrain model fetch smollm2
    python benchmarks/real.py [--threads 1 2] [--dtypes bfloat16 float32] [--adapters full lora] [--device cuda]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parents[1] / "configs" / "data" / "two_digit_sums.jsonl"
TEMPLATE = "What is {question}? Think briefly, then end with the number."
PROMPTS, GROUP, TOKENS = 4, 8, 48
RANK = 16
SETTLING = 1  # first steps of a process, not counted: allocations, caches
LEARNING_RATES = {"full": 1e-6, "lora": 1e-4}


@dataclass(frozen=True)
class Setting:
    """What is compared: one row of the table for each system."""

    dtype: str
    threads: int
    adapter: str
    device: str = "cpu"

    def __str__(self) -> str:
        place = f"{self.threads} thread{'s' if self.threads > 1 else ''}" if self.device == "cpu" else self.device
        return f"{self.dtype}, {self.adapter}, {place}"


class Stopwatch:
    """Wall and CPU time between calls of `lap`; CPU time is that of this process with its threads."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.start()

    def start(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def lap(self, tokens: float, live: float, reward: float) -> None:
        """End a step of so many sampled tokens, with this share of groups whose rewards differ."""
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        self.rows.append({"wall_s": wall, "cpu_s": cpu, "tokens": tokens, "live": live, "reward": reward})
        self.start()


def run_retrain(setting: Setting, steps: int, seed: int) -> list[dict[str, float]]:
    """`retrain train`, through the function that the command calls, with threads that wait as the command's do."""
    from retrain.config.load import load
    from retrain.system.process import thread_waiting

    thread_waiting.sleep()
    thread_waiting.spin_if_quiet()
    from retrain.run.session import Resume, run

    stopwatch = Stopwatch()

    def observe(event: str, details: Any) -> None:
        if event == "step":
            stopwatch.lap(details["tokens/sampled"], details["groups/informative"], details["reward/mean"])

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "real.toml"
        config.write_text(retrain_toml(setting, steps, seed, folder))
        run(load(config), Resume(), observe)
    return stopwatch.rows


def retrain_toml(setting: Setting, steps: int, seed: int, folder: str) -> str:
    """The run as a file."""
    lora = f"[model.lora]\nr = {RANK}\nalpha = {2 * RANK}" if setting.adapter == "lora" else ""
    return f"""
[model]
path = "builtin:smollm2"
dtype = "{setting.dtype}"
{lora}
[torch]
dtype = "{setting.dtype}"
[task]
name = "jsonl"
[jsonl]
path = "{ROWS}"
heldout_fraction = 0.1
prompt_field = "question"
prompt_template = "{TEMPLATE}"
[[rewards]]
name = "number"
[algorithm]
advantage_mode = "grpo"
[training]
seed = {seed}
max_steps = {steps}
batch_size = {PROMPTS}
group_size = {GROUP}
max_tokens = {TOKENS}
threads = {setting.threads}
[optimizer]
lr = {LEARNING_RATES[setting.adapter]}
[eval]
every = 0
problems = 1
greedy = false
[checkpoint]
every = 0
[logging]
dir = "{folder}"
rollouts_every = 0
"""


def run_trl(setting: Setting, steps: int, seed: int) -> list[dict[str, float]]:
    """TRL's GRPOTrainer with transformers' generate."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from retrain.system.model_paths import SMOLLM2

    torch.set_num_threads(setting.threads)
    stopwatch = Stopwatch()

    class Laps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            stopwatch.start()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "completions/mean_length" in logs:
                tokens = float(logs["completions/mean_length"]) * PROMPTS * GROUP
                stopwatch.lap(tokens, 1 - float(logs["frac_reward_zero_std"]), float(logs["reward"]))

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(SMOLLM2.directory),
            reward_funcs=[last_number],
            args=trl_config(setting, steps, seed, folder),
            train_dataset=Dataset.from_list(trl_rows()),
            processing_class=AutoTokenizer.from_pretrained(str(SMOLLM2.directory), padding_side="left"),
            callbacks=[Laps()],
            peft_config=trl_adapter() if setting.adapter == "lora" else None,
        )
        trainer.train()
    return stopwatch.rows


def trl_config(setting: Setting, steps: int, seed: int, folder: str) -> Any:
    """The same step in TRL's words. bfloat16 is its `bf16`; master weights are float32, as in retrain."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        temperature=1.0,
        scale_rewards="none",
        beta=0.0,
        learning_rate=LEARNING_RATES[setting.adapter],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        bf16=setting.dtype == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        use_cpu=setting.device == "cpu",
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
        seed=seed,
    )


def trl_adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")


def trl_rows() -> list[dict[str, Any]]:
    """The problems as chats, which TRL renders with the model's template as retrain does."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": [{"role": "user", "content": TEMPLATE.format(**row)}], "answer": row["answer"]} for row in rows]


def last_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The reward `number` of retrain, as TRL calls rewards."""
    from retrain.rewards.text import number

    return [number(one[0]["content"], right) for one, right in zip(completions, answer, strict=True)]


SYSTEMS = {"retrain": run_retrain, "trl": run_trl}


def measure(system: str, setting: Setting, steps: int, seed: int) -> dict[str, float]:
    """Means of one repetition, run in a process of its own, and its peak memory."""
    command = [sys.executable, __file__, "--one", system, "--dtypes", setting.dtype, "--adapters", setting.adapter]
    command += ["--threads", str(setting.threads), "--steps", str(steps), "--seed", str(seed)]
    command += ["--device", setting.device]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(setting.threads))
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run(command, env={**os.environ, **threads, **quiet}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{system} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    rows = found["rows"][SETTLING:]
    means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    trained = statistics.fmean(row["tokens"] * row["live"] for row in rows)
    return {**means, "trained": trained, "gib": found["gib"]}


def compare(setting: Setting, arguments: argparse.Namespace) -> None:
    """Alternate the systems and print their figures and ratios."""
    results: dict[str, list[dict[str, float]]] = {system: [] for system in arguments.systems}
    for repetition in range(arguments.repetitions):
        order = arguments.systems if repetition % 2 == 0 else arguments.systems[::-1]
        for system in order:
            row = measure(system, setting, arguments.steps + SETTLING, repetition)
            results[system].append(row)
            shown = {name: round(value, 3) for name, value in row.items()}
            print(setting, system, shown, f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    print(f"\n{setting}: {arguments.repetitions} x {arguments.steps} steps")
    print(f"{'':10}" + "".join(f"{name:>9}" for name in next(iter(results.values()))[0]))
    for system, rows in results.items():
        middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print(f"{system:10}" + "".join(f"{value:9.2f}" for value in middle.values()))
    if {"retrain", "trl"} <= set(results):
        pairs = list(zip(results["trl"], results["retrain"], strict=True))
        for clock in ("wall_s", "cpu_s"):
            for unit in ("step", "tokens", "trained"):
                print(f"{clock} of trl / retrain per {unit}: {ratio(pairs, clock, unit)}")


def ratio(pairs: list[tuple[dict[str, float], dict[str, float]]], clock: str, unit: str) -> str:
    """Median and range of the quotients of seconds per unit; "step" counts every step as one."""
    found = []
    for trl, own in pairs:
        units = own.get(unit, 1.0), trl.get(unit, 1.0)
        if all(units):
            found.append(trl[clock] * units[0] / (own[clock] * units[1]))
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "nothing was trained"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="counted steps per repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[2])
    parser.add_argument("--adapters", nargs="+", default=["full"], choices=LEARNING_RATES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--systems", nargs="+", default=["trl", "retrain"], choices=SYSTEMS)
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    choices = itertools.product(arguments.dtypes, arguments.threads, arguments.adapters, [arguments.device])
    settings = itertools.starmap(Setting, choices)
    if arguments.one:
        rows = SYSTEMS[arguments.one](next(settings), arguments.steps, arguments.seed)
        gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"rows": rows, "gib": gib}))
        return
    for setting in settings:
        compare(setting, arguments)


if __name__ == "__main__":
    main()
