"""Which tokens give credit its noise? Shares of signal and variance of the tokens that a policy hardly ever samples.

    python benchmarks/evidence/noise_of_credit.py RUN [BATCHES [CONTINUATIONS]]

For the true advantage, GRPO's credit and GTPO's, prints what remains of the gradient at the start of a run if only some
tokens keep their credit: the share of the tokens; the signal, <E x, g*> relative to that of the whole credit, with g*
the policy gradient; the variance, tr Cov x relative to that of the whole credit; the bias; and the effective batch
relative to that of the true advantage on all tokens, with its 95% interval. docs/audit.md explains the figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from scipy.special import stdtrit
from torch import Tensor

from retrain.lab.audit import gradient_quality as G
from retrain.lab.audit.credit_audit import BatchSampler, MeasuredBatch, policy_reduction
from retrain.lab.audit.methods import Method
from retrain.run.reopen import reopen
from retrain.run.run_context import RunContext

RARE = 0.1
"""Largest probability of a token that counts as rarely sampled."""
SHARP = 0.9
"""Share of the tokens, those with the lowest entropy, at which the policy counts as sharp."""


def kinds(batches: Sequence[MeasuredBatch]) -> dict[str, list[Tensor]]:
    """Masks [N, T] of every batch, by what they keep."""
    own = [one.batch.response_mask for one in batches]
    entropy = [one.batch.column("entropy") for one in batches]
    rare = [one.batch.column("old_logprobs").exp() < RARE for one in batches]
    edge = torch.cat([values[mask] for values, mask in zip(entropy, own, strict=True)]).quantile(SHARP)
    sharp = [values <= edge for values in entropy]
    found = {
        "all tokens": own,
        f"sampled with a probability below {RARE:g}": rare,
        f"probability of at least {RARE:g}": [~one for one in rare],
        f"entropy in the lower {SHARP:.0%}": sharp,
        f"entropy in the upper {1 - SHARP:.0%}": [~one for one in sharp],
    }
    return {name: [mask & kept for mask, kept in zip(own, one, strict=True)] for name, one in found.items()}


def report(context: RunContext, batches: Sequence[MeasuredBatch]) -> None:
    """Print the table."""
    weights = [policy_reduction(context.trained.objective)(one.batch) for one in batches]
    quantile = float(stdtrit(len(batches) - 1, 0.975))

    def gradients(credit: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
        parts = zip(batches, weights, credit, masks, strict=True)
        gradient = context.trained.policy.gradient
        return torch.stack([gradient(one.batch, weight * x * mask) for one, weight, x, mask in parts])

    def oracle(masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        first, second = (gradients([getattr(one, name) for one in batches], masks) for name in ("first", "second"))
        return (first + second) / 2, (first * second).sum(-1)

    def of(name: str) -> Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]:
        method = Method(context, name)
        credit = [method(one.batch, index) for index, one in enumerate(batches)]

        def gradient(masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            x = gradients(credit, masks)
            return x, x.square().sum(-1)

        return gradient

    every = kinds(batches)
    true, squares = oracle(every["all tokens"])
    best = G.quality(true, true, squares).effective_snr
    total = sum(int(mask.sum()) for mask in every["all tokens"])
    print(f"{'credit':<8}{'kept':<42}{'tokens':>7}{'signal':>8}{'variance':>10}{'bias':>7}  of the oracle's")
    for name, credit in {"oracle": oracle, "grpo": of("grpo"), "gtpo": of("gtpo")}.items():
        whole: tuple[float, float] | None = None
        for kind, masks in every.items():
            x, squares = credit(masks)
            found = G.quality(x, true, squares)
            signal = float(G.inner(x, true)[0])
            variance = float((G.mean(squares) - G.inner(x, x))[0])
            whole = whole or (signal, variance)
            value, low, high = G.log_interval(found.effective_snr / best, quantile).tolist()
            share = sum(int(mask.sum()) for mask in masks) / total
            print(
                f"{name:<8}{kind:<42}{share:>7.1%}{signal / whole[0]:>8.2f}{variance / whole[1]:>10.2f}"
                f"{float(found.bias[0]):>7.3f}  {value:.2f} [{low:.2f}, {high:.2f}]",
                flush=True,
            )


def main(run: str, batches: int = 32, continuations: int = 4) -> None:
    """Measure batches of the run's initial policy and print the table."""
    context = reopen(Path(run), (), lambda *_: None, parts="initial")
    try:
        sampler = BatchSampler(context, continuations)
        report(context, [sampler.batch(index) for index in range(batches)])
    finally:
        context.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
