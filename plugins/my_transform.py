"""A token transform as a plain function of one group.

transform_mode = "plugins.my_transform.my_transform"
"""

from __future__ import annotations

from retrain import TransformContext, TransformOutput


def my_transform(ctx: TransformContext) -> TransformOutput:
    """Every token of completion i gets A_i times `scale`, a key of `[algorithm.transform_params]`."""
    scale = float(ctx.params.get("scale", 1.0))
    token_advs = [[ctx.episode_advantages[i] * scale] * len(logprobs) for i, logprobs in enumerate(ctx.logprobs_G)]
    return TransformOutput(token_advs=token_advs, extra_metrics={"my_transform/scale": scale})
