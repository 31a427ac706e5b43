"""A harness of verifiers, in an environment of its own, plays a policy; a run trains on what it played."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.test_policy_endpoint import TALK
from tests.small_runs import rows, stored
from tests.waiting import ends, until

pytestmark = pytest.mark.verifiers
HARNESS = Path(__file__).parents[2] / ".venv-verifiers/bin/python"


def test_a_step_trains_on_episodes_that_verifiers_plays(tmp_path):
    file, log = tmp_path / "talk.toml", tmp_path / "log"
    file.write_text(TALK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    listen = ["--serve", f"127.0.0.1:{port}", "--patience", "300"]
    command = [sys.executable, "-m", "retrain", "train", file, *listen]
    with log.open("w") as output:
        served = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path)
    try:
        url = until(lambda: [line.split()[-1] for line in log.read_text().splitlines() if "answers at" in line], served)
        player = [HARNESS, Path(__file__).with_name("player.py"), url[0], "2"]
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        played = subprocess.run(player, env=own, capture_output=True, text=True, timeout=600, check=False)
        assert (played.returncode, played.stdout) == (0, "played\n"), played.stderr
        assert ends(served) == 0, log.read_text()
    finally:
        served.kill()
        served.wait()
    run = tmp_path / "runs/talk"
    for step, row in enumerate(rows(run / "metrics.jsonl")):
        assert row["rollout/completions"] == 4
        assert row["env/turns"] == 2
        assert row["reward/mean"] == 0.5
        assert row["groups/informative"] == 1
        assert row["grad/norm"] > 0
        assert step or row["parity/logp_diff_mean"] < 0.02, "what was trained on is what was sampled, but for rounding"
        assert {one["prompt"] for one in stored(run, step)} == {"12+34=", "5+6="}
        assert all(len(one["turns"]) == 2 and one["ended"] == "done" for one in stored(run, step))
    assert step == 1, "both steps were made"
