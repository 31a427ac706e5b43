"""Print the package's code lines beside those of the merge base, for `make check`.

They may rise only for a feature that CHANGELOG.md names: the exit code is 1 if there are more lines and its section
"Added" has no new one. lab/ and adapters/ are not counted. The merge base is that with origin/main, or the commit
before HEAD where there is no such branch.

`python -m docs.growth [FOLDER]`, the root of a repository.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from docs.measure import ROOT, code_lines

_UNCOUNTED = ("retrain/lab/", "retrain/adapters/")


def growth(root: Path) -> tuple[str, bool]:
    """Return a line with the counts, and whether they are allowed."""
    base = _merge_base(root)
    now = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in (root / "retrain").rglob("*.py")}
    size = _size(now)
    if not base:
        return f"code lines of the package: {size:,}; there is no earlier commit to compare with", True
    names = _git(root, "ls-tree", "-r", "--name-only", base, "retrain").splitlines()
    before = _size({name: _git(root, "show", f"{base}:{name}") for name in names if name.endswith(".py")})
    line = f"code lines of the package without lab/ and adapters/: {size:,}, and {before:,} in {base[:9]}"
    named = _added((root / "CHANGELOG.md").read_text("utf-8")) - _added(_git(root, "show", f"{base}:CHANGELOG.md"))
    if size <= before or named:
        return line, True
    return f"{line}; remove {size - before:,}, or name the feature that they add in CHANGELOG.md, section Added", False


def _merge_base(root: Path) -> str:
    """Return the commit to compare with; "" if there is none."""
    head = _git(root, "rev-parse", "HEAD").strip()
    base = _git(root, "merge-base", "HEAD", "origin/main").strip()
    if base and base != head:
        return base
    changed = base == head and _git(root, "status", "--porcelain", "--", "retrain").strip()
    return base if changed else _git(root, "rev-parse", "--verify", "--quiet", "HEAD~1").strip()


def _size(sources: dict[str, str]) -> int:
    return sum(len(code_lines(source)) for name, source in sources.items() if not name.startswith(_UNCOUNTED))


def _added(changelog: str) -> set[str]:
    """Return the entries of all sections "Added"."""
    sections = re.findall(r"^### Added\n(.*?)(?=^#|\Z)", changelog, re.MULTILINE | re.DOTALL)
    return {line for section in sections for line in section.splitlines() if line.startswith("- ")}


def _git(root: Path, *words: str) -> str:
    """Return the output of a git command; "" if it fails."""
    command = ["git", "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    shown, allowed = growth(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
    print(shown)
    sys.exit(not allowed)
