"""Leases on jobs, as plain files in a directory that several machines may share.

The files leases/JOB/1.json, 2.json ... are the successive leases of a job; the newest counts. A worker takes a lease
by creating the next file. Only one process can create a file (O_EXCL). So two workers cannot both take a lease, and a
worker that has read an outdated lease cannot replace a newer one. The owner renews its lease: it rewrites the file,
with a heartbeat count, through the handle that created it.

A lease is free if one of these conditions holds: it was released; its owner was a process of this machine that no
longer exists; neither its file nor the run's metrics changed for `LEASE_S` seconds. The worker that wants the lease
measures these seconds with its own clock, so the clocks of two machines are never compared.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrain.errors import StorageError
from retrain.system.files import writing
from retrain.system.lock import alive, identity
from retrain.system.records import read_json

LEASE_S = 60.0
"""Seconds without a sign of life after which a lease is free. A worker renews its leases six times in this time, so
that a short pause of a shared disk costs no run."""


class Lease:
    """A lease that this process holds until it releases the lease or another worker takes it.

    Args:
        path: file of the lease, which must not exist.
        previous: content of the preceding lease of the job.

    Attributes:
        facts: content of the file besides its owner: `crashes`, `starts`, `seconds`, and the run's process, `child`.
        previous: as given.

    Raises:
        FileExistsError: another process has taken the lease.
    """

    def __init__(self, path: Path, previous: Mapping[str, Any]) -> None:
        self._path = path
        self._beats = 0
        self._handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self.previous = previous
        self.facts: dict[str, Any] = {name: previous.get(name, 0) for name in ("crashes", "starts", "seconds")}
        self.beat()

    def beat(self, **facts: Any) -> None:
        """Renew the lease, and store `facts` in its file."""
        self.facts |= facts
        self._beats += 1
        data = json.dumps({"owner": identity(os.getpid()), "beat": self._beats, **self.facts}).encode()
        with writing(self._path):
            os.pwrite(self._handle, data, 0)
            os.ftruncate(self._handle, len(data))
            os.fsync(self._handle)

    def owned(self) -> bool:
        """Return True while this process owns the job: no other worker has taken it, and the lease's file exists."""
        return self._path.exists() and not (self._path.parent / f"{_number(self._path) + 1}.json").exists()

    def release(self) -> None:
        """Give up the job, so that another worker can take it immediately."""
        self.beat(released=True)
        self.close()

    def close(self) -> None:
        """Stop renewing the lease without releasing it.

        Other workers take the job only after `LEASE_S` seconds, and only if it has no outcome by then.
        """
        os.close(self._handle)


class LeaseWatch:
    """Watches the leases of a campaign and takes free ones.

    Args:
        folder: the directory leases/ of the campaign.
        lease_s: seconds without a change after which a lease is free.
    """

    def __init__(self, folder: Path, lease_s: float = LEASE_S) -> None:
        self._folder = folder
        self._lease_s = lease_s
        self._seen: dict[str, tuple[Any, float]] = {}

    def take(self, job: str, progress: Path) -> Lease | None:
        """Take the lease of a job; None if another worker holds it or takes it first.

        Args:
            job: id of the job.
            progress: a file that grows while the run makes progress.
        Raises:
            StorageError: the directory cannot be written.
        """
        folder = self._folder / job
        with writing(folder):
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
        """Return True if `state` has not changed for `lease_s` seconds, so that the owner counts as dead."""
        now = time.monotonic()
        before, since = self._seen.get(job, (None, now))
        if state != before:
            self._seen[job] = (state, now)
            return False
        return now - since > self._lease_s


def held(folder: Path, job: str) -> bool | None:
    """Return True if a worker holds the job's lease, False if it is free, None if no worker ever took it.

    The check does not wait `LEASE_S` seconds: a dead owner on another machine still counts as holding the lease.
    """
    newest = max((folder / job).glob("*.json"), key=_number, default=None)
    if newest is None:
        return None
    lease = _last(newest)
    return not lease.get("released") and not _gone(lease)


def _last(path: Path) -> dict[str, Any]:
    """Read a lease; empty if it is no JSON object, as while its owner rewrites it."""
    with suppress(StorageError):
        return read_json(path)
    return {}


def _gone(lease: Mapping[str, Any]) -> bool:
    """Return True if the owner was a process of this machine that no longer exists."""
    owner = lease.get("owner")
    return bool(owner) and not alive(owner)


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
