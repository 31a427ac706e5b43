"""What the launcher of ranks says about the rank that failed first."""

import sys

import pytest

from retrain.run.launch import Launcher

RANK = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {end}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("os.kill(os.getpid(), 9)", 5, "rank 1 failed first (killed by signal 9); it printed nothing\n"),
        ("print('why'); sys.exit(3)", 3, "rank 1 failed first (exit code 3); its output ends:\nwhy\n"),
    ],
)
def test_the_rank_that_failed_first_is_named_with_its_cause(capsys, monkeypatch, end, code, said):
    monkeypatch.setattr("retrain.run.launch._GRACE_S", 0.1)
    assert Launcher([sys.executable, "-c", RANK.format(end=end)], 2).run() == code
    assert capsys.readouterr().err.startswith(said)
