"""The package's code lines may rise only for a feature that the changelog names."""

import subprocess

import pytest

from docs.growth import growth

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n### Changed\n\n- Another.\n"


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit; `commit()` adds another."""

    def git(*words):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    def commit():
        git("add", ".")
        git("commit", "-q", "-m", "c")

    (tmp_path / "retrain" / "lab").mkdir(parents=True)
    (tmp_path / "retrain" / "one.py").write_text('"""Doc."""\n\nx = 1\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git("init", "-q", "-b", "main")
    commit()
    return tmp_path, commit, git


def test_more_lines_need_a_new_entry_of_added(repository):
    root, commit, _ = repository
    assert growth(root) == ("code lines of the package: 1; there is no earlier commit to compare with", True)
    (root / "retrain" / "one.py").write_text('"""Doc."""\n\n# Why.\nx = 1\ny = (\n    2\n)\n')
    commit()
    line, allowed = growth(root)
    assert "4, and 1 in" in line
    assert "remove 3, or name the feature" in line
    assert not allowed
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("- Another.", "- Another.\n- More."))
    assert not growth(root)[1], "an entry of another section does not count"
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("- A thing.", "- A thing.\n- A feature."))
    assert growth(root)[1]


def test_fewer_lines_lab_and_docstrings_need_none(repository):
    root, commit, _ = repository
    (root / "retrain" / "one.py").write_text('"""A longer\ndocstring."""\n\n# And a comment.\nx = 1\n')
    (root / "retrain" / "lab" / "study.py").write_text("a = 1\nb = 2\n")
    commit()
    line, allowed = growth(root)
    assert "1, and 1 in" in line
    assert allowed


def test_all_commits_since_the_branch_left_main_count_together(repository):
    root, commit, git = repository
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    (root / "retrain" / "one.py").write_text("x = 1\ny = 2\n")
    assert not growth(root)[1], "what is not committed yet counts"
    commit()
    (root / "retrain" / "one.py").write_text("x = 1\ny = 3\n")
    commit()
    assert "2, and 1 in" in growth(root)[0]
