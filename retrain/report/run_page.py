"""What became of a run: one HTML file that needs nothing else, and a status for the command line.

Model text is hostile: all text is escaped, and the page's policy forbids scripts and any request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from retrain.errors import ConfigError, ConfigProblem
from retrain.report.charts import interval_chart, line_chart, span, stacked_chart
from retrain.storage.run_directory import read_json, read_rows
from retrain.system.lock import Lock

Row = Mapping[str, Any]

_CHARTS: tuple[tuple[str, str, str, bool], ...] = (
    ("reward/mean", "Reward", "mean over the completions of a step", False),
    ("reward/accuracy", "Training accuracy", "share of right completions while training", True),
    ("tokens/response", "Tokens per response", "mean length of a completion", False),
    ("groups/informative", "Informative groups", "share of groups that the filter kept", True),
    ("policy/entropy", "Entropy", "mean over response tokens, in nats", False),
    ("grad/norm", "Gradient norm", "before clipping", False),
)
"""Metric, title, caption, and whether it is a share."""

_CURVES_NOTE = (
    "A point at step n is measured with the weights after n steps. Faint lines are single steps, strong ones their "
    "running mean over a 25th of the run."
)
_SAMPLES = 3
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(run: Path) -> Path:
    """Write `report.html` into the run directory; returns its path."""
    path = run / "report.html"
    path.write_text(render(run), encoding="utf-8")
    return path


def render(run: Path) -> str:
    """The report of a run as an HTML document; equal files give equal text."""
    facts, metrics, evals = status(run), read_rows(run / "metrics.jsonl"), read_rows(run / "eval.jsonl")
    name = escape(run.resolve().name)
    style = Path(__file__).with_suffix(".css").read_text()
    body = [
        f'<h1>{name}</h1><p class="soft">{escape(_state(facts))}</p>',
        f'<p class="summary">{escape(summary(metrics, evals))}</p>',
        f'<p class="soft">{escape(recipe(read_json(run / "config.resolved.json")))}</p>',
        _facts(metrics, evals),
        "<h2>Curves</h2>",
        f'<p class="soft">{_CURVES_NOTE}</p>',
        _charts(metrics, evals),
        _evaluations(evals),
        _samples(run),
        _settings(run),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def status(run: Path) -> dict[str, Any]:
    """How far a run is, from its files alone; keys without a value yet are None.

    Returns:
        path, state ("running", "killed", or how it ended), steps, max_steps, reward, accuracy with ci_low
        and ci_high after eval_step steps, eta_s while running, checkpoint (the newest), owner, error.

    Raises:
        ConfigError: there is no run at this path.
    """
    stored = read_json(run / "status.json")
    metrics, evals = read_rows(run / "metrics.jsonl"), read_rows(run / "eval.jsonl")
    if not stored and not metrics:
        problem = ConfigProblem(str(run), 0, 0, "run directory", "holds no run", "give the path of one, as runs/NAME")
        raise ConfigError([problem])
    lock, state = Lock(run / "lock"), str(stored.get("outcome", "unknown"))
    if state == "running" and not lock.held():
        state = "killed"
    steps = len(metrics)
    total = read_json(run / "config.resolved.json").get("training", {}).get("max_steps")
    recent = [row["time/step_s"] for row in metrics[-20:] if "time/step_s" in row]
    eta = sum(recent) / len(recent) * (total - steps) if state == "running" and total and recent else None
    evaluation = evals[-1] if evals else {}
    checkpoints = sorted(path.name for path in run.glob("checkpoints/step-*"))
    return {
        "path": str(run),
        "state": state,
        "steps": steps,
        "max_steps": total,
        "reward": metrics[-1].get("reward/mean") if metrics else None,
        "accuracy": evaluation.get("accuracy"),
        "ci_low": evaluation.get("ci_low"),
        "ci_high": evaluation.get("ci_high"),
        "eval_step": evaluation.get("step"),
        "eta_s": eta,
        "checkpoint": checkpoints[-1] if checkpoints else None,
        "owner": lock.owner(),
        "error": stored.get("error"),
    }


def summary(metrics: Sequence[Row], evals: Sequence[Row]) -> str:
    """The result in a sentence or two, from first to last evaluation."""
    steps = f"{len(metrics)} step{'s' * (len(metrics) != 1)}"
    if not evals:
        return f"{steps}; no evaluation yet."
    first, last = evals[0], evals[-1]
    interval = f"{_percent(last['accuracy'])} (95% interval {_percent(last['ci_low'])} to {_percent(last['ci_high'])})"
    if len(evals) == 1:
        return f"Held-out accuracy is {interval} on {last['problems']} problems after {last['step']} steps."
    change = last["accuracy"] - first["accuracy"]
    verb = "rose" if change > 0 else "fell" if change < 0 else "did not move:"
    clear = first["ci_high"] < last["ci_low"] or last["ci_high"] < first["ci_low"]
    tail = "" if clear else " The intervals before and after overlap."
    return (
        f"Held-out accuracy {verb} from {_percent(first['accuracy'])} to {interval} "
        f"on {last['problems']} problems in {last['step'] - first['step']} steps.{tail}"
    )


def recipe(config: Mapping[str, Any]) -> str:
    """What was trained on what and how, in a line; what the configuration does not hold is left out."""
    algorithm, training = config.get("algorithm", {}), config.get("training", {})
    mode = algorithm.get("transform_mode", "none")
    transforms = [mode] if isinstance(mode, str) else list(mode)
    advantage = [algorithm.get("advantage_mode"), *(name for name in transforms if name != "none")]
    credit = [algorithm["algorithm_mode"]] if algorithm.get("algorithm_mode") else advantage
    sizes = [training.get(key) for key in ("batch_size", "group_size", "max_tokens")]
    parts = [
        " on ".join(filter(None, (config.get("model", {}).get("path"), config.get("task", {}).get("name")))),
        " + ".join(filter(None, credit)),
        "{} prompts x {} completions x at most {} tokens per step".format(*sizes) if all(sizes) else "",
        f"seed {training['seed']}" if "seed" in training else "",
    ]
    return "; ".join(filter(None, parts))


def _state(facts: Row) -> str:
    of = f" of {facts['max_steps']}" if facts["max_steps"] else ""
    error = f": {facts['error']}" if facts["error"] else ""
    return f"{facts['state']}, {facts['steps']}{of} steps{error}"


def _facts(metrics: Sequence[Row], evals: Sequence[Row]) -> str:
    seconds, tokens = _total(metrics, "time/step_s"), _total(metrics, "tokens/sampled")
    rollout = _total(metrics, "time/rollout_s")
    facts: dict[str, str] = {}
    if evals:
        facts["Held-out accuracy"] = _percent(evals[-1]["accuracy"])
    facts["Steps"] = f"{len(metrics):,}"
    facts["Time in steps"] = _duration(seconds)
    facts["Tokens sampled"] = f"{tokens / 1e6:.2f} M" if tokens >= 1e6 else f"{tokens:,.0f}"
    facts["Tokens/s, sampling"] = f"{tokens / rollout:,.0f}" if rollout else "-"
    facts["Skipped updates"] = f"{_total(metrics, 'update/skipped'):.0f}"
    facts["Failed rewards"] = f"{_total(metrics, 'reward/failed'):.0f}"
    cells = "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in facts.items())
    return f'<dl class="facts">{cells}</dl>'


def _charts(metrics: Sequence[Row], evals: Sequence[Row]) -> str:
    rows = [(r["step"], r["accuracy"], r.get("ci_low", r["accuracy"]), r.get("ci_high", r["accuracy"])) for r in evals]
    steps = span([0.0, *(float(row["step"]) for row in (*metrics, *evals))])
    drawn = [("Held-out accuracy", "with its 95% interval", interval_chart(rows, steps), "")]
    for key, title, caption, percent in _CHARTS:
        points = [(float(row["step"]), float(row[key])) for row in metrics if key in row]
        drawn.append((title, caption, line_chart(points, percent=percent, x=steps), ""))
    # Of a rollout beside the update, what the loop waited for is the phase.
    hidden = {"time/overlap_s", "time/rollout_s"} if any("time/wait_s" in row for row in metrics) else set[str]()
    found = {key for row in metrics for key in row if _is_phase(key)} - hidden
    phases = sorted(found, key=lambda key: -_total(metrics, key))
    layers = {_phase(key): [float(row.get(key, 0.0)) for row in metrics] for key in phases}
    legend = "".join(f'<span><i class="layer-{i % 6}"></i>{escape(name)}</span>' for i, name in enumerate(layers))
    chart = stacked_chart([float(row["step"]) for row in metrics], layers, steps)
    drawn.append(
        ("Seconds per step", "by phase; evaluation is not in them", chart, f'<div class="legend">{legend}</div>')
    )
    figures = [
        f"<figure><figcaption><b>{title}</b>{caption}</figcaption>{chart}{below}</figure>"
        for title, caption, chart, below in drawn
        if chart
    ]
    return f'<div class="charts">{"".join(figures)}</div>' if figures else '<p class="soft">No steps yet.</p>'


def _is_phase(key: str) -> bool:
    return key.startswith("time/") and key.endswith("_s") and key not in ("time/step_s", "time/tokens_per_s")


def _phase(key: str) -> str:
    return key.removeprefix("time/").removesuffix("_s")


def _evaluations(evals: Sequence[Row]) -> str:
    if not evals:
        return ""
    ks = {key for row in evals for key in row if key.startswith("pass@")} - {"pass@1"}  # which is the accuracy
    shares = ["greedy_accuracy", *sorted(ks, key=lambda key: int(key.partition("@")[2]))]
    columns: dict[str, Callable[[Row], str]] = {"step": lambda row: str(row["step"])}
    columns["accuracy"] = lambda row: _cell(row.get("accuracy"))
    columns["95% interval"] = lambda row: f"{_cell(row.get('ci_low'))} to {_cell(row.get('ci_high'))}"
    columns |= {key: lambda row, key=key: _cell(row.get(key)) for key in shares if any(key in row for row in evals)}
    columns["tokens"] = lambda row: f"{row.get('avg_tokens', math.nan):.1f}"
    columns["truncated"] = lambda row: _cell(row.get("truncated"))
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text(row))}</td>' for text in columns.values())}</tr>" for row in evals)
    return f'<h2>Evaluations</h2><div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _samples(run: Path) -> str:
    """Completions of one group of the first and of the last stored step, side by side."""
    files = sorted(run.glob("rollouts/step-*.jsonl.gz"))
    if not files:
        return ""
    chosen = [files[0]] if len(files) == 1 else [files[0], files[-1]]
    columns: list[str] = []
    for title, file in zip(("Early", "Late"), chosen, strict=False):
        step = int(file.name.removesuffix(".jsonl.gz").rpartition("-")[2])
        rows = pick(read_rows(file))
        scale = max(
            (abs(float(a)) for row in rows for a in row.get("advantages") or () if math.isfinite(a)), default=0.0
        )
        prompt = (
            f'<div class="sample"><p>prompt</p><div class="prompt">{escape(str(rows[0]["prompt"]))}</div></div>'
            if rows
            else ""
        )
        columns.append(
            f"<div><h3>{title}: step {step}</h3>{prompt}{''.join(_sample(row, scale or 1.0) for row in rows)}</div>"
        )
    return (
        '<h2>Samples with their credit</h2><p class="soft">The color of a token is its advantage: '
        '<span class="up" style="--a:.5">&nbsp;made likelier&nbsp;</span> '
        '<span class="down" style="--a:.5">&nbsp;made less likely&nbsp;</span>, stronger for a larger one among those '
        f'shown of its step; planning tokens are underlined.</p><div class="columns">{"".join(columns)}</div>'
    )


def pick(rows: Sequence[Row]) -> list[Row]:
    """Best, worst and one other completion of the first group with different rewards, or else of the first.

    Equal completions count once.
    """
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(int(row["group"]), []).append(row)
    scored = [[row for row in group if row["reward"] is not None] for group in groups.values()]
    mixed = [group for group in scored if len({row["reward"] for row in group}) > 1]
    group = next((group for group in (*mixed, *scored, *groups.values()) if group), [])
    distinct = {(row["text"], row["reward"]): row for row in group}
    ordered = sorted(distinct.values(), key=lambda row: -float(row["reward"] or 0.0))
    return [*ordered[: _SAMPLES - 1], ordered[-1]] if len(ordered) > _SAMPLES else ordered


def _sample(row: Row, scale: float) -> str:
    reward = "not scored" if row["reward"] is None else f"reward {row['reward']:.3f}"
    right = "" if row.get("correct") is None else "right" if row["correct"] else "wrong"
    head = ", ".join(part for part in (reward, right, f"{len(row['completion_ids'])} tokens") if part)
    return f'<div class="sample {right}"><p>{head}</p><div class="tokens">{colored(row, scale)}</div></div>'


def colored(row: Row, scale: float) -> str:
    """HTML of a stored completion's tokens, colored by advantage; its plain text where it was not trained on.

    Args:
        scale: the advantage of full color; positive.
    """
    tokens, advantages = row.get("tokens"), row.get("advantages")
    if not tokens or not advantages:
        return escape(str(row["text"])) or "(empty)"
    planning = row.get("planning") or [0] * len(tokens)
    return "".join(
        _token(str(token), float(value), float(value) / scale, bool(plan))
        for token, value, plan in zip(tokens, advantages, planning, strict=False)
    )


def _token(token: str, advantage: float, share: float, planning: bool) -> str:
    style = f' style="--a:{0.6 * abs(share):.2f}"' if share else ""
    classes = " ".join(name for name, on in (("up", share > 0), ("down", share < 0), ("planning", planning)) if on)
    text = escape(token).replace("\n", "↵\n")
    return f'<span class="{classes}" title="advantage {advantage:+.4g}"{style}>{text}</span>'


def _settings(run: Path) -> str:
    source, environment = run / "config.toml", read_json(run / "environment.json")
    toml = escape(source.read_text()) if source.is_file() else ""
    resolved = escape(json.dumps(read_json(run / "config.resolved.json"), indent=2))
    rows = "".join(
        f"<tr><th>{escape(str(key))}</th><td>{escape(_words(value))}</td></tr>" for key, value in environment.items()
    )
    return (
        f"<h2>Configuration</h2><pre>{toml}</pre><details><summary>Resolved, with every default</summary>"
        f'<pre>{resolved}</pre></details><h2>Environment</h2><table class="words">{rows}</table>'
    )


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _total(rows: Sequence[Row], key: str) -> float:
    return sum(float(row.get(key, 0.0)) for row in rows)


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _duration(seconds: float) -> str:
    for unit, length in (("s", 120.0), ("min", 7200.0)):
        if seconds < length:
            return f"{seconds / (length / 120):.0f} {unit}"
    return f"{seconds / 3600:.1f} h"


def _cell(value: float | None) -> str:
    return "-" if value is None else _percent(value)
