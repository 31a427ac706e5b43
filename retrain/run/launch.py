"""Start the ranks of one run on this machine (`--ranks N`), and write SLURM scripts."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import gethostname

from retrain.errors import EngineError, Preempted
from retrain.system.process import SignalHandler, end, scratch_folder, start
from retrain.system.terminal import say
from retrain.training.distributed.ranks import RENDEZVOUS

_SLURM = """\
#!/bin/bash
# {about}
{options}
#SBATCH --time=24:00:00
#SBATCH --requeue

cd {folder}
{setup}{command} &
child=$!
trap '{stop}' TERM
wait $child  # returns when a signal arrives; the next wait then waits for the end
wait $child
code=$?{after}
# 75: stopped in time and saved. Put the job back into the queue.
if [ $code -eq 75 ]; then scontrol requeue "{job}"; fi
exit $code
"""
_RANKS = """\
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS STOPPED=.stopped-$SLURM_JOB_ID
rm -f "$STOPPED"
# SLURM requeues a job only after it has ended everywhere, so a lock that is left is stale.
[ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ] || rm -f {lock}
# One task per rank, not torchrun, whose agent turns every exit code into 1 and kills ranks within a step.
# A stopped rank exits with 0 and leaves a file: at any other code SLURM would kill ranks that still save.
srun --kill-on-bad-exit=1 bash -c 'trap : TERM
    RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID "$0" "$@"
    code=$?
    [ $code -ne {stopped} ] || {{ touch "$STOPPED"; code=0; }}
    exit $code' \\
    """
_STOP_STEP = 'scancel --signal=TERM "$SLURM_JOB_ID.0"'
"""Signals the job step: SIGTERM to srun itself would kill the ranks at once."""
_WAS_STOPPED = """
if [ $code -eq 0 ] && [ -e "$STOPPED" ]; then code=75; rm -f "$STOPPED"; fi"""
_GRACE_S = 4.0
"""Seconds that rank 0 has to report the failure of another rank and to exit."""
_INTERRUPTED = 128 + signal.SIGINT
_STOPPED = {Preempted.exit_code, _INTERRUPTED, -signal.SIGTERM, -signal.SIGINT}
"""Exit codes of a rank that was stopped: after it saved, or by the signal itself before it had a handler."""
_TAIL = 4000
"""Number of characters shown of a failed rank's output, from its end."""


class Launcher(SignalHandler):
    """Runs a command as ranks 0 to `size` - 1, and forwards SIGTERM and Ctrl-C to all of them.

    After the first signal the ranks finish their step and save; the second one ends them at once. Rank 0 prints to
    this process's terminal; the output of another rank is shown only if that rank fails first. torchrun is not used:
    it kills ranks 30 s after SIGTERM, in the middle of a long step, and turns every exit code into 1.
    """

    numbers = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, command: Sequence[str], size: int) -> None:
        self._command, self._size = command, size
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, int] = {}
        self._signals = 0
        self._interrupted = False

    def run(self) -> int:
        """Run all ranks to their end, and return the exit code of the run.

        It is 0 if all ranks return 0, 75 if they were stopped, 130 after Ctrl-C, and otherwise the
        code of the rank that failed first.
        """
        with scratch_folder("retrain-ranks-") as folder, self:
            try:
                self._start(folder)
                self._wait()
            finally:
                for rank in self._ranks:
                    end(rank)
            return self._outcome(folder)

    def receive(self, number: int) -> None:
        self._signals += 1
        self._interrupted = self._interrupted or number == signal.SIGINT
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def _start(self, folder: Path) -> None:
        # A file, because another program could take a port.
        address = f"file://{folder / 'rendezvous'}"
        shared = {"WORLD_SIZE": str(self._size), "LOCAL_WORLD_SIZE": str(self._size), RENDEZVOUS: address}
        for number in range(self._size):
            rank_variables = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
            # Only rank 0 speaks to the terminal; the files of the others are shown if they fail.
            output = None if number == 0 else (folder / str(number)).open("wb")
            self._ranks.append(start(self._command, rank_variables, stdout=output, stderr=output))

    def _wait(self) -> None:
        """Wait until all ranks have ended, or one has failed and rank 0 has had time to report it.

        A stopped rank has not failed: all ranks stop after the same step, but rank 0 still writes
        files when the others have ended.
        """
        while self._signals < 2 and not set(self._ended.values()) - {0, *_STOPPED}:
            if self._collect():
                return
            time.sleep(0.1)
        # Rank 0 knows which component failed, which an exit code does not say.
        deadline = time.monotonic() + _GRACE_S
        while not self._collect() and 0 not in self._ended and time.monotonic() < deadline:
            time.sleep(0.1)

    def _collect(self) -> bool:
        """Record the exit codes of ranks that have ended, and return True if all ranks have.

        Among ranks that ended since the last call, those killed by a signal are recorded first, because they are
        more likely to be the cause.
        """
        codes = {number: rank.poll() for number, rank in enumerate(self._ranks) if number not in self._ended}
        ended = {number: code for number, code in codes.items() if code is not None}
        self._ended.update(sorted(ended.items(), key=lambda item: item[1] >= 0))
        return len(self._ended) == self._size

    def _outcome(self, folder: Path) -> int:
        failures = {number: code for number, code in self._ended.items() if code}
        if self._signals and (len(self._ended) < self._size or _STOPPED & set(failures.values())):
            return _INTERRUPTED if self._interrupted else Preempted.exit_code
        if not failures:
            return 0
        number, code = next(iter(failures.items()))
        # If rank 0 ended with the same code, it has printed the error.
        if number and code != failures.get(0):
            output = (folder / str(number)).read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
            cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            said = f"its output ends:\n{output}" if output else "it printed nothing"
            say(f"rank {number} failed first ({cause}); {said}", error=True)
        if code > 0:
            return code
        # A signal from outside, such as the kernel's for lack of memory, is a failure of the machine: exit code 5.
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        say(
            f"rank {number} on {gethostname()} was ended by {name}{hint}; "
            "--resume auto continues from the last checkpoint",
            error=True,
        )
        return EngineError.exit_code


