"""Episodes for the warm start: play a problem's demonstrated replies against the environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from retrain.errors import DataError
from retrain.protocols import Sampler
from retrain.run.episodes import FAILED, EpisodeRunner, turn_stream
from retrain.training.chat import Chat
from retrain.types import Completion, ExpertRow, Problem, Request, Sampling

if TYPE_CHECKING:
    from retrain.environments.env_pool import EnvPool

_AT_ONCE = 512
"""Number of episodes played concurrently."""


class _Script(Sampler):
    """A sampler that returns demonstrated replies instead of sampling.

    It finds the reply by the request's random stream: the problem's index in the first turn, and
    `turn_stream` of it in later turns.
    """

    def __init__(self, chat: Chat, problems: Sequence[Problem]) -> None:
        self._lines: dict[int, tuple[str, list[int]]] = {}
        for index, problem in enumerate(problems):
            for turn, reply in enumerate(problem.replies):
                stream = turn_stream(index, 0, turn) if turn else index
                self._lines[stream] = problem.id, [*chat.encode(reply), chat.end_id]

    def load_weights(self, weights: object, version: int) -> None:
        """Do nothing: a script has no weights."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return the next reply of each request, with an empty completion after the last reply."""
        return [[self._line(request)] for request in requests]

    def _line(self, request: Request) -> Completion:
        name, ids = self._lines.get(request.stream, ("", []))
        if len(ids) > request.max_tokens:
            raise DataError(
                f"a reply of problem {name!r} has {len(ids)} tokens, and {request.max_tokens} are left; raise "
                "[environment] turn_tokens or [training] max_tokens, or set [warmup] steps = 0"
            )
        # Imitation does not read the log-probs.
        return Completion(tuple(ids), (0.0,) * len(ids), "stop" if ids else "length")


def played(chat: Chat, pool: EnvPool, problems: Sequence[Problem], seed: int) -> list[ExpertRow]:
    """Play the demonstrated replies of each problem, and return the episodes as rows to imitate.

    Raises:
        DataError: a problem has no replies, or its episode fails or exceeds a limit.
    """
    for problem in problems:
        if not problem.replies:
            raise DataError(f"problem {problem.id!r} has no replies to imitate; give some, or set [warmup] steps = 0")
    rows: list[ExpertRow] = []
    for first in range(0, len(problems), _AT_ONCE):
        some = problems[first : first + _AT_ONCE]
        rendered = [(problem, chat.prompt_of(problem)) for problem in some]
        most = pool.limits.max_tokens
        requests = [Request(prompt.ids, 1, most, stream) for stream, (_, prompt) in enumerate(rendered)]
        rollouts = EpisodeRunner(_Script(chat, some), chat, Sampling(seed=seed), pool).roll(rendered, requests)
        for rollout in rollouts:
            # After the last reply the script answers with an empty turn.
            spans = tuple((start, end) for start, end in rollout.spans if end > start)
            if rollout.ended in FAILED or not spans:
                raise DataError(f"the demonstration of problem {rollout.problem_id!r} failed ({rollout.ended})")
            # Observations after the last reply precede nothing to imitate.
            rows.append(ExpertRow((*rollout.prompt_ids, *rollout.completion_ids)[: spans[-1][1]], spans))
    return rows
