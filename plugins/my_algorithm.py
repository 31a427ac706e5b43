"""A whole algorithm as a plain function of one group: from rewards to one advantage per token.

algorithm_mode = "plugins.my_algorithm.my_algorithm"
"""

from __future__ import annotations

from retrain import TransformContext, TransformOutput


def my_algorithm(ctx: TransformContext) -> TransformOutput:
    """A_it = (r_i - mean r) w_t, with w_t = 1 on planning tokens and `execution_weight` elsewhere.

    `execution_weight` is a key of `[algorithm.params]`. `algorithm_mode` replaces the advantage, so the
    credit starts from `ctx.rewards`.
    """
    execution_weight = float(ctx.params.get("execution_weight", 0.5))
    mean = sum(ctx.rewards) / max(len(ctx.rewards), 1)
    token_advs = [
        [(reward - mean) * (1.0 if planning else execution_weight) for planning in mask]
        for reward, mask in zip(ctx.rewards, ctx.planning_masks_G, strict=True)
    ]
    return TransformOutput(token_advs=token_advs)
