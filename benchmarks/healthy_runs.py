"""Count how often the findings of a run speak although the run is healthy.

Trains shipped configurations for 20 steps of 4 x 8 completions on the quickstart's task, with several seeds each, and
counts the findings in the stored runs. In all of these runs the policy learns, so every finding is a false alarm.

    OMP_NUM_THREADS=1 python benchmarks/healthy_runs.py runs/healthy [--seeds 12] [--only quickstart dapo ...]
    OMP_NUM_THREADS=1 python benchmarks/healthy_runs.py runs/healthy --count   the table of docs/troubleshooting.md
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path

from retrain.config.load import load
from retrain.report.run_summary import status
from retrain.run.findings import FINDINGS
from retrain.run.session import Resume, run

ROOT = Path(__file__).resolve().parents[1]
AHEAD = "overlap"
"""The quickstart with rollouts that are two steps old."""
FILES = (
    AHEAD,
    *("quickstart", "grpo", "maxrl", "dr_grpo", "cispo", "gspo", "dapo", "hicra", "sepa", "dca", "gdpo", "grpo_lp"),
    *(f"methods/{name}" for name in ("ppo", "opo", "remax", "sapo", "lite_ppo", "clip_cov")),
)
SETTINGS = (
    *('task.name="strategy"', "training.max_steps=20", "training.batch_size=4", "training.group_size=8"),
    *("training.lr=3e-4", 'optimizer.schedule="constant"', "reward_pool.workers=0"),
    *("eval.every=20", "eval.problems=128", "eval.greedy=false", "checkpoint.every=0"),
)


def warm_started(folder: Path) -> Path:
    """Return the model that all runs start from: that of the quickstart after its warm start."""
    if not (folder / "start" / "model").is_dir():
        sets = ("training.max_steps=0", "eval.problems=0", f'logging.dir="{folder}"', 'logging.name="start"')
        run(load(ROOT / "configs" / "quickstart.toml", sets), Resume("fresh"), lambda event, details: None)
    return folder / "start" / "model"


def train(folder: Path, name: str, seed: int) -> None:
    """Train one run, unless it has been trained before."""
    label = f"{name.replace('/', '-')}-s{seed}"
    if (folder / label / "model").is_dir():
        return
    began = time.process_time()
    sets = (*SETTINGS, f'model.path="{warm_started(folder)}"', f"training.seed={seed}", f'logging.dir="{folder}"')
    sets = (*sets, f'logging.name="{label}"')
    if name == AHEAD:
        name, sets = "quickstart", (*sets, "rollout.overlap=2", "reward_pool.workers=1")
    run(load(ROOT / "configs" / f"{name}.toml", sets), Resume("fresh"), lambda event, details: None)
    print(f"{label}: {time.process_time() - began:.1f} s of CPU time", flush=True)


def count(folder: Path) -> None:
    """Print how often each finding speaks."""
    runs = sorted(path.parent for path in folder.glob("*-s*/model"))
    spoke: defaultdict[str, list[str]] = defaultdict(list)
    for path in runs:
        for one in status(path)["findings"]:
            spoke[one["name"]].append(f"{path.name}: {one['text']}")
    print(f"| finding | speaks in {len(runs)} healthy runs | share |\n|---|---|---|")
    for one in FINDINGS:
        print(f"| `{one.__name__}` | {len(spoke[one.__name__])} | {len(spoke[one.__name__]) / len(runs):.1%} |")
    for lines in spoke.values():
        print(*lines, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--only", nargs="+", default=FILES)
    parser.add_argument("--count", action="store_true")
    given = parser.parse_args()
    if given.count:
        return count(given.folder)
    for seed in range(given.seeds):
        for name in given.only:
            train(given.folder, name, seed)


if __name__ == "__main__":
    main()
