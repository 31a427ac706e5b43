"""Refuse code that a stored configuration names and that is not the user's."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, distribution, distributions, packages_distributions
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from retrain.errors import ForeignCodeError
from retrain.registry.sources import is_installed

_PACKAGE = __name__.partition(".")[0]
FIX = "check the value, then add --trust, or override the key with --set"


class _RunFinder(MetaPathFinder):
    """Refuses modules whose file is in a run directory or the directory of its campaign, and finds no others.

    As a finder it also refuses what the user's own modules import, and every parent package before it runs.
    """

    def __init__(self, run: Path) -> None:
        run = run.resolve()
        # A run of a campaign lies in CAMPAIGN/cells/CONDITION/SEED.
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
    # First, before the finder that would load the file.
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def check_may_import(path: str, directories: Sequence[Path]) -> None:
    """Raise ForeignCodeError inside `refused` if a dotted path begins with installed code that is no plug-in.

    Importing alone runs code: `venv.__main__` makes an environment, and `antigravity` starts a browser. A package with
    an entry point of this one was installed as a plug-in.

    Args:
        path, directories: see `check_is_own`.
    """
    package = path.replace(":", ".").partition(".")[0]
    if package == _PACKAGE or not _is_refusing():
        return
    spec = None if package == "__main__" else find_spec(package)  # a module without a parent is found, not run
    entries = (entry for installed in _distributions(package) for entry in installed.entry_points)
    is_plugin = any(entry.group.startswith(f"{_PACKAGE}.") for entry in entries)
    if not is_plugin and spec and not _is_users(package, spec, directories):
        raise ForeignCodeError(f'"{path}" is neither a component nor a file of the working directory', FIX)


def _is_refusing() -> bool:
    return any(isinstance(finder, _RunFinder) for finder in sys.meta_path)


def check_is_own(path: str, module: ModuleType, target: Any, directories: Sequence[Path]) -> None:
    """Raise ForeignCodeError inside `refused` unless an object is defined in a file of the user.

    Functions of Python and of packages are not the user's: `os.system` as a reward would run text of the model. The
    module that defines the object counts as well as the one that the path names, because a module of the user may
    import `subprocess.run`.

    Args:
        path: the dotted path, for the error.
        module: the module that it names.
        target: the object that it names.
        directories: the working directory, its `plugins/`, and the search paths.
    """
    if not _is_refusing():
        return
    modules = [module]
    if inspect.isroutine(target) or inspect.isclass(target):
        modules.append(sys.modules.get(target.__module__, sys))
    if not all(_is_users(defining.__name__, defining.__spec__, directories) for defining in modules):
        raise ForeignCodeError(f'"{path}" is neither a component nor a file of the working directory', FIX)


def _is_users(name: str, spec: ModuleSpec | None, directories: Sequence[Path]) -> bool:
    """Return True if a module is a file in one of the directories and part of no installed distribution."""
    folders = (spec.submodule_search_locations if spec else None) or ["/"]  # of a package without __init__.py
    file = Path(spec.origin if spec and spec.has_location and spec.origin else folders[0]).resolve()
    package = name.partition(".")[0]
    if package == _PACKAGE or is_installed(spec) or not _within(file, directories):
        return False
    for installed in _distributions(package):  # pip install --target, or an archive on PYTHONPATH
        if file.is_relative_to(Path(str(installed.locate_file(""))).resolve()):
            return False
    # The whole folder of an editable installation belongs to it: its tests and scripts can be imported too.
    return not _within(file, _editable_folders()) or _within(file, directories[1:])


def _distributions(package: str) -> list[Distribution]:
    return [distribution(name) for name in packages_distributions().get(package, ())]


def _within(file: Path, directories: Iterable[Path]) -> bool:
    return any(file.is_relative_to(directory.resolve()) for directory in directories)


def _editable_folders() -> Iterator[Path]:
    """Yield the folders of editable installations (PEP 610), and the checkout of this package."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        yield checkout
    for installed in distributions():
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            yield Path(unquote(urlsplit(origin["url"]).path))
