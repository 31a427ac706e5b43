"""Any TOML file is a configuration or a list of its mistakes: never a traceback, never an endless check.

`RETRAIN_FUZZ=2000 python -m pytest tests/fuzz -s` tries as many mutants, prints the slowest and refuses two seconds of
CPU time for one answer. The suite tries a few hundred, on machines of any speed, and only stops what does not end.
"""

import os
import random
import signal
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from retrain.campaign.plan.is_campaign import is_campaign
from retrain.campaign.plan.load_campaign import load_campaign
from retrain.config.load import load
from retrain.errors import ConfigError
from retrain.run.before.data_checks import check_data
from tests.fuzz.mutations import ROOT, SHIPPED, mutate

COUNT = int(os.environ.get("RETRAIN_FUZZ", "300"))
PORTIONS = 10
LIMIT_S = 2.0 if "RETRAIN_FUZZ" in os.environ else 60.0
SLOWEST = [0.0]


@contextmanager
def limited():
    """Raise TimeoutError after `LIMIT_S` seconds of CPU time, so that an endless check does not hang the suite."""

    def stop(number, frame):
        raise TimeoutError(f"more than {LIMIT_S} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    began = time.process_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        SLOWEST[0] = max(SLOWEST[0], time.process_time() - began)


@pytest.fixture(scope="module", autouse=True)
def _slowest():
    yield
    print(f"\nslowest answer: {SLOWEST[0]:.2f} s of CPU time")


def verdict(file, overrides=()):
    """What `retrain validate` says: "valid", or "refused" with mistakes that are described.

    Whatever else is raised fails the test.
    """
    try:
        with limited():
            if is_campaign(file):
                load_campaign(file, overrides).check_data()
            else:
                check_data(load(file, overrides))
    except ConfigError as error:
        described = error.exit_code in (2, 3) and error.problems and all(problem.problem for problem in error.problems)
        return "refused" if described else "refused without a reason"
    return "valid"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("portion", range(PORTIONS))
def test_a_mutant_is_valid_or_its_mistakes_are_listed(portion, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    rng, outcomes = random.Random(portion), Counter()
    for number in range(COUNT // PORTIONS):
        source = rng.choice(SHIPPED)
        file = tmp_path / "mutant.toml"
        text = mutate(source.read_text(encoding="utf-8"), rng)
        file.write_text(text.replace('base = "../', f'base = "{source.parent.parent}/'), encoding="utf-8", newline="")
        try:
            outcomes[verdict(file)] += 1
        except BaseException:
            print(f"mutant {number} of portion {portion} ({source.name}):\n{text[:4000]}")
            raise
    assert set(outcomes) <= {"valid", "refused"}
    assert outcomes["refused"] > COUNT // PORTIONS // 4
