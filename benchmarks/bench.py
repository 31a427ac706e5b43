"""One table: every ratio of the benchmarks and every share of the roofline, beside the last ones recorded.

One thread; ratios are of CPU seconds, above 1 is faster. A quiet core takes about ten minutes, of which the
largest shape has more than half. Ratios with TRL appear where it is installed.

    python benchmarks/bench.py [--shapes 1.4M 20M 135M] [--only step sampling update roofline] [--record]

`--record` writes what was measured to `recorded.json`, which keeps the figures of other shapes and parts. Figures of
different processors compare processors: a line says where the recorded one is of another.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import roofline
import sampling
import step
import torch
import update
from shapes import SHAPES

from retrain.storage.run_environment import environment

RECORDED = Path(__file__).parent / "recorded.json"
STEPS = {"1.4M": (10, 2), "20M": (3, 1), "135M": (1, 1)}
"""Counted steps of a repetition, and those before them."""
TRL = importlib.util.find_spec("trl") is not None
Figures = Iterator[tuple[str, float]]


def steps(shapes: Sequence[str]) -> Figures:
    """Whole steps against TRL, one pair a shape."""
    for name in shapes if TRL else ():
        count, settling = STEPS[name]
        options = argparse.Namespace(shape=name, steps=count, settling=settling, device="cpu")
        with tempfile.TemporaryDirectory() as folder:
            model = step.prepare(Path(folder)) if name == "1.4M" else SHAPES[name].save(Path(folder))
            seconds = [step.measure(system, model, "bfloat16", options)["cpu_s"] for system in ("trl", "retrain")]
        yield f"step of TRL, {name}", seconds[0] / seconds[1]


def samplings(_: Sequence[str]) -> Figures:
    """Sampling against transformers' generate."""
    for title, stops in sampling.STOPS.items():
        rounds = sampling.measure(stops, 3)
        pairs = zip(rounds["transformers generate, bfloat16"], rounds["torch, fused, bfloat16"], strict=True)
        yield f"sampling of generate, {title}", median(other[0] / own[0] for other, own in pairs)


def updates(_: Sequence[str]) -> Figures:
    """The update against a padded forward, and against TRL's loss."""
    seconds = update.measure(5, ["bfloat16"])
    own = seconds["packed", "bfloat16"]
    for (name, _dtype), other in seconds.items():
        if name != "packed":
            yield f"update, {name}", median(a / b for a, b in zip(other, own, strict=True))


def shares(shapes: Sequence[str]) -> Figures:
    """Shares of the roofline."""
    for name in shapes:
        for title, phase in roofline.phases(SHAPES[name], "bfloat16"):
            if title != "rest":
                yield f"share of the roofline, {name}, {title}", roofline.share(phase, 1)


PARTS: dict[str, Callable[[Sequence[str]], Figures]] = {
    "step": steps,
    "sampling": samplings,
    "update": updates,
    "roofline": shares,
}


def main() -> None:
    """Measure, print line by line, and record what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    cpu = environment()["cpu"]
    found: dict[str, dict[str, object]] = {}
    print(f"{'bfloat16, one core':<40}{'now':>8}{'recorded':>10}{'change':>9}  of")
    for part in options.only:
        for name, value in PARTS[part](options.shapes):
            before = known.get(name)
            line = f"{before['value']:>10.2f}{value / before['value'] - 1:>+9.0%}  {before['date']}" if before else ""
            line += f", {before['cpu']}" if before and before["cpu"] != cpu else ""
            print(f"{name:<40}{value:>8.2f}{line}", flush=True)
            found[name] = {"value": round(value, 3), "date": datetime.date.today().isoformat(), "cpu": cpu}
    if not TRL:
        print("without TRL: pip install -e '.[bench]'", file=sys.stderr)
    if options.record:
        RECORDED.write_text(json.dumps(dict(sorted((known | found).items())), indent=2) + "\n")


if __name__ == "__main__":
    main()
