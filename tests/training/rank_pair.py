"""Processes that live as long as a test session and are the ranks of every test: they take seconds to start."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.training.distributed.ranks import RENDEZVOUS
from tests.forks import PYTHON

ROOT = Path(__file__).parents[2]


class Group:
    """`size` ranks over gloo, which meet in a file; `run` has all of them compute a case of `rank_cases`."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size, self._count = folder, size, 0
        variables = {"WORLD_SIZE": str(size), RENDEZVOUS: f"file://{folder / 'store'}", "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [PYTHON, "-m", "tests.training.rank_cases"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, **variables, "RANK": str(rank)},
            )
            for rank in range(size)
        ]
        assert [process.stdout.readline() for process in self.processes] == ["ready\n"] * size

    def run(self, case: str, *args: Any) -> Any:
        """What the case gives on rank 0; the traceback of the first rank that failed otherwise."""
        self._count += 1
        out = self.folder / f"{self._count}.pt"
        for process in self.processes:
            asked = {"case": case, "args": args, "out": str(out)}
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self.processes]
        failed = [answer for answer in answers if answer != "done\n"]
        died = [
            f"rank {rank} died, exit code {self.processes[rank].wait(30)}"
            for rank, one in enumerate(answers)
            if not one
        ]
        assert not failed, "\n".join([*died, *(json.loads(answer) for answer in failed if answer)])
        return torch.load(out)

    def close(self) -> None:
        for process in self.processes:
            with suppress(BrokenPipeError):  # it died, and the test that saw it says so
                process.stdin.close()
        for process in self.processes:
            process.wait(300)


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Two ranks."""
    ranks = Group(tmp_path_factory.mktemp("pair"), 2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def trio(tmp_path_factory):
    """Three ranks: no matrix of a small model divides evenly."""
    ranks = Group(tmp_path_factory.mktemp("trio"), 3)
    yield ranks
    ranks.close()
