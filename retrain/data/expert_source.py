"""Row source `expert`: train on demonstrations from a file together with the rollouts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retrain.data.expert_file import ExpertBuffer, fingerprint, read_experts
from retrain.errors import DataError, install
from retrain.protocols import RowSource
from retrain.registry import Finding, source
from retrain.system.files import NO_FILE_FIX, no_file
from retrain.system.model_paths import positions
from retrain.types import ExpertRow, Metrics, Observer, Rollout, State

if TYPE_CHECKING:
    from collections.abc import Hashable


def _check_file(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Check that the file exists, and that its format can be read."""
    key, path = ("path",), str(params["path"])
    if problem := no_file(path):
        yield Finding(key, problem, NO_FILE_FIX, exit_code=DataError.exit_code)
    elif not path.endswith((".jsonl", ".parquet")):
        problem = f'"{path}" is neither .jsonl nor .parquet'
        yield Finding(key, problem, "convert or rename it", exit_code=DataError.exit_code)
    elif path.endswith(".parquet") and importlib.util.find_spec("pyarrow") is None:
        yield Finding(key, "pyarrow is not installed", install("parquet"))


@source("expert", brings=("expert",), ratio="ratio", read=("path", read_experts), check_files=_check_file)
class ExpertSource(RowSource):
    """Add demonstrations from a file to every step, in a seeded order. Each `[[expert]]` table adds one such source.

    Args:
        path: a .jsonl or .parquet file; see `retrain.data.expert_file.read_experts`.
        ratio: share of demonstrations among a step's rows; they reduce the number of sampled prompts.
        all_assistant_turns: train on every turn of the assistant instead of only the last.
        same_prompts: prefer demonstrations whose prompts occur in the step's rollouts.
    Raises:
        DataError: the file cannot be read, a row cannot be rendered, or all rows are longer than the model's context.
    """

    def __init__(  # noqa: PLR0913 - parts of the run
        self,
        chat: Any,
        model: Any,
        seed: int,
        label: str,
        row_count: int,
        observe: Observer,
        *,
        path: Annotated[str, Field(min_length=1)],
        ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5,
        all_assistant_turns: bool = False,
        same_prompts: bool = False,
    ) -> None:
        problems = read_experts(path)
        rendered = [chat.conversation(problem, all_turns=all_assistant_turns) for problem in problems]
        limit = positions(model)
        rows: list[ExpertRow] = [row for row in rendered if len(row.ids) <= limit]
        if len(rows) < len(rendered):
            too_long = f"{len(rendered) - len(rows)} of {len(rendered)} rows"
            text = f"{path}: {too_long} are longer than the model's {limit} tokens"
            if not rows:
                raise DataError(f"{text}; shorten them, or train a model with a longer context")
            observe("message", {"text": f"{text}; they are left out", "level": "warning"})
        keys: list[Hashable] = [row.prompt_ids for row in rows] if same_prompts else []
        self.buffer = ExpertBuffer(rows, seed, keys, label)
        # Of all rows, also those left out: another model may have another limit.
        self._label, self._count, self._fingerprint = label, row_count, fingerprint(problems)

    def take(self, step: int, rollouts: Sequence[Rollout]) -> tuple[list[Any], Metrics]:
        """Return the rollouts with the next demonstrations, and the number of completed passes over the file."""
        # One prompt per group, in order; a set would lose the order.
        prompts = {rollout.group: rollout.prompt_ids for rollout in rollouts}.values()
        rows = self.buffer.take(self._count, prompts)
        return [*rollouts, *rows], {f"{self._label}/epoch": float(self.buffer.epoch)}

    def fingerprint(self) -> str:
        """Return a hash of the file's rows and their order."""
        return self._fingerprint

    def state_dict(self) -> State:
        """Return the position in the file."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.buffer.load_state_dict(state)
