"""A simulated fleet: how busy trainer and servers are with `[rollout] overlap` 0, 1, 2 and with continuous sampling.

Nothing is sampled: time is virtual, and requests go through the router of the engine `vllm-server`. A step has 8
groups of 8 episodes for each server and a trainer that grows with the fleet, so that its step takes a fixed time.

Where the latencies come from. They are assumptions in the range of an 8 B model on one GPU per server, not measured
here: a decoding step of 20 ms and 0.1 ms for each completion in flight; log-normal lengths, median 1,000 tokens,
sigma 0.8, cut at 8,192; a tool call with probability 0.5 after each of the first turns, log-normal, median 1 s, sigma
1; a server that fails once in two hours of its time and needs two minutes to come back. `--run RUN` takes the lengths
of a run's stored rollouts instead of the log-normal ones, and `--token-ms`, `--update-s` and `--mtbf-s` change the
rest.

    python benchmarks/fleet.py [--steps 30 --servers 1 8 64] [--run runs/NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import selectors
import statistics
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from retrain.engines.vllm.routing import Assignment, Router
from retrain.system import event_loop
from retrain.types import Request

GROUPS, SIZE, LIMIT = 8, 8, 128
"""Groups of a step for each server, episodes of a group, and completions in flight on one server."""
PER_COMPLETION_S, TOOL, RESTART_S = 0.0001, (0.5, 1.0, 1.0, 3), 120.0
"""Cost of a completion in flight; probability, median, sigma and most of an episode's tool calls; time to come back."""


class Policy(NamedTuple):
    """When groups are begun: `overlap` steps ahead, or continuously with a bound on staleness."""

    name: str
    overlap: int = 0
    max_staleness: int = 0


POLICIES = (
    *(Policy(f"overlap {k}", overlap=k) for k in (0, 1, 2)),
    *(Policy(f"continuous {s}", max_staleness=s) for s in (1, 2, 4)),
)


