"""Client of a judge: a language model at an endpoint with OpenAI's chat API, which scores completions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from pydantic import Field

from retrain.functional.templates import PLACEHOLDER, as_text, column
from retrain.registry import Finding
from retrain.rewards.rubric import Item, Rubric, Weighted
from retrain.system.files import expanded, write_text
from retrain.system.http_client import FAILURES, Calls, HttpError, key_from, key_mistakes
from retrain.system.masking import masked
from retrain.system.records import BadRow

T = TypeVar("T")
_RETRIED = (408, 409, 425, 429)
"""HTTP status codes below 500 after which a request is repeated."""

_CALL_S = 60.0
# A judge answers with a few kilobytes; anything near 16 MB is a mistake of the server.
_MAX_BYTES = 1 << 24
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(kw_only=True)
class JudgeEndpoint(ABC):
    """Parameters of a judge, and requests to it.

    Equal questions are sent once. A request whose answer is invalid is repeated.
    The judge reads text of the model that it grades, so training may learn to exploit it.

    Args:
        base_url: address of the endpoint, "https://.../v1". Proxy settings of the environment are ignored.
        model: name of the model at the endpoint.
        prompt: template of the question. Its placeholders are {prompt}, {answer}, the text to judge, {criterion} with
            a rubric, and columns of the row. Unset: a question that fits the other settings.
        rubric: criteria for every row. Each is a text, or a table of criterion, weight (default 1; negative for a
            fault) and name. The judge scores each criterion in a request of its own.
        rubric_field: column with a list of further criteria for the row; dotted if it is nested.
        parts: names that criteria of `rubric_field` must have, with the weight of each name in `reward_parts`.
        lowest, highest: lowest and highest score of the judge's scale.
        api_key_env: name of the environment variable that contains the API key; "" sends no key.
        max_tokens, temperature: sampling settings of the judge's answer.
        retries: number of further attempts after an overload, a lost connection or an invalid answer.
        per_minute: largest number of requests per minute; 0 for no limit.
        cache: folder in which answers are stored for later runs. Unset: answers are only reused within the run.
    """

    base_url: str
    model: str
    prompt: str | None = None
    rubric: Annotated[tuple[Item, ...], Field(strict=False)] = ()
    rubric_field: str | None = None
    parts: dict[str, Annotated[float, Field(gt=0)]] | None = None
    lowest: float = 0.0
    highest: float = 10.0
    api_key_env: str = ""
    max_tokens: Annotated[int, Field(ge=1)] = 512
    temperature: Annotated[float, Field(ge=0)] = 0.0
    retries: Annotated[int, Field(ge=0)] = 3
    per_minute: Annotated[float, Field(ge=0)] = 0.0
    cache: str | None = None

    def __post_init__(self) -> None:
        self._rubric = rubric_in(vars(self))
        # Some people copy the whole address of the endpoint.
        self._url = f"{self.base_url.rstrip('/').removesuffix('/chat/completions')}/chat/completions"
        self._gap_s = 60.0 / self.per_minute if self.per_minute else 0.0
        self._next = 0.0
        self._folder = expanded(self.cache) if self.cache else None
        self._requests: dict[str, asyncio.Future[Any]] = {}
        self._calls = Calls(_CALL_S, _MAX_BYTES, key_from(self.api_key_env))

    def criteria_of(self, problem: Mapping[str, Any]) -> list[Weighted] | None:
        """Return the criteria of a problem; None without a rubric, an empty list if there are no criteria."""
        return self._rubric.of(problem["extra"]) if self._rubric else None

    async def ask_each(
        self,
        problem: Mapping[str, Any],
        criteria: Sequence[Weighted] | None,
        fields: Mapping[str, str],
        read: Callable[[str], T],
        *how: Any,
        form: str = "",
    ) -> list[T]:
        """Send one request for each criterion, concurrently; without a rubric a single request.

        Args:
            problem: the problem.
            criteria: the criteria; None without a rubric.
            fields: text to judge, by the name of its placeholder.
            read: function from the judge's answer to its result; raises ValueError if the answer is invalid.
            how: settings on which the result of `read` depends; part of the key of the cache.
            form: text after every question.
        Raises:
            ValueError: the request for a criterion failed. Without a rubric, the exception of the request is raised.
        """
        template = self.prompt or self._usual(bool(problem["answer"].strip()), criteria is not None)
        if criteria is None:
            return [await self._request(filled(template, problem, fields) + form, read, how)]
        texts = [filled(template, problem, {**fields, "criterion": criterion.text}) + form for criterion in criteria]
        # All criteria are asked even if one fails, so that the next attempt knows their answers.
        results = await asyncio.gather(*(self._request(text, read, how) for text in texts), return_exceptions=True)
        for criterion, result in zip(criteria, results, strict=True):
            if isinstance(result, BaseException):
                raise ValueError(f"{result}, about the criterion {criterion.text[:200]!r}") from result
        return cast("list[T]", results)

    def _usual(self, reference: bool, rubric: bool) -> str:
        """Return the template of the question if `prompt` is unset."""
        worst, best = ("not met", "fully met") if rubric else ("wrong", "right and complete")
        scale = f"from {self.lowest:g} ({worst}) to {self.highest:g} ({best})"
        task, shown, end = self._wording(" by one criterion" * rubric, " by this criterion alone" * rubric, scale)
        parts = [
            task,
            "Question:\n{prompt}",
            *(["Reference answer:\n{answer}"] if reference else []),
            shown,
            *(["Criterion:\n{criterion}"] if rubric else []),
            end,
        ]
        return "\n\n".join(parts)

    @abstractmethod
    def _wording(self, by: str, alone: str, scale: str) -> tuple[str, str, str]:
        """Return the paragraphs of the question that name the task, show the text to judge, and ask for the answer.

        Args:
            by, alone: words that limit the task and the answer to the criterion; "" without a rubric.
            scale: the scale of the scores.
        """

    async def _request(self, text: str, read: Callable[[str], T], how: Sequence[Any]) -> T:
        settings = {"model": self.model, "max_tokens": self.max_tokens, "temperature": self.temperature}
        body = {**settings, "messages": [{"role": "user", "content": text}]}
        # Everything that the result depends on, because the digest also names the file in the cache.
        digest = hashlib.sha256(json.dumps([self._url, body, *how], sort_keys=True).encode()).hexdigest()
        if digest not in self._requests:
            self._requests[digest] = asyncio.ensure_future(self._judged(digest, body, read))
        try:
            # Others may wait for the same answer, so the time limit of this completion must not cancel the request.
            return await asyncio.shield(self._requests[digest])
        except Exception:
            self._requests.pop(digest, None)  # a later request may succeed
            raise

    async def _judged(self, digest: str, body: Mapping[str, Any], read: Callable[[str], T]) -> T:
        """Return the result of the cached answer, or of a new answer."""
        file = self._folder / f"{digest}.json" if self._folder else None
        if file and file.exists():
            with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged entry is requested again
                return read(json.loads(file.read_text(encoding="utf-8"))["answer"])
        answer = await self._answer(body, read)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            # Masked, because the answer may contain the API key.
            write_text(file, json.dumps({"request": body, "answer": masked(answer)}, ensure_ascii=False))
        return read(answer)

    async def _answer(self, body: Mapping[str, Any], read: Callable[[str], object]) -> str:
        """Send a request until the judge gives a valid answer, and return this answer."""
        attempt = 0
        while True:
            try:
                await self._turn()
                reply = await self._calls.request(self._url, body)
                answer = str(reply["choices"][0]["message"]["content"])
                read(answer)  # raises for an invalid answer, which is then asked for again instead of cached
                return answer
            except FAILURES as error:
                # Another 4xx, such as a wrong key, gives the same answer at every attempt.
                refused = isinstance(error, HttpError) and error.code < 500 and error.code not in _RETRIED
                if attempt == self.retries or refused:
                    raise
            # An overloaded server recovers only if its clients wait longer each time.
            await asyncio.sleep(0.5 * 2**attempt)
            attempt += 1

    async def _turn(self) -> None:
        """Wait until the rate limit allows the next request."""
        # The time is taken before the wait, so that concurrent requests queue behind each other.
        self._next = max(self._next + self._gap_s, time.monotonic())
        await asyncio.sleep(self._next - time.monotonic())

    def scaled(self, value: Any, answer: str) -> float:
        """Scale a score of the judge to [0, 1]; raise ValueError if it is not a number within the judge's scale."""
        try:
            # JSON's true would be the number 1.
            if isinstance(value, bool):
                raise TypeError
            number = float(value.replace(",", ".") if isinstance(value, str) else value)
        except (TypeError, ValueError):
            raise ValueError(f"the judge's answer has no score: {masked(answer)[-200:]!r}") from None
        if not self.lowest <= number <= self.highest:
            raise ValueError(f"the judge's score {number:g} is not between {self.lowest:g} and {self.highest:g}")
        return (number - self.lowest) / (self.highest - self.lowest)


