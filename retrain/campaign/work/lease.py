"""Who works on a job: leases as plain files in a folder that many machines may share.

leases/JOB/1.json, 2.json ... are the job's leases in turn; the newest counts. A lease is taken by creating the
next file, which one process only can (O_EXCL), so two that take over at the same moment cannot both succeed, and
none can take away a lease that it did not look at. The owner rewrites its file, with a count of beats, through
the handle that it was created with. A lease is free when it is released, when its owner is a process of this
machine that is gone, or when neither its file nor the run's metrics change for `lease_s` seconds of the clock of
whoever watches: no two clocks are ever compared.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from retrain.errors import StorageError
from retrain.system.lock import alive, identity
from retrain.system.records import read_object

# Names that only json reads: as attributes of a class they would count as unused.
_Owner = TypedDict("_Owner", {"host": str, "pid": int, "born": str | None, "space": str})  # noqa: UP013
_Child = TypedDict("_Child", {"host": str, "pid": int})  # noqa: UP013
_Content = TypedDict(  # noqa: UP013
    "_Content",
    {"beat": int, "crashes": int, "starts": int, "seconds": float, "released": bool, "owner": _Owner, "child": _Child},
    total=False,
)
_CONTENT: TypeAdapter[Any] = TypeAdapter(_Content)


class Lease:
    """A lease that this process holds, until `owned` says otherwise.

    Attributes:
        facts: what the file holds besides its owner: `crashes`, `starts`, `seconds`, and the run's process, `child`.
        previous: the last content of the lease before it.
    """

    def __init__(self, path: Path, previous: Mapping[str, Any]) -> None:
        self._path, self._beats = path, 0
        self._handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self.previous = previous
        self.facts: dict[str, Any] = {name: previous.get(name, 0) for name in ("crashes", "starts", "seconds")}
        self.beat()

    def beat(self, **facts: Any) -> None:
        """Show a sign of life, and note `facts`."""
        self.facts |= facts
        self._beats += 1
        data = json.dumps({"owner": _me(), "beat": self._beats, **self.facts}).encode()
        os.pwrite(self._handle, data, 0)
        os.ftruncate(self._handle, len(data))
        os.fsync(self._handle)

    def owned(self) -> bool:
        """Whether nobody has taken it over."""
        return self._path.exists() and not (self._path.parent / f"{_number(self._path) + 1}.json").exists()

    def release(self) -> None:
        """Let others have the job at once."""
        self.beat(released=True)
        self.close()

    def close(self) -> None:
        """Beat no more; the lease is over when the job has an outcome, or `lease_s` seconds from now."""
        os.close(self._handle)


class LeaseWatch:
    """The leases of a campaign as one process sees them.

    Args:
        folder: leases/.
        lease_s: seconds without a change after which a lease is free.
    """

    def __init__(self, folder: Path, lease_s: float) -> None:
        self._folder, self._lease_s = folder, lease_s
        self._seen: dict[str, tuple[Any, float]] = {}

    def take(self, job: str, progress: Path) -> Lease | None:
        """The job's lease, if it is free; None if somebody has it or was quicker.

        Args:
            progress: a file that grows while the run goes on.
        """
        folder = self._folder / job
        folder.mkdir(parents=True, exist_ok=True)
        number = max((_number(path) for path in folder.glob("*.json")), default=0)
        path = folder / f"{number}.json"
        last = _last(path) if number else {"released": True}
        if not (last.get("released") or _gone(last) or self._still(job, (path, last, _size(progress)))):
            return None
        with suppress(FileExistsError):
            return Lease(folder / f"{number + 1}.json", last)
        return None

    def _still(self, job: str, state: Any) -> bool:
        """Whether nothing has changed for so long that the owner must be dead or cut off."""
        now = time.monotonic()
        before, since = self._seen.get(job, (None, now))
        if state != before:
            self._seen[job] = (state, now)
            return False
        return now - since > self._lease_s


def held(folder: Path, job: str) -> bool | None:
    """Whether somebody works on the job, as far as can be told at once; None if nobody ever has."""
    newest = max((folder / job).glob("*.json"), key=_number, default=None)
    if newest is None:
        return None
    lease = _last(newest)
    return not lease.get("released") and not _gone(lease)


def _last(path: Path) -> dict[str, Any]:
    """The content of a lease; empty if its owner is rewriting it at this moment, or if it is none."""
    with suppress(StorageError):
        return read_object(path, _CONTENT)
    return {}


def _gone(lease: Mapping[str, Any]) -> bool:
    """Whether its owner was a process of this machine that no longer exists."""
    owner = lease.get("owner")
    return bool(owner) and owner["space"] == _me()["space"] and not alive(owner)


def _me() -> dict[str, Any]:
    """This process, with its machine and namespace: a process id is unique only within these."""
    me, space = identity(os.getpid()), Path("/proc/self/ns/pid")
    return me | {"space": f"{me['host']} {space.readlink()}" if space.is_symlink() else me["host"]}


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
