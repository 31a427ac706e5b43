"""What ranks cost where there is one: the update of a group of one rank against that of a process without ranks.

Both have the model and batch of `update.py`; they take turns in every repetition, the first is drawn. Figures are CPU
seconds of one core; a ratio pairs the two of one repetition, and its interval is of the median of the ratios.

    OMP_NUM_THREADS=1 python benchmarks/ranks.py [--repetitions 30]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from update import BETAS, LEARNING_RATE, make_batch, model

from retrain.algorithms.graph.objective import Objective
from retrain.registry import find
from retrain.training.policy import TorchPolicy
from retrain.training.ranks import ALONE, RENDEZVOUS, Ranks, join
from retrain.training.settings import PolicySettings


def policy(ranks: Ranks) -> TorchPolicy:
    settings: Any = PolicySettings(lr=LEARNING_RATE, betas=BETAS)
    return TorchPolicy(model(), settings, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=30)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    objective = Objective([find("loss", "ppo_clip").bind({})], find("reduction", "token_mean").bind({}))
    batch, rng = make_batch(), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", RENDEZVOUS: f"file://{folder}/store"}
        ranks = join("cpu", 60)
        policies, seconds = {"alone": policy(ALONE), "one rank": policy(ranks)}, dict[str, list[float]]()
        for _ in range(repetitions + 1):
            for name in rng.sample(sorted(policies), 2):
                began = time.process_time()
                policies[name].update(batch, objective)
                seconds.setdefault(name, []).append(time.process_time() - began)
        weights = [one.weights() for one in policies.values()]
        same = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        ranks.leave()
    alone, one = (found[1:] for found in (seconds["alone"], seconds["one rank"]))
    ratios = [b / a for a, b in zip(alone, one, strict=True)]
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    print(f"alone {statistics.median(alone):.3f} s, one rank {statistics.median(one):.3f} s of CPU an update")
    print(f"ratio {statistics.median(ratios):.3f}, 95% interval {medians[50]:.3f} to {medians[1949]:.3f}")
    print(f"the same bits after {repetitions + 1} updates: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
