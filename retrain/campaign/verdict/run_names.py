"""Method and seed of a run of another program, from its name or from the path of its log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from retrain.errors import DataError

_SUFFIX = re.compile(r"\.(?:jsonl|ndjson|json|csv|tsv|txt|log|gz|metrics|eval|results|train|val|test)$", re.IGNORECASE)
"""A suffix of a log's name. Other dots belong to the name, as in `qwen2.5-s0`."""
_TIMESTAMP = r"(?:\d{4}-\d\d-\d\d|20\d\d[01]\d[0-3]\d)(?:[-_T .]+\d\d[-:_.]?\d\d(?:[-:_.]?\d\d)?)?"
_POSITION = r"(?:checkpoint|ckpt|(?:global[-_]?)?step|iter|iteration|epoch)[-_=]?\d+"
_PART = r"metrics|evals?|results|logs?|train|history|best|last|latest|final"
_ENDING = re.compile(rf"(?:^|[-_. ]+)(?:{_TIMESTAMP}|{_POSITION}|{_PART})$", re.IGNORECASE | re.ASCII)
"""End of a name after its seed: a date, a position in training, or a part of the run."""
_DATED = re.compile(rf"[-_. ]+{_TIMESTAMP}$", re.IGNORECASE | re.ASCII)
_NOT_A_RUN = re.compile(
    r"(?:(?:global[-_]?)?steps?|checkpoints?|ckpts?|iter|iterations?|epochs?|versions?|ranks?|workers?|attempts?"
    r"|progress|monitor|scalars?|data|summary|stats|rollouts?|logs?|lightning_logs|metrics?|outputs?|out|results?|evals?|evaluations?|train|training|trainer_state|history"
    r"|tensorboard|wandb|files|events|best|last|latest|final)(?:[-_=]?(?:\d+|best|last|final|latest))?"
    r"|(?:offline-)?run-\d{8}_\d{6}-\w+"
    r"|\d\d-\d\d-\d\d",
    re.IGNORECASE | re.ASCII,
)
"""Name of a file or folder that contains a part of a run, such as `checkpoint-500` or `logs`."""
_NO_METHOD = re.compile(rf"run|trial|exp|experiment|job|{_TIMESTAMP}", re.IGNORECASE | re.ASCII)
"""Words and dates that precede a seed and name nothing."""
_DATED_FIRST = re.compile(rf"^{_TIMESTAMP}[-_. ]+(?=\D)", re.IGNORECASE | re.ASCII)
_EXPLICIT = re.compile(
    r"(?:(?P<method>.*)[-_. /,(\[])?(?:seed|s)[-_=. ]?(?P<seed>[0-9]+)[)\]]?", re.IGNORECASE | re.DOTALL
)
"""Name with the seed as in `grpo-s3` or `seed3`. The separator is required: `bonus-3` does not contain `s-3`."""
_NUMBERED = re.compile(r"(?:(?P<method>.*)(?<![0-9][eE])[-_ /])?(?P<seed>[0-9]+)", re.DOTALL)
"""Name that ends with a number, as `grpo-3`. Neither a decimal (`lr0.001`) nor an exponent (`1e-5`) is a seed."""
_INNER_SEED = re.compile(r"(?:^|[-_. /])seed[-_=]?[0-9]", re.IGNORECASE)


_DIGITS = 15
"""Largest number of digits of a seed."""


class RunName(NamedTuple):
    """Method and seed in a name; the method is "" for a name such as `seed3`."""

    method: str
    seed: int


def run_of_name(name: str, place: str) -> RunName:
    """Return method and seed of a run's name, such as `grpo-s3`.

    Raises:
        DataError: the name does not end with a method and a seed; the message begins with `place`.
    """
    found = _explicit(name) or _numbered(name)
    if not found or not found.method:
        raise _unnamed(name, place)
    return found


def run_of_file(file: Path) -> RunName:
    """Return method and seed of the run that wrote a log.

    The seed is in the name of the file, of its folder or of the folder above. A seed as in `s3` or `seed3` takes
    precedence over a mere number. The method precedes the seed, or is a name below the seed's folder, as in
    `seed3/grpo.jsonl`, else that of the folder above, as in `grpo/seed3/metrics.jsonl`. Folders of checkpoints, steps,
    dates and parts of a run are skipped.

    Raises:
        DataError: no name has a seed.
    """
    names, stem = _names(file), _stem(file)
    below = [] if _NOT_A_RUN.fullmatch(stem) or _explicit(stem) or _numbered(stem) else [stem]
    for index, name in enumerate(names[:2]):
        if found := _explicit(name):
            inner = [name for name in (*reversed(names[:index]), *below) if not _explicit(name)]
            return _with_method(found, [*inner, *names[index + 1 :]], file)
    found = _numbered(names[0]) if names else None
    if not found:
        raise _unnamed(names[0] if names else file.name, str(file))
    if not found.method and (above := _numbered(names[1]) if len(names) > 1 else None) and above.method:
        return above  # grpo-0/100/metrics.jsonl: the run is grpo-0, and 100 a step
    return _with_method(found, [*below, *names[1:]], file)


def _names(file: Path) -> list[str]:
    """Return the names that may contain method and seed: of the file, then of its folders, without dates and steps."""
    stem = _stem(file)
    path = file.resolve() if ".." in file.parts else file.absolute()  # a link keeps the name that the user wrote
    first = [stem] if _explicit(stem) or _numbered(stem) else []
    names = (*first, *(folder.name for folder in path.parents))
    return [name for name in names if (core := _without_ending(name)) and not _NOT_A_RUN.fullmatch(core)]


def _stem(file: Path) -> str:
    """Return the name of a log without its suffixes."""
    stem = file.name
    while (shorter := _SUFFIX.sub("", stem)) != stem:
        stem = shorter
    return stem


def _without_ending(name: str) -> str:
    """Return a name without dates, positions in training and parts of a run at its end."""
    name = name.strip()
    while (shorter := _ENDING.sub("", name)) != name:
        name = shorter
    return name


def _with_method(found: RunName, above: Sequence[str], file: Path) -> RunName:
    """Return the run; its method is the name of the next folder if its own name has none."""
    if found.method:
        return found
    if not above:
        raise _unnamed(str(found.seed), str(file))
    return found._replace(method=_DATED_FIRST.sub("", _DATED.sub("", above[0])))


def _explicit(name: str) -> RunName | None:
    return _run_name(_EXPLICIT.fullmatch(_without_ending(name)))


def _numbered(name: str) -> RunName | None:
    name = _without_ending(name)
    return None if _INNER_SEED.search(name) else _run_name(_NUMBERED.fullmatch(name))


def _run_name(found: re.Match[str] | None) -> RunName | None:
    if not found or len(found["seed"]) > _DIGITS:
        return None
    method = _DATED_FIRST.sub("", (found["method"] or "").strip("-_. /,(["))
    return RunName("" if _NO_METHOD.fullmatch(method) else method, int(found["seed"]))


def _unnamed(name: str, place: str) -> DataError:
    fix = "rename it as in grpo-s3, or give a table with the columns method and seed"
    return DataError(f"{place}: the name {name!r} does not end with a seed; {fix}")