class Clock(selectors.SelectSelector):
    """Instead of waiting, moves the time of the loop forward."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits for something that does not happen")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing is left to do."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class Group:
    """Versions of the weights when its requests began."""

    def __init__(self, number: int) -> None:
        self.number, self.versions = number, list[int]()


class Fleet:
    """Servers, a trainer and what was measured of them."""

    def __init__(self, loop: VirtualLoop, count: int, options: argparse.Namespace, lengths: Sequence[int]) -> None:
        self.loop, self.options, self.lengths = loop, options, lengths
        self.random = random.Random(options.seed)
        self.urls = [f"server {index}" for index in range(count)]
        self.router = Router(self.urls, LIMIT)
        self.router.join(self.urls)
        self.load = dict.fromkeys(self.urls, 0)
        self.version, self.begun, self.prompts = 0, 0, GROUPS * count
        self.busy_s, self.failures = 0.0, 0
        self.ages, self.largest = list[float](), 0

    async def generate(self, group: Group, tokens: float) -> None:
        """One turn, begun again on another server if its server fails."""
        while True:
            assigned = await self.router.assign(Request((), 1, 1, 0, group.number))
            if assigned is None:
                await asyncio.sleep(1.0)
                continue
            try:
                await self.router.run(assigned, self.decode(assigned, tokens))
            except ConnectionError:
                continue
            return

    async def decode(self, assigned: Assignment, tokens: float) -> None:
        self.load[assigned.url] += 1
        step = self.options.token_ms / 1000 + PER_COMPLETION_S * self.load[assigned.url]
        began = self.loop.time()
        try:
            await asyncio.sleep(tokens * step)
        finally:
            self.load[assigned.url] -= 1
            self.busy_s += self.loop.time() - began

    async def episode(self, group: Group) -> None:
        """Turns with tool calls between them."""
        chance, median, sigma, most = TOOL
        tools = next((k for k in range(most) if self.random.random() > chance), most)
        length = self.random.choice(self.lengths)
        for turn in range(tools + 1):
            group.versions.append(self.version)
            await self.generate(group, length / (tools + 1))
            if turn < tools:
                await asyncio.sleep(self.random.lognormvariate(0.0, sigma) * median)

    async def group(self, number: int) -> Group:
        group = Group(number)
        await asyncio.gather(*(self.episode(group) for _ in range(SIZE)))
        return group

    async def fail(self, url: str) -> None:
        """A server that fails again and again, and comes back."""
        while True:
            await asyncio.sleep(self.random.expovariate(1 / self.options.mtbf_s))
            self.failures += 1
            self.router.drop(url)
            await asyncio.sleep(RESTART_S)
            self.router.join([url])

    async def update(self, step: int, groups: Sequence[Group]) -> None:
        """Train on groups."""
        ages = [step - version for group in groups for version in group.versions]
        self.ages.append(statistics.fmean(ages))
        self.largest = max(self.largest, *ages)
        await asyncio.sleep(self.options.update_s)

    def begin(self) -> asyncio.Task[Group]:
        self.begun += 1
        return self.loop.create_task(self.group(self.begun))

    async def ahead(self, steps: int, overlap: int) -> None:
        """`[rollout] overlap`: a step waits for its update and for the batch that is sampled meanwhile."""
        waiting: deque[Sequence[Group]] = deque()

        async def sample(batches: int) -> None:
            for _ in range(batches):
                waiting.append(await asyncio.gather(*(self.begin() for _ in range(self.prompts))))

        for step in range(steps):
            if not waiting:
                await sample(1)
            batch = waiting.popleft()
            missing = min(overlap, steps - step - 1) - len(waiting)
            await asyncio.gather(self.update(step, batch), sample(missing))
            self.version = step + 1

    async def continuous(self, steps: int, most: int) -> None:
        """`[rollout] mode = "continuous"`: the rule of `ContinuousCollector`."""
        flying: set[asyncio.Task[Group]] = set()
        complete: deque[Group] = deque()

        def fill(step: int) -> None:
            while True:
                expected = step + (len(flying) + len(complete)) // self.prompts
                if expected > self.version + most or expected >= steps:
                    return
                task = self.begin()
                flying.add(task)
                task.add_done_callback(flying.discard)
                task.add_done_callback(lambda done: complete.append(done.result()))

        for step in range(steps):
            fill(step)
            while len(complete) < self.prompts:
                await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
            batch = [complete.popleft() for _ in range(self.prompts)]
            fill(step + 1)
            await self.update(step, batch)
            self.version = step + 1


def simulate(count: int, policy: Policy, options: argparse.Namespace, lengths: Sequence[int]) -> dict[str, float]:
    """Figures of one run."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)

    def submit(coroutine: Coroutine[Any, Any, Any]) -> None:
        tasks.add(loop.create_task(coroutine))

    tasks: set[asyncio.Task[Any]] = set()
    event_loop.submit = submit  # type: ignore[assignment] - the router's loop is the virtual one
    fleet = Fleet(loop, count, options, lengths)
    tasks |= {loop.create_task(fleet.fail(url)) for url in fleet.urls}
    if policy.max_staleness:
        loop.run_until_complete(fleet.continuous(options.steps, policy.max_staleness))
    else:
        loop.run_until_complete(fleet.ahead(options.steps, policy.overlap))
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    return {
        "step_s": loop.time() / options.steps,
        "trainer": options.update_s * options.steps / loop.time(),
        "in_flight": fleet.busy_s / loop.time() / count,
        "staleness": statistics.fmean(fleet.ages),
        "largest": float(fleet.largest),
        "failures": float(fleet.failures),
    }


def stored_lengths(run: Path) -> Iterator[int]:
    """Sampled tokens of every stored rollout of a run."""
    for file in sorted(run.glob("rollouts/step-*.jsonl.gz")):
        with gzip.open(file, "rt") as lines:
            yield from (sum(turn["end"] - turn["start"] for turn in json.loads(line)["turns"]) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--run", type=Path, help="a run directory whose stored rollouts have the lengths")
    parser.add_argument("--token-ms", type=float, default=20.0)
    parser.add_argument("--update-s", type=float, default=30.0)
    parser.add_argument("--mtbf-s", type=float, default=7200.0, help="mean time between failures of one server")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    lengths = list(stored_lengths(options.run)) if options.run else []
    lengths = lengths or [min(8192, int(1000 * drawn.lognormvariate(0.0, 0.8))) for _ in range(10000)]
    print(
        "| servers | sampling | s a step | trainer busy | completions in flight on a server | "
        "staleness, mean | largest |"
    )
    print("|---|---|---|---|---|---|---|")
    for count in options.servers:
        for policy in POLICIES:
            found = simulate(count, policy, options, lengths)
            print(
                f"| {count} | {policy.name} | {found['step_s']:.0f} | {found['trainer']:.0%} "
                f"| {found['in_flight']:.0f} | {found['staleness']:.1f} | {found['largest']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
