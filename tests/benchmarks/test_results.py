"""Scripts write their tables into RESULTS.md."""

import re

import pytest

from benchmarks import results


@pytest.fixture
def file(tmp_path, monkeypatch):
    (file := tmp_path / "RESULTS.md").write_text("# A\n<!-- x -->\nold\n<!-- end -->\n<!-- xy -->\nb\n<!-- end -->\n")
    monkeypatch.setattr(results, "RESULTS", file)
    return file


def test_a_block_is_replaced_and_nothing_else(file):
    results.write("x", "| new |\n")
    assert file.read_text() == "# A\n<!-- x -->\n| new |\n<!-- end -->\n<!-- xy -->\nb\n<!-- end -->\n"
    assert results.read("x") == "| new |"


def test_a_block_that_is_missing_is_named(file):
    with pytest.raises(ValueError, match="0 blocks 'z'"):
        results.write("z", "")


def test_every_block_of_the_file_has_a_name_of_its_own():
    names = re.findall(r"^<!-- ((?!end )[\w-]+) -->$", results.RESULTS.read_text(), re.MULTILINE)
    assert len(names) == len({*names}) > 0
    assert all(results.read(name) for name in names)
