"""What ranks cost where there is one: the update of a group of one rank against that of a process without ranks.

The rank's weights are whole, as `[distributed] shard = "auto"` has them, or go through FSDP2, as "full" has them. All
have the model and batch of `update.py`; they take turns in every repetition, in an order that is drawn. Figures are CPU
seconds of one core; a ratio pairs two of one repetition, and its interval is of the median of the ratios.

    OMP_NUM_THREADS=1 python benchmarks/ranks.py [--repetitions 30]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time

import torch
from update import BETAS, LEARNING_RATE, make_batch, model

from retrain.algorithms.graph.objective import Objective
from retrain.registry import find
from retrain.training.distributed.ranks import ALONE, RENDEZVOUS, Ranks, join
from retrain.training.policy import TorchPolicy
from retrain.training.settings import PolicySettings, Shard


def policy(ranks: Ranks, shard: Shard) -> TorchPolicy:
    settings = PolicySettings(lr=LEARNING_RATE, betas=BETAS, shard=shard)
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
        policies = {"alone": policy(ALONE, "none"), "one rank": policy(ranks, "none"), "FSDP2": policy(ranks, "full")}
        seconds: dict[str, list[float]] = {name: [] for name in policies}
        for _ in range(repetitions + 1):
            for name in rng.sample(sorted(policies), len(policies)):
                began = time.process_time()
                policies[name].update(batch, objective)
                seconds[name].append(time.process_time() - began)
        weights = [one.weights() for one in policies.values()]
        same = all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in other)
        ranks.leave()
    for name in ("one rank", "FSDP2"):
        ratios = [b / a for a, b in zip(seconds["alone"][1:], seconds[name][1:], strict=True)]
        medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
        both = [statistics.median(seconds[one][1:]) for one in ("alone", name)]
        print(f"alone {both[0]:.3f} s, {name} {both[1]:.3f} s of CPU an update: ", end="")
        print(f"ratio {statistics.median(ratios):.3f}, 95% interval {medians[50]:.3f} to {medians[1949]:.3f}")
    print(f"the same bits after {repetitions + 1} updates: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