def rubric_in(params: Mapping[str, Any]) -> Rubric:
    """Return the rubric in a judge's parameters."""
    return Rubric(params["rubric"], params["rubric_field"], params["parts"] or {})


def filled(template: str, problem: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    """Replace the placeholders of a template. Placeholders in the inserted texts are not replaced.

    Args:
        template: the template.
        problem: the problem, for its prompt, its answer and the columns of its row.
        fields: texts of further placeholders, by name.
    Raises:
        ValueError: the row lacks a column that the template shows.
    """
    prompt = problem["prompt"]
    if not isinstance(prompt, str):
        messages = cast("list[dict[str, str]]", prompt)
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    named = {"prompt": prompt, "answer": str(problem["answer"]), **fields}
    row: Mapping[str, Any] = problem["extra"]

    def shown(name: str) -> str:
        if name in named:
            return named[name]
        if cells := column(row, name):
            return as_text(cells[0])
        raise BadRow(f'no field "{name}", which prompt shows; it has {", ".join((*named, *row))}')

    return PLACEHOLDER.sub(lambda match: shown(match[1]), template)


def last_line(answer: str) -> str:
    """Return the last line of a judge's answer; earlier lines may quote the completion."""
    return answer.strip().rpartition("\n")[2].strip()


def judge_traits(shown: str) -> dict[str, Any]:
    """Return the traits of a judge.

    Args:
        shown: placeholder of the text to judge: "completion" or "completions".
    """

    def unfit(params: Mapping[str, Any], problem: Mapping[str, Any]) -> str:
        """Return the reason why a row cannot be judged, or ""."""
        rubric = rubric_in(params)
        template = params["prompt"] or ""
        try:
            if rubric:
                rubric.of(problem["extra"])
            filled(template, problem, dict.fromkeys((shown, "criterion") if rubric else (shown,), ""))
        except BadRow as reason:
            return str(reason)
        empty = "{answer}" in template and not problem["answer"].strip()
        return "the answer is empty, and prompt shows it" if empty else ""

    def check(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
        if not re.match(r"https?://[^/\s]+", params["base_url"]):
            yield Finding(("base_url",), "is not the address of a server", 'write it as "http://127.0.0.1:8000/v1"')
        if params["lowest"] >= params["highest"]:
            yield Finding(("highest",), "is not above lowest", "set both to the ends of the judge's scale")
        for mistake in key_mistakes(params["api_key_env"]):
            yield Finding(("api_key_env",), *mistake)
        rubric = rubric_in(params)
        for placeholder in (shown, "criterion") if rubric else (shown,):
            if params["prompt"] is not None and f"{{{placeholder}}}" not in params["prompt"]:
                yield Finding(("prompt",), f"does not show the {placeholder}", f"add {{{placeholder}}} to the text")
        yield from _rubric_mistakes(rubric)

    return {
        # A large model may think for a minute or two, and a request may be repeated.
        "timeout_s": 180.0,
        "check": check,
        "problems": unfit,
        "parts": lambda params: rubric_in(params).columns(),
        "reaches": {"base_url": "sends prompts, completions and the key of api_key_env to a server"},
    }


def _rubric_mistakes(rubric: Rubric) -> Iterator[Finding]:
    """Yield an error for each invalid name of a part, and for a rubric without a positive weight."""
    fix = "name it with letters, digits, '_', '-' and '.', as in \"correct\""
    for index, criterion in enumerate(rubric.fixed):
        name = criterion.get("name", "correct")
        # The part "score" is the reward itself.
        if not _NAME.fullmatch(name) or name == "score":
            yield Finding(("rubric", index, "name"), f'"{name}" cannot name a part of the reward', fix)
        if name in rubric.parts:
            problem = f'"{name}" is in parts as well, which names criteria of rubric_field'
            yield Finding(("rubric", index, "name"), problem, "give one of them another name")
    for name in rubric.parts:
        if not _NAME.fullmatch(name) or name == "score":
            yield Finding(("parts", name), f'"{name}" cannot name a part of the reward', fix)
    if rubric.parts and rubric.field is None:
        problem = "names criteria of rubric_field, which is not set"
        yield Finding(("parts",), problem, "set rubric_field, or set the field name of each criterion in rubric")
    if rubric.fixed and rubric.field is None and not any(criterion.weight > 0 for criterion in rubric.named()):
        problem = "has no criterion with a positive weight"
        yield Finding(("rubric",), problem, "set at least one weight > 0")
