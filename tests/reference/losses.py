"""Policy losses of one token, as the formulas are printed."""

import math


def clip(value, low, high):
    return min(max(value, low), high)


def ratio(lp, old):
    return math.exp(clip(lp - old, -20.0, 20.0))


def ppo_clip(lp, old, advantage, eps_low=0.2, eps_high=0.2, dual=None):
    rho = ratio(lp, old)
    gain = min(rho * advantage, clip(rho, 1 - eps_low, 1 + eps_high) * advantage)
    if dual is not None and advantage < 0:
        gain = max(gain, dual * advantage)
    return -gain


def gspo(lps, olds, advantage, eps_low=3e-4, eps_high=4e-4):
    s = math.exp(sum(a - b for a, b in zip(lps, olds, strict=True)) / len(lps))
    return -min(s * advantage, clip(s, 1 - eps_low, 1 + eps_high) * advantage)


def gspo_token(lps, olds, advantages, eps_low=3e-4, eps_high=4e-4):
    """GSPO-token, arXiv:2507.18071, equations 13 and 14: the loss of each token and its derivative by that token's lp.

    s_t = sg(s) * p_t / sg(p_t) has the value s and the derivative s by lp_t; a clipped token has none.
    """
    s = math.exp(sum(a - b for a, b in zip(lps, olds, strict=True)) / len(lps))
    values, derivatives = [], []
    for advantage in advantages:
        free, bound = s * advantage, clip(s, 1 - eps_low, 1 + eps_high) * advantage
        values.append(-min(free, bound))
        derivatives.append(-s * advantage if free <= bound else 0.0)
    return values, derivatives


def cispo(lp, old, advantage, eps_max=5.0):
    return -min(ratio(lp, old), eps_max) * advantage * lp


def kl(lp, ref, estimator):
    d = lp - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
