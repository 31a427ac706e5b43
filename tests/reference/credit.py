"""Credit assignment for one group, as the formulas are printed."""

import math


def mean(values):
    return sum(values) / len(values)


def population_std(values):
    m = mean(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / len(values))


def grpo(rewards):
    return [r - mean(rewards) for r in rewards]


def grpo_std(rewards, eps=1e-8):
    sd = population_std(rewards)
    return [0.0 if sd < eps else (r - mean(rewards)) / (sd + eps) for r in rewards]


def maxrl(rewards, eps=1e-6):
    m = mean(rewards)
    return [0.0 if m <= eps else (r - m) / (m + eps) for r in rewards]


def rloo(rewards):
    if len(rewards) == 1:
        return [0.0]
    return [r - mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def dca(correct, lengths, beta, dynamic, loo):
    n, eps = sum(correct), 1e-8
    accuracy = [float(c) for c in correct]
    s = {}
    if n:
        ls = [length for length, c in zip(lengths, correct, strict=True) if c]
        sd = population_std(ls)
        for i, c in enumerate(correct):
            if c:
                z = 0.0 if sd < eps else (lengths[i] - mean(ls)) / (sd + eps)
                s[i] = 1 / (1 + math.exp(-min(max(z, -20), 20)))
    result = []
    for i, base in enumerate(rloo(accuracy) if loo else grpo_std(accuracy)):
        others = [v for j, v in s.items() if j != i] if loo else list(s.values())
        brevity = -(s[i] - mean(others)) if i in s and others else 0.0
        result.append(base + beta * brevity * (n / len(correct) if dynamic else 1))
    return result


def gtpo(advantage, h, beta):
    m = mean(h)
    if m < 1e-7:
        return [advantage for _ in h]
    return [advantage * max(0.0, 1 + beta * (v / (m + 1e-8) - 1)) for v in h]


def hicra(advantages, planning, alpha):
    return [a + alpha * abs(a) * p for a, p in zip(advantages, planning, strict=True)]


def hicra_entropy(rows, alpha, k, rule, use_planning):
    """Rows are (group, length, [(advantage, entropy, planning), ...]); one list of advantages for each."""
    result = []
    for group, length, tokens in rows:
        lengths = [other for g, other, _ in rows if g == group]
        success = mean([a for a, _, _ in tokens]) > 0
        gate = success and length > mean(lengths)
        entropies, n = [h for _, h, _ in tokens], len(tokens)
        if rule == "ceil":
            order = sorted(range(n), key=lambda t: (-entropies[t], t))
            high = set(order[: math.ceil(k * n - 1e-9)])
        else:
            threshold = sorted(entropies)[min(int((1 - k) * n), n - 1)]
            high = {t for t in range(n) if entropies[t] > threshold}
        row = []
        for t, (a, _, planning) in enumerate(tokens):
            selected = (gate and t in high) or (use_planning and planning)
            sign = (a > 0) - (a < 0)
            row.append(a * (1 + alpha * sign) if selected else a)
        result.append(row)
    return result


def sepa(h, planning, lam):
    lam = min(max(lam, 0.0), 1.0)
    execution = [v for v, p in zip(h, planning, strict=True) if not p]
    return [v if p else lam * mean(execution) + (1 - lam) * v for v, p in zip(h, planning, strict=True)]


def surprisal(logprobs):
    return [min(-lp, 50.0) for lp in logprobs]


def whiten(rows):
    flat = [a for row in rows for a in row]
    if len(flat) < 2:
        return [[0.0 for _ in row] for row in rows]
    m = mean(flat)
    var = sum((a - m) ** 2 for a in flat) / (len(flat) - 1)
    return [[(a - m) / math.sqrt(var + 1e-8) for a in row] for row in rows]
