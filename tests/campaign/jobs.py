"""Campaigns whose runs end at once, in a way that the test decides: the machinery without the training.

The runs are real processes of the real command. What ends them is their plug-in, when it is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.forks import RETRAIN, run_command

PLUGIN = """
import ctypes, json, os, signal, sys, time
from pathlib import Path

end = ctypes.CDLL(None)._exit  # os._exit is refused while a plug-in is imported

def advantage(rewards):
    return rewards

if "train" in sys.argv:  # not where somebody else only checks the configuration
    run = Path(sys.argv[sys.argv.index("train") + 1]).parent
    signal.signal(signal.SIGTERM, lambda *_: end(75))
    with open("ran.txt", "a") as file:
        file.write(f"{run.parent.name}/{run.name}\\n")
    codes = json.loads(Path("codes.json").read_text()).get(run.parent.name, [0])
    earlier = Path("ran.txt").read_text().split().count(f"{run.parent.name}/{run.name}") - 1
    code = codes[min(earlier, len(codes) - 1)]
    while code == "hang":
        time.sleep(0.1)  # a signal in front of a long wait would be handled after it
    for folder in ("checkpoints/step-000001", "best/step-000001", "model"):
        (run / folder).mkdir(parents=True, exist_ok=True)
        (run / folder / "weights").write_text("1")
    print("imported already:", "retrain.run.build" in sys.modules)
    print(f"ends with {code}", flush=True)
    if code == "vanish":
        end(0)
    if code == 0:
        (run / "status.json").write_text('{"outcome": "finished"}')
    if code < 0:
        os.kill(os.getpid(), -code)
    end(code)
"""

RANKS = """
import ctypes, os, sys
from pathlib import Path

def advantage(rewards):
    return rewards

if "RANK" in os.environ:
    names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    with open("ranks.txt", "a") as file:
        file.write(" ".join(os.environ.get(name) or "-" for name in names) + "\\n")
    (Path(sys.argv[sys.argv.index("train") + 1]).parent / "status.json").write_text('{"outcome": "finished"}')
    ctypes.CDLL(None)._exit(0)
"""
"""Instead of PLUGIN: every rank of a run writes down what it sees, and ends well."""

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def write(folder: Path, conditions: dict[str, list], seeds: int = 1, **settings) -> None:
    """Write sweep.toml: a condition per label, each with the exit codes of its first, second ... start."""
    (folder / "ending.py").write_text(PLUGIN)
    (folder / "codes.json").write_text(json.dumps(conditions))
    lines = ["[campaign]", f"seeds = {seeds}", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    for index, label in enumerate(conditions):
        lines += ["[[campaign.conditions]]", f'label = "{label}"', f"training.max_steps = {index + 1}"]
    lines += ["[algorithm]", 'advantage_mode = "ending.advantage"', "[warmup]", "steps = 0", "[eval]", "problems = 0"]
    (folder / "sweep.toml").write_text("\n".join(lines) + "\n")


def write_ranks(folder: Path, size: int, **settings) -> None:
    """Write sweep.toml: two runs, each of `size` ranks."""
    write(folder, {"wide": [0]}, seeds=2, ranks=size, **settings)
    (folder / "ending.py").write_text(RANKS)


def seen(folder: Path) -> list[tuple[str, ...]]:
    """(rank, ranks, GPUs, threads) of every rank that was started, sorted."""
    return sorted(tuple(line.split()) for line in (folder / "ranks.txt").read_text().splitlines())


def command(*arguments: str) -> list[str]:
    """The command, as a list of words."""
    return [RETRAIN, *arguments]


def installed(*arguments: str) -> list[str]:
    """The command, started in full: its runs are its descendants, not those of the server of forks."""
    return [str(Path(sys.executable).parent / "retrain"), *arguments]


def retrain(folder: Path, *arguments: str, code: int | None = None) -> subprocess.CompletedProcess:
    """Run the command to its end."""
    return run_command(*arguments, cwd=folder, environment=ENVIRONMENT, code=code)


def ran(folder: Path) -> list[str]:
    """CONDITION/sSEED of every start, in order."""
    file = folder / "ran.txt"
    return file.read_text().split() if file.exists() else []


def outcomes(folder: Path, name: str = "sweep") -> dict[str, dict]:
    """outcome.json by CONDITION/sSEED."""
    files = (folder / "runs" / name / "cells").glob("*/*/outcome.json")
    return {f"{file.parent.parent.name}/{file.parent.name}": json.loads(file.read_text()) for file in files}
