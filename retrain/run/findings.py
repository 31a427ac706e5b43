"""Findings: what the figures of a run say is wrong with it. A finding changes nothing in the run.

A finding is a function of `Evidence` that returns text, or "" if it sees nothing. Its name is that of the function and
of its row in docs/troubleshooting.md, which `retrain help NAME` prints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, quantiles, variance
from typing import TYPE_CHECKING, Any

from retrain.registry import reward
from retrain.report.run_summary import change

if TYPE_CHECKING:
    from retrain.config.schema import Config
    from retrain.registry import Component
    from retrain.storage.run_directory import RunDirectory
    from retrain.types import Observer, Rollout

_EVERY = 10
"""Number of steps between two looks, after the first step."""
_TAG = re.compile(r"</?\w+>|<\|\w+\|>")
"""A tag in a reward's pattern, such as `<think>`."""
_TEXT = 60
"""Largest number of characters of a completion that is quoted."""


@dataclass
class Evidence:
    """Figures and rollouts that findings look at.

    Attributes:
        config: the configuration.
        rewards, losses: the rewards and loss terms of the run.
        hidden: texts of special tokens that are left out of the completions that rewards read.
        written: texts of special tokens that the chat template writes around messages; empty without a template.
        prompts: prompts of a few problems, before the template; those that are messages are left out.
        rows, evals: rows of metrics.jsonl and eval.jsonl so far.
        rollouts: rollouts of the latest step.
        ended: the run has ended.
    """

    config: Config
    rewards: Sequence[Component] = ()
    losses: Sequence[Component] = ()
    hidden: Collection[str] = ()
    written: Collection[str] = ()
    prompts: Sequence[str] = ()
    rows: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    evals: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    rollouts: Sequence[Rollout] = ()
    ended: bool = False

    def lasted(self, steps: int, test: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
        """Return the latest row that ends so many consecutive rows for which `test` holds, else an empty one.

        The row is new since the last look.
        """
        # Findings are called every `_EVERY` steps, and must not miss a streak that ended in between.
        ends = range(len(self.rows), max(steps, len(self.rows) - _EVERY + 1) - 1, -1)
        return next((self.rows[end - 1] for end in ends if all(map(test, self.rows[end - steps : end]))), {})


def no_update(run: Evidence) -> str:
    """No step of the last ten, or of a shorter run, changed the weights."""
    rows = run.rows[-_EVERY:]
    if not rows or any(map(weights_changed, rows)) or (len(rows) < _EVERY and not run.ended):
        return ""
    # Groups without credit are the usual reason, and point to the fix.
    wrong, right = (sum(row.get(f"skipped/all_{kind}", 0) for row in rows) for kind in ("wrong", "correct"))
    best = max(row.get("reward/accuracy", 0.0) for row in run.rows)
    fix = 'see "The reward stays 0"' if wrong >= right else "use harder problems, or stop"
    if constant := _constant_reward(run):
        fix = f"{constant}: check it with retrain reward check"
    elif destroyed := _destroyed(run, rows[-1]):
        fix = destroyed
    elif wrong > right == 0 and best > 0.25 and not any(row.get("reward/accuracy", 0.0) for row in rows):
        fix = f"accuracy was {best:.0%} before, so updates destroyed the policy: lower [optimizer] lr"
    elif (cold := run.config.training.temperature) < 0.5 and fmean(
        row.get("rollout/identical", 0.0) for row in rows
    ) > 0.9:
        fix = f"the completions of a group are identical: raise [training] temperature, now {cold:g}"
    mean = fmean(row.get("reward/mean", 0.0) for row in rows)
    many = f"none of the last {len(rows)} steps" if len(rows) > 1 else "the only step has not"
    return (
        f"{many} changed the weights: {wrong:.0f} groups were all wrong and {right:.0f} "
        f"all right, and the mean reward is {mean:.3g}; {fix}"
    )


def _constant_reward(run: Evidence) -> str:
    """Return a clause if the run has paid all its completions the same, more than 0, and none was right."""
    rows = [row for row in run.rows if "reward/mean" in row]
    low, high = (pick((row["reward/mean"] for row in rows), default=0.0) for pick in (min, max))
    # The mean of equal numbers can round differently from step to step.
    same = high - low <= 1e-6 * abs(high) and not any(row.get("reward/std", 0.0) > 1e-6 * abs(high) for row in rows)
    if low <= 0 or not same or any(row.get("reward/accuracy", 1.0) for row in rows):
        return ""
    return f"the reward pays wrong answers {high:.3g} and is constant"


def _destroyed(run: Evidence, now: Mapping[str, Any]) -> str:
    """Return a clause if most completions are cut off now, hardly any was at first, and accuracy fell by half."""
    first = run.rows[0].get("rollout/truncated", 0.0)
    best = max(row.get("reward/accuracy", 0.0) for row in run.rows)
    accuracy = now.get("reward/accuracy", 0.0)
    if first >= 0.1 or now.get("rollout/truncated", 0.0) <= 0.5 or accuracy >= best / 2:
        return ""
    return (
        f"{first:.0%} of the completions were cut off in the first step, {now['rollout/truncated']:.0%} are now, and "
        f"accuracy fell from {best:.0%} to {accuracy:.0%}: the updates destroy the policy, so lower [optimizer] lr"
    )


def weights_changed(row: Mapping[str, Any]) -> bool:
    """Return True if a step's row of metrics says that its update changed the weights."""
    idle = row.get("update/skipped") == 1 or row.get("optim/lr") == 0 or row.get("grad/norm") == 0
    # A held update trains a component, such as a critic, and leaves the policy as it is on purpose.
    return not idle or "update/held" in row


def tag_never_seen(run: Evidence) -> str:
    """No completion of the first step matches the pattern of a reward, for a reason that more training keeps."""
    texts, prompts = [rollout.text for rollout in run.rollouts], {rollout.prompt.rstrip() for rollout in run.rollouts}
    for name, pattern in _patterns(run.rewards) if len(run.rows) == 1 and texts else ():
        if any(re.search(pattern, text, re.DOTALL) for text in texts):
            continue
        start = f"the pattern of the reward {name} matched no completion of the first step, and "
        tags = dict.fromkeys(_TAG.findall(pattern))
        for tag in tags:
            if tag in run.hidden:
                return f"{start}{tag} is a special token that rewards do not see: leave it out of the pattern"
            if prompts and all(prompt.endswith(tag) for prompt in prompts):
                return (
                    f"{start}the prompt ends with {tag}, so completions start after it: leave {tag} out of the pattern"
                )
        if (cut := fmean(rollout.truncated for rollout in run.rollouts)) > 0.5:
            most = run.config.training.max_tokens
            return f"{start}{cut:.0%} of the completions were cut off: raise [training] max_tokens, now {most}"
    return ""


def _patterns(rewards: Sequence[Component]) -> Iterator[tuple[str, str]]:
    """Yield name and pattern of every reward that has one."""
    for entry in rewards:
        pattern = reward.traits_of(entry).pattern or entry.params.get("pattern")
        if isinstance(pattern, str):
            yield entry.name, pattern


def rendered_twice(run: Evidence) -> str:
    """A text prompt contains special tokens that the chat template writes again."""
    tokens = sorted(token for token in run.written if any(token in prompt for prompt in run.prompts))
    if len(run.rows) != 1 or not tokens:
        return ""
    shown = ", ".join(tokens[:3])
    return f'text prompts contain {shown}, which the chat template writes around them again: set [model] chat = "off"'


def cut_off(run: Evidence) -> str:
    """More than half of the completions are cut off in five consecutive steps.

    A policy that got worse meanwhile does not need more tokens: the updates have destroyed it.
    """
    if not (row := run.lasted(5, lambda row: row.get("rollout/truncated", 0) > 0.5)):
        return ""
    if destroyed := _destroyed(run, row):
        return destroyed
    # `quantiles` needs two values.
    lengths, most = sorted(rollout.length for rollout in run.rollouts) or [0], run.config.training.max_tokens
    tenths = quantiles(lengths, n=10) if len(lengths) > 1 else lengths * 9
    return (
        f"more than half of the completions were cut off in five steps: raise [training] max_tokens, now {most} "
        f"(lengths of the last step: a tenth below {tenths[0]:.0f}, half below {tenths[4]:.0f})"
    )


def entropy_gone(run: Evidence) -> str:
    """The entropy is below a tenth of its start in three consecutive updates, while accuracy is below .9."""
    # Relative to the start: nats depend on the vocabulary.
    first = next((row["policy/entropy"] for row in run.rows if "policy/entropy" in row), 0.0)

    def gone(row: Mapping[str, Any]) -> bool:
        return row.get("policy/entropy", first) < first / 10 and row.get("reward/accuracy", 1.0) < 0.9

    if not (row := run.lasted(3, gone)):
        return ""
    return (
        f"the entropy fell from {first:.3g} to {row['policy/entropy']:.3g} nats before the policy was right: "
        "lower [optimizer] lr, raise [ppo_clip] eps_high, or give the loss term entropy a weight"
    )


def too_far(run: Evidence) -> str:
    """The clip cuts more than .3 of the tokens, or the approximate KL exceeds .1, in three consecutive steps.

    The share of clipped tokens does not count with a range below .05: GSPO's cuts most sequences by design.
    """
    ranges = [loss.params["eps_high"] for loss in run.losses if "eps_high" in loss.params]
    most = 0.3 if min(ranges, default=1.0) >= 0.05 else 1.0

    def far(row: Mapping[str, Any]) -> bool:
        return row.get("policy/clip_fraction", 0) > most or row.get("policy/approx_kl", 0) > 0.1

    if not (row := run.lasted(3, far)):
        return ""
    clipped, kl = row.get("policy/clip_fraction", 0), row.get("policy/approx_kl", 0)
    return (
        f"an update moves the policy far from the one that sampled (clip fraction {clipped:.2f}, KL {kl:.2g}): "
        "lower [optimizer] lr, or [training] epochs and minibatches"
    )


def reward_without_accuracy(run: Evidence) -> str:
    """The training reward rose, held-out accuracy did not, and it cannot have risen as much as the reward.

    The rise of the reward is the lower end of the 95% interval of the difference between the second half of the steps
    and the first, divided by the sum of the rewards' weights. That of the accuracy is the upper end of its interval.
    """
    values = [row["reward/mean"] for row in run.rows if "reward/mean" in row]
    if len(values) < _EVERY or len(run.evals) < 2 or run.evals[-1]["step"] < len(run.rows) - _EVERY:
        return ""
    halves = values[: len(values) // 2], values[len(values) // 2 :]
    # Two standard errors, a 95% interval.
    error = 2 * sqrt(sum(variance(half) / len(half) for half in halves))
    # Accuracy is between 0 and 1, so the reward is scaled to the largest that it can be.
    most = sum(abs(reward.params["weight"]) for reward in run.rewards) or 1.0
    points, low, high = change(run.evals)
    # Only a rise beyond both intervals is a contradiction, so that noise raises no alarm.
    if low > 0 or (fmean(halves[1]) - fmean(halves[0]) - error) / most <= max(high, 0.0):
        return ""
    gaps = [(abs(r.reward / most - bool(r.correct)), r) for r in run.rollouts if r.reward is not None]
    odd = [rollout for gap, rollout in sorted(gaps, key=lambda pair: -pair[0])[:2] if gap > 0.5]
    quoted = " and ".join(f"{' '.join(r.text.split())[:_TEXT]!r} (reward {r.reward:.3g})" for r in odd)
    return (
        f"the training reward rose from {fmean(halves[0]):.3g} to {fmean(halves[1]):.3g}, and held-out accuracy "
        f"changed by {100 * points:+.1f} points: read samples{quoted and f', such as {quoted}'}"
    )


def same_answers(run: Evidence) -> str:
    """Groups of equal completions give no gradient in ten consecutive steps, though accuracy is between .1 and .9."""

    def equal(row: Mapping[str, Any]) -> bool:
        mixed = 0.1 < row.get("reward/accuracy", 0) < 0.9 and row.get("groups/informative", 0) < 0.25
        return mixed and row.get("rollout/identical", 0) > 0.5

    if not (row := run.lasted(_EVERY, equal)):
        return ""
    return (
        f"{row['rollout/identical']:.0%} of a group's completions are identical, and only "
        f"{row.get('groups/informative', 0):.0%} of the groups have a gradient: "
        f"raise [training] temperature, now {run.config.training.temperature:g}"
    )


def stale(run: Evidence) -> str:
    """The effective sample size of the ratios of trainer and sampler is below .5 of the tokens."""
    if not run.lasted(1, lambda row: row.get("mismatch/ess", 1) < 0.5):
        return ""
    size = min(row.get("mismatch/ess", 1) for row in run.rows[-_EVERY:])
    return (
        f"the sampler's probabilities differ so much from the trainer's that {size:.0%} of the tokens count: lower "
        '[rollout] overlap or max_staleness, or add a correction such as transform_mode = "tis"'
    )


def nothing_learned(run: Evidence) -> str:
    """At the end the interval of the change of held-out accuracy contains 0."""
    if not run.ended or len(run.evals) < 2 or run.evals[0]["step"] == run.evals[-1]["step"]:
        return ""
    points, low, high = change(run.evals)
    if low > 0 or high < 0:
        return ""
    fix = _constant_reward(run) or "train longer, or evaluate on more problems"
    return (
        f"no significant change of held-out accuracy: {100 * points:+.1f} points, 95% interval {100 * low:+.1f} to "
        f"{100 * high:+.1f}; {fix}"
    )


FINDINGS: tuple[Callable[[Evidence], str], ...] = (
    *(no_update, tag_never_seen, rendered_twice, cut_off, entropy_gone, too_far),
    *(reward_without_accuracy, same_answers, stale, nothing_learned),
)


class RunFindings:
    """Calls the findings after the first step, every ten steps and at the end; each speaks once.

    Their texts go to the observer and to status.json, with the names of all of them. A resumed run keeps the
    texts up to its checkpoint and does not repeat them. Only rank 0 has findings.

    Args:
        evidence: what they look at.
        start: number of steps already done.
        directory: the run directory, with the findings of the run that is continued.
        observe: receives every finding as a warning.
    """

    def __init__(self, evidence: Evidence, start: int, directory: RunDirectory, observe: Observer) -> None:
        self.evidence, self._directory, self._observe = evidence, directory, observe
        over = start >= evidence.config.training.max_steps
        # Steps after the checkpoint are repeated, with their findings.
        earlier = [finding for finding in directory.facts.get("findings", ()) if finding["step"] <= start]
        # The end of a run is judged again if the run goes on.
        self._found = [finding for finding in earlier if over or finding["name"] != nothing_learned.__name__]
        self._write()

    def after_step(self, row: Mapping[str, Any], rollouts: Sequence[Rollout]) -> None:
        """Record a step, and call the findings if it is time."""
        self.evidence.rows.append(row)
        self.evidence.rollouts = rollouts
        if (done := len(self.evidence.rows)) == 1 or done % _EVERY == 0:
            self._check()

    def after_evaluation(self, row: Mapping[str, Any]) -> None:
        """Record an evaluation."""
        self.evidence.evals.append(row)

    def after_run(self) -> str:
        """Call the findings at the end. Return that of `no_update`, which the last line of the run repeats."""
        self.evidence.ended = True
        self._check()
        return no_update(self.evidence)

    def _check(self) -> None:
        reported = {finding["name"] for finding in self._found}
        for finding in FINDINGS:
            name = finding.__name__
            if name not in reported and (text := finding(self.evidence)):
                page = f"retrain help {name}"
                self._found.append({"name": name, "step": len(self.evidence.rows), "text": text, "page": page})
                self._write()
                self._observe("message", {"text": f"{name}: {text} ({page})", "level": "warning"})

    def _write(self) -> None:
        names = [finding.__name__ for finding in FINDINGS]
        self._directory.write_facts({"findings": self._found, "looked_at": names})
