"""Campaigns on a Ray cluster of two nodes, one of which dies; a cluster without the right token is refused."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.campaign.jobs import installed, outcomes, seen, write_ranks
from tests.faults.test_campaign import CELLS, assert_same, processes, sweep, under_way
from tests.ray.nodes import Nodes, environment
from tests.waiting import ends, until

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """One cache of warm starts, apart from the user's; nodes have it in their environment."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def nodes(cache):
    nodes = Nodes(RETRAIN_CACHE=cache)
    try:
        nodes.start("head")
        nodes.start("second")
        yield nodes
    finally:
        nodes.stop()
    assert nodes.processes("head") == nodes.processes("second") == []


def write(folder: Path, address: str) -> None:
    short(folder, executor="ray")
    with (folder / "sweep.toml").open("a") as file:
        file.write(f'[ray]\naddress = "{address}"\n')


def short(folder: Path, executor: str = "local") -> None:
    sweep(folder, executor)
    file = folder / "sweep.toml"
    file.write_text(file.read_text().replace("max_steps = 30", "max_steps = 16"))


def campaign(folder: Path, **variables: str) -> subprocess.Popen:
    with (folder / "out.txt").open("ab") as log:
        return subprocess.Popen(
            [*installed("campaign", "sweep.toml", "--plain")],
            cwd=folder,
            stdout=log,
            stderr=log,
            env=environment(**variables),
        )


def told(folder: Path) -> str:
    return (folder / "out.txt").read_text()


@pytest.fixture(scope="module")
def quiet(tmp_path_factory, cache) -> Path:
    """The campaign that nobody disturbed, without Ray."""
    folder = tmp_path_factory.mktemp("quiet")
    short(folder)
    (folder / "open").touch()
    assert ends(campaign(folder, RETRAIN_CACHE=cache)) == 0, told(folder)
    return folder


def test_a_run_goes_on_elsewhere_when_its_node_dies(nodes, quiet, tmp_path):
    write(tmp_path, nodes.address)
    driver = campaign(tmp_path)

    def theirs() -> list[str]:
        second = nodes.processes("second")
        return [cell for cell, pid in under_way(tmp_path).items() if pid in second]

    [cell] = until(theirs, driver)
    nodes.kill("second")
    (tmp_path / "open").touch()
    assert ends(driver) == 0, told(tmp_path)
    assert outcomes(tmp_path)[cell]["attempts"] == 2
    assert "resumed after step" in (tmp_path / "runs/sweep/cells" / cell / "log.txt").read_text()
    assert f"{cell}  lost" in told(tmp_path)
    assert [told(tmp_path).count(f"{one}  done") for one in CELLS] == [1] * 4
    assert_same(tmp_path, quiet)
    nodes.start("second")


def test_runs_end_with_a_killed_driver_and_save_for_a_stopped_one(nodes, quiet, tmp_path, cache):
    write(tmp_path, nodes.address)
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75), (signal.SIGINT, 130)):
        driver = campaign(tmp_path)
        cell = next(iter(until(lambda: under_way(tmp_path), driver)))
        driver.send_signal(number)
        (tmp_path / "ajar").touch()
        assert ends(driver) == code, told(tmp_path)
        until(lambda: not processes(tmp_path))
        (tmp_path / "ajar").unlink()
    assert f"{cell}  stopped" in told(tmp_path)
    short(tmp_path)  # any other executor goes on with it
    (tmp_path / "open").touch()
    assert ends(campaign(tmp_path, RETRAIN_CACHE=cache)) == 0, told(tmp_path)
    assert outcomes(tmp_path)[cell]["attempts"] > 1
    assert_same(tmp_path, quiet)


def test_the_ranks_of_a_run_are_on_one_node_and_see_its_gpus(nodes, tmp_path):
    write_ranks(tmp_path, 2, executor="ray")
    with (tmp_path / "sweep.toml").open("a") as file:
        file.write(f'[ray]\naddress = "{nodes.address}"\ngpus_per_run = 1\n')
    nodes.start("wide", cpus=2, gpus=2)
    assert ends(campaign(tmp_path)) == 0, told(tmp_path)
    assert seen(tmp_path) == [("0", "2", "0,1", "1")] * 2 + [("1", "2", "0,1", "1")] * 2
    nodes.kill("wide")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"token": "wrong" * 8}, "the cluster rejects our token"),
        ({"token": None, "HOME": "/nonexistent"}, "no token found"),
        ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE is not token"),
    ],
)
def test_without_the_token_nothing_is_run(nodes, tmp_path, variables, message):
    write(tmp_path, nodes.address)
    assert ends(campaign(tmp_path, **variables)) == 2
    assert message in told(tmp_path)
    assert outcomes(tmp_path) == {}


def test_a_cluster_that_asks_for_no_token_is_refused(tmp_path):
    open_to_all = Nodes(RAY_AUTH_MODE="disabled")
    try:
        open_to_all.start("open")
        write(tmp_path, open_to_all.address)
        assert ends(campaign(tmp_path)) == 2
    finally:
        open_to_all.stop()
    assert "the cluster does not require a token" in told(tmp_path)
    assert ends(campaign(tmp_path)) == 2
    assert "cannot connect to a cluster" in told(tmp_path)
