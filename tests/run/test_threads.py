"""The threads of a run, and where they are written down."""

import json
import os

import pytest

from retrain.campaign.work.run_process import finish, train

TOML = """
training = {{ max_steps = 0, threads = {threads} }}
warmup = {{ steps = 0 }}
eval = {{ problems = 0 }}
reward_pool = {{ workers = 0 }}
logging = {{ dir = "{folder}", name = "one" }}
"""


def threads_of(folder, threads, variables):
    """Make a run of a campaign, and read in its directory what it has used."""
    run = folder / "one"
    run.mkdir()
    (run / "config.toml").write_text(TOML.format(threads=threads, folder=folder))
    assert finish(train(run, 1, variables)) == 0, (run / "log.txt").read_text()
    return json.loads((run / "environment.json").read_text())["threads"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("threads", ['"auto"', "0"])
def test_a_run_of_a_campaign_has_the_threads_of_its_slot(tmp_path, threads):
    """It is a fork of a process in which torch has been imported, and has asked for its number of threads."""
    count = int(os.environ.get("OMP_NUM_THREADS", "1")) + 2
    assert threads_of(tmp_path, threads, {"OMP_NUM_THREADS": str(count)}) == count
