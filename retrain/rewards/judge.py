"""A language model as the judge of completions, one at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retrain.registry import reward
from retrain.rewards.judge_endpoint import JudgeEndpoint, judge_traits, last_line
from retrain.rewards.rubric import reward_of
from retrain.rewards.text import Capturing

_SCORE = (
    r"(?i)[*_#\s]*(?:final\s+)?score\s*(?:\([^()]*\))?[*_:=\s]*"
    r"(-?\d+(?:[.,]\d+)?)(?:\s*(?:/|out\s+of)\s*\d+)?[*_.\s]*\Z"
)
"""A line that consists of a score, such as "Score: 7" or "**Final score (0-10): 7.5/10**"."""
_OUT_OF = re.compile(r"(?i)(?:/|out\s+of)\s*(\d+)[*_.\s]*\Z")
"""The end of such a line, with the largest score."""


@reward("judge", **judge_traits("completion"))
@dataclass(kw_only=True)
class Judge(JudgeEndpoint):
    """Score in [0, 1] by another language model: s = (x - lowest) / (highest - lowest), x the number in its answer.

    With a rubric, the judge scores each criterion k in a request of its own, and the score is
    sum_k w_k s_k / sum_{k: w_k > 0} w_k. A criterion with a negative weight describes a fault, so meeting it lowers
    the score.

    The completion is not trained on if, after all retries, the judge has not answered with a score on its scale; with
    a rubric, if one criterion has no such score. A row whose rubric is an empty list gets no score.

    Args:
        pattern: regular expression whose first group is the score. It must match the last line of the judge's answer
            exactly once, from the start of the line. Earlier lines, which may quote the completion, are ignored.
        json_field: read the score from this field of the JSON object at the end of the answer, instead of `pattern`.
    References: Gunjal et al., Rubrics as Rewards, arXiv:2507.17746 (explicit aggregation).
    """

    pattern: Capturing = _SCORE
    json_field: str | None = None

    async def __call__(self, completion: str, problem: Mapping[str, Any]) -> float | dict[str, float] | None:
        criteria = self.criteria_of(problem)
        how = [self.pattern, self.json_field, self.lowest, self.highest]
        scores = await self.ask_each(problem, criteria, {"completion": completion}, self._score, *how)
        if criteria is None:
            return scores[0]
        return reward_of(criteria, scores) if criteria else None

    def _wording(self, by: str, alone: str, scale: str) -> tuple[str, str, str]:
        end = f'Give a score {scale}{alone}. Explain briefly, then end with a line "Score: N".'
        return f"Grade an answer to a question{by}.", "Answer to grade:\n{completion}", end

    def _score(self, answer: str) -> float:
        """Parse the score of an answer and scale it to [0, 1]; raise ValueError if there is no valid score."""
        if self.json_field:
            value = _final_object(answer, self.json_field)
        else:
            line = last_line(answer)
            matches = [*re.finditer(self.pattern, line)]
            # Two scores on the last line may be a quotation and a verdict, and nobody knows which is which.
            value = matches[0][1] if len(matches) == 1 and matches[0].start() == 0 else None
            scale = _OUT_OF.search(line) if self.pattern == _SCORE else None
            # "3/10" on a scale to 5 would count as 3 of 5.
            if scale and float(scale[1]) != self.highest:
                raise ValueError(f"the judge's score is out of {scale[1]}, not out of {self.highest:g}")
        return self.scaled(value, answer)


def _final_object(text: str, key: str) -> Any:
    """Return the value of `key` in the JSON object at the end of a text; None if there is none.

    The object may be in a fenced block.
    """
    text = text.rstrip("` \n\t\r")
    decoder = json.JSONDecoder(object_pairs_hook=_once)
    for start in (brace.start() for brace in re.finditer(r"\{", text)):
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        # Only the outermost object at the end: earlier ones may quote the completion.
        if end == len(text):
            return value.get(key)
    return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object; raise ValueError if a field occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field occurs twice")
    return fields