def slurm_script(
    run: Path, file: Path, overrides: Sequence[str], allow_change: Sequence[str], ranks: int, nodes: int
) -> str:
    """Return a script for `sbatch` that trains one run on several machines, and resumes it.

    Args:
        file: the configuration; overrides, allow_change: as on the command line.
        ranks: GPUs of each machine.
        nodes: number of machines.
    """
    command = [sys.executable, "-m", "retrain", "train", str(file), "--resume", "auto", "--plain"]
    for option, values in (("--set", overrides), ("--allow-change", allow_change)):
        command += [part for value in values for part in (option, value)]
    options = {
        "job-name": run.name,
        "nodes": nodes,
        "ntasks-per-node": ranks,
        "gres": f"gpu:{ranks}",
        # Five minutes before the limit: enough to finish a long step and save.
        "signal": "B:TERM@300",
        "output": f"{run.name}-%j.log",
    }
    return slurm_job(
        f"{run.name} on {nodes} machines with {ranks} GPUs each; all of them see this folder. Adapt the limits.",
        options,
        shlex.join(command),
        job="$SLURM_JOB_ID",
        setup=_RANKS.format(lock=shlex.quote(str(run / "lock")), stopped=Preempted.exit_code),
        stop=_STOP_STEP,
        after=_WAS_STOPPED,
    )


def slurm_job(  # noqa: PLR0913 - the places of the template
    about: str,
    options: Mapping[str, object],
    command: str,
    *,
    job: str,
    folder: str | None = None,
    setup: str = "",
    stop: str = "kill -TERM $child",
    after: str = "",
) -> str:
    """Return a script for `sbatch` that runs a command and forwards SIGTERM to it.

    If the command exits with 75 (stopped and saved), the script requeues the job.

    Args:
        about: comment at the head of the script.
        options: options of sbatch, by name.
        job: shell expression of the job's id.
        folder: working directory of the command; None: that of this process.
        setup: shell lines before the command.
        stop: shell command that forwards the signal.
        after: shell lines after the command that may change `$code`.
    """
    return _SLURM.format(
        about=about,
        options="\n".join(f"#SBATCH --{name}={value}" for name, value in options.items()),
        folder=shlex.quote(folder or str(Path.cwd())),
        setup=setup,
        command=command,
        job=job,
        stop=stop,
        after=after,
    )


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run `retrain` with these arguments as several ranks, and return the exit code."""
    return Launcher([sys.executable, "-m", "retrain", *arguments], ranks).run()
