"""`--ranks N`: this machine's processes of one run, with the exit code of whatever ended it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory

from retrain.errors import EngineError, Preempted
from retrain.system.process import SignalHandler, follower
from retrain.system.terminal import say
from retrain.training.ranks import RENDEZVOUS

_SLURM = """\
#!/bin/bash
# {name} on {nodes} machines with {ranks} GPUs each; all of them see this folder. Adapt the limits.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={ranks}
#SBATCH --gres=gpu:{ranks}
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
#SBATCH --output={name}-%j.log

cd {folder}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS STOPPED=.stopped-$SLURM_JOB_ID
rm -f "$STOPPED"
# A job that SLURM has put back is over wherever it ran: the lock of its run is nobody's.
[ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ] || rm -f {lock}
# One task per rank, not torchrun: its agent would turn every exit code into 1 and end the ranks within a step.
# A rank that was stopped ends with 0 and leaves a note of it: for any other code SLURM kills the ranks that still save.
srun --kill-on-bad-exit=1 bash -c 'trap : TERM
    RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID "$0" "$@"
    code=$?
    [ $code -ne {stopped} ] || {{ touch "$STOPPED"; code=0; }}
    exit $code' \\
    {requeued}
"""
_REQUEUED = """\
{command} &
child=$!
trap '{stop}' TERM
wait $child  # ended by the signal that the trap passes on
wait $child
code=$?{after}
# 75: stopped in time and saved. The job goes back into the queue.
if [ $code -eq 75 ]; then scontrol requeue "{job}"; fi
exit $code"""
_STOP_STEP = 'scancel --signal=TERM "$SLURM_JOB_ID.0"'
"""SIGTERM to srun itself would kill the ranks at once."""
_WAS_STOPPED = """
if [ $code -eq 0 ] && [ -e "$STOPPED" ]; then code=75; rm -f "$STOPPED"; fi"""
_GRACE_S = 4.0
"""After another rank has failed, how long rank 0 has to say so and to end: none of them can go on."""
_TAIL = 4000


class Launcher(SignalHandler):
    """Runs a command as ranks 0 to `size` - 1; SIGTERM goes on to all of them, and they end after their step.

    Rank 0 has this process's terminal. What another rank prints is shown if that rank fails first. torch's own launcher
    is not used: it ends ranks 30 s after SIGTERM, in the middle of a long step, and turns every exit code into 1.
    """

    def __init__(self, command: Sequence[str], size: int) -> None:
        self._command, self._size = command, size
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, int] = {}
        self._stopped = False

    def run(self) -> int:
        """The run's exit code: 0 if all ranks return 0, 75 if they were stopped, else that of the first failure."""
        with TemporaryDirectory(prefix="retrain-ranks-") as folder, self:
            try:
                self._start(Path(folder))
                self._wait()
            except KeyboardInterrupt:  # the terminal has told the ranks as well
                self._wait_until(time.monotonic() + _GRACE_S)
                return 130
            finally:
                for rank in self._ranks:
                    rank.kill()
                    rank.wait()
            return self._outcome(Path(folder))

    def receive(self, number: int) -> None:
        self._stopped = True
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def _start(self, folder: Path) -> None:
        address = f"file://{folder / 'rendezvous'}"
        shared = {"WORLD_SIZE": str(self._size), "LOCAL_WORLD_SIZE": str(self._size), RENDEZVOUS: address}
        for number in range(self._size):
            own = {**os.environ, **shared, "RANK": str(number), "LOCAL_RANK": str(number)}
            output = None if number == 0 else (folder / str(number)).open("wb")
            self._ranks.append(
                subprocess.Popen(  # noqa: S603 - this program
                    self._command,
                    env=own,
                    stdout=output,
                    stderr=output,
                    preexec_fn=follower(os.getpid()),
                )
            )

    def _wait(self) -> None:
        """Until all ranks have ended, or one has failed and rank 0 has ended or had its time.

        One that was stopped has not failed: all ranks stop after the same step, but rank 0 writes what others do not.
        """
        while not set(self._ended.values()) - {0, Preempted.exit_code}:
            if self._collect():
                return
            time.sleep(0.1)
        self._wait_until(time.monotonic() + _GRACE_S)

    def _wait_until(self, deadline: float) -> None:
        while not self._collect() and 0 not in self._ended and time.monotonic() < deadline:
            time.sleep(0.1)

    def _collect(self) -> bool:
        """Note the ranks that have ended, those that a signal ended first; whether all have."""
        codes = {number: rank.poll() for number, rank in enumerate(self._ranks) if number not in self._ended}
        found = {number: code for number, code in codes.items() if code is not None}
        self._ended.update(sorted(found.items(), key=lambda item: item[1] >= 0))
        return len(self._ended) == self._size

    def _outcome(self, folder: Path) -> int:
        failures = {number: code for number, code in self._ended.items() if code}
        if not failures:
            return 0
        if self._stopped and {Preempted.exit_code, -signal.SIGTERM} & set(failures.values()):
            return Preempted.exit_code
        number, code = next(iter(failures.items()))
        if number and code != failures.get(0):
            text = (folder / str(number)).read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
            say(f"rank {number} failed first:\n{text}", error=True)
        if code > 0:
            return code
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        say(
            f"rank {number} on {gethostname()} was ended by {name}{hint}; "
            "--resume auto goes on from the last checkpoint",
            error=True,
        )
        return EngineError.exit_code


def slurm_script(
    run: Path, file: Path, overrides: Sequence[str], allow_change: Sequence[str], ranks: int, nodes: int
) -> str:
    """A script for `sbatch` that trains one run on several machines, and continues it where it was stopped."""
    command = [sys.executable, "-m", "retrain.cli.main", "train", str(file), "--resume", "auto", "--plain"]
    for option, values in (("--set", overrides), ("--allow-change", allow_change)):
        command += [part for value in values for part in (option, value)]
    end = requeued(shlex.join(command), "$SLURM_JOB_ID", _STOP_STEP, _WAS_STOPPED)
    places = {"folder": shlex.quote(str(Path.cwd())), "lock": shlex.quote(str(run / "lock"))}
    return _SLURM.format(name=run.name, nodes=nodes, ranks=ranks, **places, stopped=Preempted.exit_code, requeued=end)


def requeued(command: str, job: str, stop: str = "kill -TERM $child", after: str = "") -> str:
    """The end of a SLURM script: it runs a command, passes SIGTERM on to it, and requeues a job that it stopped.

    Args:
        stop: what passes the signal on. after: what else is to be known of `$code`.
    """
    return _REQUEUED.format(command=command, job=job, stop=stop, after=after)


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run `retrain` with these arguments as several ranks; returns the exit code."""
    return Launcher([sys.executable, "-m", "retrain", *arguments], ranks).run()
