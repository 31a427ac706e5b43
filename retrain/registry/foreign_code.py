"""Refuse code that a stored configuration names and that is not the user's."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from retrain.errors import ForeignCodeError
from retrain.registry.sources import is_installed

FIX = "check the value, then add --trust, or override the key with --set"


class _RunFinder(MetaPathFinder):
    """Refuses modules whose file is in a run directory or the directory of its campaign, and finds no others.

    As a finder it also refuses what the user's own modules import, and every parent package before it runs.
    """

    def __init__(self, run: Path) -> None:
        run = run.resolve()
        self._run = run.parents[2] if run.match("cells/*/*") else run

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec and spec.origin and Path(spec.origin).resolve().is_relative_to(self._run):
            raise ForeignCodeError(f"{spec.origin} belongs to the run that is opened", FIX)
        return None


@contextmanager
def refused(run: Path) -> Generator[None]:
    """Refuse inside the block to import files of a run directory, and dotted paths to code that is not the user's."""
    finder = _RunFinder(run)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def check_is_own(path: str, module: ModuleType, directories: Iterable[Path]) -> None:
    """Raise ForeignCodeError inside `refused` unless a module is in one of the directories and not installed.

    Functions of Python and of packages are not the user's: `os.system` as a reward would run text of the model.

    Args:
        path: the dotted path, for the error.
        module: the module that it names.
        directories: the working directory and the search paths.
    """
    if not any(isinstance(finder, _RunFinder) for finder in sys.meta_path):
        return
    file = Path(getattr(module, "__file__", None) or "/")
    if is_installed(module.__spec__) or not any(file.resolve().is_relative_to(one.resolve()) for one in directories):
        raise ForeignCodeError(f'"{path}" is neither a component nor a file of the working directory', FIX)
