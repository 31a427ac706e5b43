"""A campaign of five conditions and ten seeds with known differences, one run failed and one missing."""

from pathlib import Path

import pytest

from retrain.campaign.verdict.results import Results
from retrain.campaign.verdict.run_reader import read_campaign
from tests.campaign.tables import write_campaign


@pytest.fixture(scope="session")
def campaign(tmp_path_factory) -> Path:
    return write_campaign(tmp_path_factory.mktemp("runs") / "ladder")


@pytest.fixture(scope="session")
def results(campaign: Path) -> Results:
    return read_campaign(campaign)
