"""Method and seed of a run of another program, from its name or from the path of its log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from retrain.errors import DataError

_SUFFIX = re.compile(
    r"(?:\.(?:jsonl|ndjson|json|csv|tsv|txt|log|gz|metrics|eval|results|train|val|test))+$", re.IGNORECASE
)
"""Suffixes of a log's name. Other dots belong to the name, as in `qwen2.5-s0`."""
_TIMESTAMP = r"(?:\d{4}-\d\d-\d\d|20\d\d[01]\d[0-3]\d)(?:[-_T .]+\d\d[-:_.]?\d\d(?:[-:_.]?\d\d)?)?"
_DATE = re.compile(rf"^{_TIMESTAMP}(?:[-_. ]+(?=\D)|$)|[-_. ]+{_TIMESTAMP}$", re.IGNORECASE | re.ASCII)
_POSITION = r"(?:global[-_]?)?steps?|checkpoints?|ckpts?|iter|iterations?|epochs?"
_PART = r"metrics?|evals?|results?|logs?|train|history|best|last|latest|final"
_OTHER = (
    r"versions?|ranks?|workers?|attempts?|progress|monitor|scalars?|data|summary|stats|rollouts?|lightning_logs"
    r"|outputs?|out|evaluations?|training|trainer_state|tensorboard|wandb|files|events"
)
_NO_RUN = re.compile(
    rf"(?:{_POSITION}|{_PART}|{_OTHER})(?:[-_=]?(?:\d+|best|last|final|latest))?"
    r"|(?:offline-)?run-\d{8}_\d{6}-\w+|\d\d-\d\d-\d\d",
    re.IGNORECASE | re.ASCII,
)
"""Name of a file or folder that contains a part of a run, such as `checkpoint-500` or `logs`."""
_ENDING = re.compile(rf"(?:[-_. ]+(?:(?:{_POSITION})[-_=]?\d+|{_PART}))+$", re.IGNORECASE | re.ASCII)
"""End of a name after its seed: positions in training, or parts of the run."""
_EXPLICIT = re.compile(r"(?:(.*)[-_. /,(\[])?(?:seed|s)[-_=. ]?([0-9]{1,15})[)\]]?", re.IGNORECASE | re.DOTALL)
"""Name with the seed as in `grpo-s3` or `seed3`. The separator is required: `bonus-3` does not contain `s-3`.

Numbers of more than 15 digits are hashes or times, and not exact as floats.
"""
_NUMBERED = re.compile(
    r"(?!(?:.*[-_. /])?seed[-_=]?[0-9])(?:(.*)(?<![0-9][eE])[-_ /])?([0-9]{1,15})", re.IGNORECASE | re.DOTALL
)
"""Name that ends with a number, as `grpo-3`. Neither a decimal (`lr0.001`) nor an exponent (`1e-5`) is a seed."""
_NO_METHOD = {"run", "trial", "exp", "experiment", "job"}
"""Words that precede a seed and name nothing."""


class RunName(NamedTuple):
    """Method and seed in a name; the method is "" for a name such as `seed3`."""

    method: str
    seed: int


def run_of_name(name: str, place: str) -> RunName:
    """Return method and seed of a run's name, such as `grpo-s3`.

    Raises:
        DataError: the name does not end with a method and a seed; the message begins with `place`.
    """
    core = _DATE.sub("", name)
    if (found := _read(_EXPLICIT, core) or _read(_NUMBERED, core)) and found.method:
        return found
    fix = "rename it as in grpo-s3, or give a table with the columns method and seed"
    raise DataError(f"{place}: the name {name!r} does not end with a seed; {fix}")


def run_of_file(file: Path) -> RunName:
    """Return method and seed of the run that wrote a log.

    The seed is in the name of the file, of its folder or of the folder above. A seed as in `s3` or `seed3` takes
    precedence over a mere number. The method precedes the seed, or is the name below the seed's folder, as in
    `seed3/grpo.jsonl`, else that of the folder above, as in `grpo/seed3/metrics.jsonl`. Folders of checkpoints, steps,
    dates and parts of a run are skipped.

    Raises:
        DataError: no name has a seed.
    """
    path = file.resolve() if ".." in file.parts else file.absolute()  # a link keeps the name that the user wrote
    every = [_SUFFIX.sub("", path.name), *(folder.name for folder in path.parents)]
    names = [core for name in every if (core := _DATE.sub("", name.strip())) and not _NO_RUN.fullmatch(core)]
    explicit = [(index, _read(_EXPLICIT, name)) for index, name in enumerate(names[:3])]
    numbered = [(index, _read(_NUMBERED, name)) for index, name in enumerate(names[:2])]
    # grpo-0/100/metrics.jsonl: the run is grpo-0, and 100 a step.
    numbered.sort(key=lambda one: not (one[1] and one[1].method))
    for index, found in (*explicit, *numbered):
        if found:
            near = names[index - 1 : index] if index else names[1:2]
            return found if found.method or not near else found._replace(method=near[0])
    return run_of_name(file.name, str(file))


def _read(pattern: re.Pattern[str], name: str) -> RunName | None:
    if not (found := pattern.fullmatch(_ENDING.sub("", name))):
        return None
    method = (found[1] or "").strip("-_. /,([")
    return RunName("" if method.lower() in _NO_METHOD else method, int(found[2]))
