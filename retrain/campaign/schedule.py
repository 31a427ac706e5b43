"""The runs that a campaign needs: all of its plan, or with looks those of the conditions that have not stopped.

What is needed is a function of plan.json and of the stored runs, so every process of a campaign decides alike, and an
interrupted campaign continues with the same decisions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.campaign.plan.plan_file import Job
from retrain.campaign.verdict.looks import LookState, look_state
from retrain.campaign.work.campaign_directory import CampaignDirectory
from retrain.campaign.work.progress import Progress


class Schedule:
    """The runs that a campaign needs, and those that are due.

    The runs of a look are due only when the look before has been tested: a run that began earlier would be lost if its
    condition stopped.

    Args:
        campaign: the campaign.
    """

    def __init__(self, campaign: CampaignDirectory) -> None:
        self._campaign = campaign
        self._sizes = campaign.plan.look_sizes
        self._position = {seed: index for index, seed in enumerate(campaign.plan.seed_list)}
        self._ended: set[str] = set()
        self._state = LookState(0, {})

    def state(self) -> LookState:
        """Return the looks that have been tested, and the conditions that have stopped."""
        ended = {job.id for job in self._campaign.jobs if self._campaign.outcome(job)}
        # --retry-failed takes outcomes away that a look may have used, so that its decisions are made again.
        if not self._ended <= ended:
            self._state = LookState(0, {})
        self._ended = ended
        # Reading the results of all runs takes a second, so they are read only when a look may be complete.
        if self._state.passed < len(self._sizes) and all(job.id in ended for job in self._asked_for()):
            self._state = look_state(self._campaign.path, self._campaign.plan)
        return self._state

    def needed(self) -> list[Job]:
        """Return the runs that the plan, or the looks so far, ask for; the campaign ends when all have an outcome."""
        self.state()
        return self._asked_for()

    def due(self) -> list[Job]:
        """Return the needed runs without an outcome, in order; none when the campaign has ended."""
        return [job for job in self.needed() if not self._campaign.outcome(job)]

    def failed(self) -> bool:
        """Return True if a needed run has failed or has not ended."""
        return any(self._campaign.outcome(job).get("status") != "done" for job in self.needed())

    def unneeded(self) -> set[str]:
        """Return the ids of the runs that stopped conditions do not need any more."""
        self.state()
        return {job.id for job in self._campaign.jobs if self._has_stopped(job)}

    def waits(self) -> bool:
        """Return True if runs of a later look may become due when the present runs have ended."""
        # While the last look is under way, no further run becomes due.
        return self.state().passed < len(self._sizes) - 1

    def sentence(self) -> str:
        """Return the last look with its decisions, or the first look to come; "" in a campaign without looks.

        For example: look 1 of 3: 8 of 16 seeds; hicra: better, stopped; sepa: continues
        """
        state = self.state()
        if not self._sizes:
            return ""
        if not state.passed:
            return f"look 1 of {len(self._sizes)} is at {self._sizes[0]} of {self._sizes[-1]} seeds"
        methods = {job.condition: job.method for job in self._campaign.jobs}
        running = [label for label in methods if label not in state.stopped]
        # When every condition has stopped, the later looks have nothing to test.
        last = self._sizes[state.passed - 1] if running else max(seeds for seeds, _ in state.stopped.values())
        compared = [label for label, method in methods.items() if method != self._campaign.plan.baseline]
        words = [f"{label}: {self._decision(label, last)}" for label in compared]
        head = f"look {self._sizes.index(last) + 1} of {len(self._sizes)}: {last} of {self._sizes[-1]} seeds"
        return "; ".join([head, *words])

    def _decision(self, label: str, last: int) -> str:
        if label not in self._state.stopped:
            return "continues" if last < self._sizes[-1] else "all seeds"
        seeds, words = self._state.stopped[label]
        if seeds == self._sizes[-1]:
            return f"{words}, all seeds"
        return f"{words}, stopped" if seeds == last else f"{words}, stopped at {seeds}"

    def _asked_for(self) -> list[Job]:
        if not self._sizes:
            return list(self._campaign.jobs)
        # After the last look there is no larger size; the runs asked for stay those of all seeds.
        seeds = self._sizes[min(self._state.passed, len(self._sizes) - 1)]
        jobs = self._campaign.jobs
        return [job for job in jobs if self._position[job.seed] < seeds and not self._has_stopped(job)]

    def _has_stopped(self, job: Job) -> bool:
        # A condition that has not stopped needs all seeds.
        seeds, _ = self._state.stopped.get(job.condition, (len(self._position), ""))
        return self._position[job.seed] >= seeds


class Status:
    """Progress of a campaign and its looks, read from its files.

    Args:
        path: directory of the campaign.
    """

    def __init__(self, path: Path) -> None:
        self._progress = Progress(path)
        self._schedule = Schedule(CampaignDirectory(path))

    def facts(self) -> dict[str, Any]:
        """Return `Progress.facts` and `looks`, the sentence of `Schedule.sentence`."""
        return self._progress.facts(self._schedule.unneeded()) | {"looks": self._schedule.sentence()}
