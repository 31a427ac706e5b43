"""Any runs become a table: equal configurations are one condition."""

import shutil

import pytest

from retrain.campaign.verdict.analysis import analyze
from retrain.campaign.verdict.any_runs import compare_command, read_runs
from retrain.errors import ConfigError
from tests.campaign.tables import write_campaign


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Two conditions, four seeds; and the same runs under names of their own."""
    root = tmp_path_factory.mktemp("any")
    options = {"conditions": ("grpo", "maxrl"), "seeds": range(4), "steps": 40, "failed": (), "missing": ()}
    write_campaign(root / "one", **options)
    for label in ("grpo", "maxrl"):
        for seed in range(4):
            (root / f"run-{label}-s{seed}").symlink_to(root / "one" / "cells" / label / f"s{seed}")
    return root


def test_runs_of_one_configuration_are_one_condition_paired_by_seed(cells):
    found = read_runs(
        [cells / "one" / "cells" / label / f"s{seed}" for label in ("maxrl", "grpo") for seed in range(4)]
    )
    assert found.conditions == ("maxrl", "grpo")
    assert found.baseline == "maxrl"
    assert not found.ladder
    (one,) = analyze(found).primary
    assert (one.condition, one.against, one.seeds) == ("grpo", "maxrl", (0, 1, 2, 3))


def test_a_campaign_stands_for_its_runs(cells):
    found = read_runs([cells / "one"])
    assert found.conditions == ("grpo", "maxrl")
    assert len(found.cells) == 8


def test_equal_configuration_and_seed_are_conditions_of_their_own(cells, tmp_path):
    write_campaign(tmp_path / "two", conditions=("grpo",), seeds=[0], steps=40, failed=(), missing=())
    found = read_runs([cells / "one/cells/grpo/s0", tmp_path / "two/cells/grpo/s0", cells / "one/cells/maxrl/s0"])
    assert found.conditions == ("s0", "s0 (2)", "maxrl")


def test_conditions_of_two_campaigns_under_one_label_keep_all_their_cells(cells, tmp_path):
    options = {"seeds": range(4), "steps": 40, "failed": (), "missing": (("grpo", 3),)}
    write_campaign(tmp_path / "c3", conditions=("grpo", "maxrl+gtpo"), **options)
    found = read_runs([cells / "one", tmp_path / "c3"])
    assert found.conditions == ("one: grpo", "maxrl", "c3: grpo", "maxrl+gtpo")
    assert len(found.cells) == 16
    paths = {cell.path for cell in found.of("one: grpo")}
    assert paths == {cells / "one/cells/grpo" / f"s{seed}" for seed in range(4)}
    assert [cell.status for cell in found.of("c3: grpo")] == ["done", "done", "done", "missing"]
    assert {(one.condition, one.against) for one in analyze(found).primary} >= {("c3: grpo", "one: grpo")}


def test_a_campaign_and_its_copy_of_the_same_name_are_told_apart(cells, tmp_path):
    shutil.copytree(cells / "one", tmp_path / "one")
    found = read_runs([cells / "one", tmp_path / "one"])
    assert found.conditions == ("one: grpo", "one: maxrl", "one: grpo (2)", "one: maxrl (2)")
    assert len(found.cells) == 16
    assert {cell.path.parents[2] for cell in found.of("one: grpo (2)")} == {tmp_path / "one"}


def test_names_lose_their_seed(tmp_path):
    for seed in (0, 1):
        write_campaign(tmp_path / f"c{seed}", conditions=("grpo",), seeds=[seed], steps=40, failed=(), missing=())
        (tmp_path / f"c{seed}/cells/grpo/s{seed}").rename(tmp_path / f"quick-s{seed}")
    assert read_runs([tmp_path / "quick-s0", tmp_path / "quick-s1"]).conditions == ("quick",)


def test_a_path_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="contains no run"):
        read_runs([tmp_path])


def test_the_command_is_quoted(tmp_path):
    assert compare_command([tmp_path / "a b"]) == f"retrain compare '{tmp_path}/a b'"
