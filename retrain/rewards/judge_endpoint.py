"""Questions to a language model that judges, behind an endpoint that speaks OpenAI's chat API."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import Field

from retrain.functional.templates import PLACE, as_text, column
from retrain.registry import Finding
from retrain.registry.traits import ComponentCheck
from retrain.rewards.rubric import Item, Rubric, Weighted
from retrain.system.files import write_text
from retrain.system.http_client import FAILURES, Calls, HttpError, key_from, key_mistakes
from retrain.system.masking import masked
from retrain.system.records import BadRow

T = TypeVar("T")
SENDS = {"base_url": "sends prompts, completions and the key of api_key_env to a server"}
"""Trait `reaches` of a reward that asks a judge."""

_TRY_AGAIN = (408, 409, 425, 429)
_CALL_S = 60.0
_MAX_BYTES = 1 << 24
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(kw_only=True)
class JudgeEndpoint:
    """A judge and its questions.

    Equal questions are asked once. An answer without what is asked for is asked for again. The judge runs outside the
    sandbox. It reads text of the model that it grades, and training may exploit it.

    Args:
        base_url: "https://.../v1"; no proxy of the environment is used.
        model: its name there.
        prompt: the question, with {prompt}, {answer}, what is judged, with a rubric {criterion}, and columns of the row
            filled in. If it is unset, one is made that fits the other settings.
        rubric: criteria of every row, each a text or a table of criterion, weight (1, negative for a fault) and name.
            The judge is asked about each in a request of its own.
        rubric_field: column with a list of further criteria of the row, dotted if nested.
        parts: names that criteria of `rubric_field` must have -> weight of each in `reward_parts`.
        lowest, highest: ends of the judge's scale.
        api_key_env: name of the environment variable with the key; "" sends none.
        max_tokens, temperature: of its answer.
        retries: further attempts after an overload, a lost connection or a missing score.
        per_minute: most requests per minute; 0 for no limit.
        cache: folder that keeps answers for later runs; unset: they last as long as the run.
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
        self._url = f"{self.base_url.rstrip('/')}/chat/completions"
        self._gap_s, self._next = 60.0 / self.per_minute if self.per_minute else 0.0, 0.0
        self._folder = Path(self.cache).expanduser() if self.cache else None
        self._known: dict[str, asyncio.Future[Any]] = {}
        self._calls = Calls(_CALL_S, _MAX_BYTES, key_from(self.api_key_env))

    def criteria_of(self, problem: Mapping[str, Any]) -> list[Weighted] | None:
        """The criteria of a problem; None without a rubric, empty if the problem has no criterion."""
        return self._rubric.of(problem["extra"]) if self._rubric else None

    async def ask_each(
        self, criteria: Sequence[Weighted] | None, question: Callable[[str], str], read: Callable[[str], T], *how: Any
    ) -> list[T]:
        """Ask about every criterion, together; without a rubric once.

        Args:
            question: text of a criterion -> the question.
            read: the judge's answer -> its result; ValueError if it has none.
            how: settings that change what `read` finds.
        Raises:
            ValueError: no answer about a criterion has a result; without a rubric the failure of the request itself.
        """
        if criteria is None:
            return [await self._request(question(""), read, how)]
        texts = [question(one.text) for one in criteria]
        found = await asyncio.gather(*(self._request(text, read, how) for text in texts), return_exceptions=True)
        for one, result in zip(criteria, found, strict=True):
            if isinstance(result, BaseException):
                raise ValueError(f"{result}, about the criterion {one.text[:200]!r}") from result
        return cast("list[T]", found)

    async def _request(self, text: str, read: Callable[[str], T], how: Sequence[Any]) -> T:
        settings = {"model": self.model, "max_tokens": self.max_tokens, "temperature": self.temperature}
        body = {**settings, "messages": [{"role": "user", "content": text}]}
        digest = hashlib.sha256(json.dumps([self._url, body, *how], sort_keys=True).encode()).hexdigest()
        if digest not in self._known:
            self._known[digest] = asyncio.ensure_future(self._judged(digest, body, read))
        try:
            return await asyncio.shield(self._known[digest])
        except Exception:
            self._known.pop(digest, None)  # The next attempt may succeed.
            raise

    async def _judged(self, digest: str, body: Mapping[str, Any], read: Callable[[str], T]) -> T:
        """The result of the answer in the cache, or of a new one."""
        file = self._folder / f"{digest}.json" if self._folder else None
        if file and file.exists():
            with suppress(OSError, ValueError, KeyError, TypeError):  # A damaged entry is requested again.
                return read(json.loads(file.read_text(encoding="utf-8"))["answer"])
        answer = await self._answer(body, read)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            # The answer may repeat the key.
            write_text(file, json.dumps({"request": body, "answer": masked(answer)}, ensure_ascii=False))
        return read(answer)

    async def _answer(self, body: Mapping[str, Any], read: Callable[[str], object]) -> str:
        """The judge's first answer that has a result."""
        attempt = 0
        while True:
            try:
                await self._turn()
                reply = await self._calls.request(self._url, body)
                answer = str(reply["choices"][0]["message"]["content"])
                read(answer)
                return answer
            except FAILURES as error:
                refused = isinstance(error, HttpError) and error.code < 500 and error.code not in _TRY_AGAIN
                if attempt == self.retries or refused:
                    raise
            await asyncio.sleep(0.5 * 2**attempt)
            attempt += 1

    async def _turn(self) -> None:
        """Wait until the rate limit allows the next request."""
        self._next = max(self._next + self._gap_s, time.monotonic())
        await asyncio.sleep(self._next - time.monotonic())

    def scaled(self, value: Any, answer: str) -> float:
        """Return a score of the judge's scale in [0, 1]; ValueError if it is not a number of that scale."""
        try:
            if isinstance(value, bool):
                raise TypeError
            number = float(value.replace(",", ".") if isinstance(value, str) else value)
        except (TypeError, ValueError):
            raise ValueError(f"the judge's answer holds no score: {masked(answer)[-200:]!r}") from None
        if not self.lowest <= number <= self.highest:
            raise ValueError(f"the judge's score {number:g} is not between {self.lowest:g} and {self.highest:g}")
        return (number - self.lowest) / (self.highest - self.lowest)


def rubric_in(params: Mapping[str, Any]) -> Rubric:
    """The rubric in a judge's parameters."""
    return Rubric(params["rubric"], params["rubric_field"], params["parts"] or {})


def filled(template: str, problem: Mapping[str, Any], own: Mapping[str, str]) -> str:
    """The template with the prompt, the answer, `own` places and columns of the row.

    What is filled in is not searched for places.

    Raises:
        ValueError: the row does not have a column.
    """
    named = {"prompt": question_text(problem["prompt"]), "answer": str(problem["answer"]), **own}
    row: Mapping[str, Any] = problem["extra"]

    def shown(name: str) -> str:
        if name in named:
            return named[name]
        if value := column(row, name):
            return as_text(value[0])
        raise BadRow(f'no field "{name}", which prompt shows; it has {", ".join((*named, *row))}')

    return PLACE.sub(lambda place: shown(place[1]), template)


def question_text(prompt: Any) -> str:
    """The question without a chat template."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{one['role']}: {one['content']}" for one in cast("list[dict[str, str]]", prompt))


def last_line(answer: str) -> str:
    """The last line of a judge's answer: what it quotes before that is not read."""
    return answer.strip().rpartition("\n")[2].strip()


def unfit_for(shown: str) -> Callable[[Mapping[str, Any], Mapping[str, Any]], str]:
    """Return the trait `problems` of a judge.

    Args:
        shown: the place of its template that shows what it judges.
    """

    def unfit(params: Mapping[str, Any], problem: Mapping[str, Any]) -> str:
        rubric, template = rubric_in(params), params["prompt"] or ""
        try:
            if rubric:
                rubric.of(problem["extra"])
            filled(template, problem, dict.fromkeys((shown, "criterion") if rubric else (shown,), ""))
        except BadRow as reason:
            return str(reason)
        empty = "{answer}" in template and not problem["answer"].strip()
        return "the answer is empty, and prompt shows it" if empty else ""

    return unfit


def columns_of(params: Mapping[str, Any]) -> dict[str, float]:
    """The trait `parts` of a judge."""
    return rubric_in(params).columns()


def check_for(shown: str) -> ComponentCheck:
    """Return the check of a judge's parameters.

    Args:
        shown: the place of its template that shows what it judges.
    """

    def check(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
        if not re.match(r"https?://[^/\s]+", params["base_url"]):
            yield Finding(("base_url",), "is not the address of a server", 'write it as "http://127.0.0.1:8000/v1"')
        if params["lowest"] >= params["highest"]:
            yield Finding(("highest",), "is not above lowest", "give the ends of the judge's scale")
        for found in key_mistakes(params["api_key_env"]):
            yield Finding(("api_key_env",), *found)
        rubric = rubric_in(params)
        for place in (shown, "criterion") if rubric else (shown,):
            if params["prompt"] is not None and f"{{{place}}}" not in params["prompt"]:
                yield Finding(("prompt",), f"does not show the {place}", f"write {{{place}}} where it belongs")
        yield from _rubric_mistakes(rubric)

    return check


def _rubric_mistakes(rubric: Rubric) -> Iterator[Finding]:
    """Names that cannot be those of a part, and rubrics without a positive weight."""
    fix = "name it with letters, digits, '_', '-' and '.', as in \"correct\""
    for index, one in enumerate(rubric.fixed):
        name = one.get("name", "correct")
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
        yield Finding(("parts",), problem, "set rubric_field, or give the criteria of rubric names of their own")
    if rubric.fixed and rubric.field is None and not any(one.weight > 0 for one in rubric.named()):
        problem = "has no criterion with a positive weight"
        yield Finding(("rubric",), problem, "give the reward something to gain: one weight > 0 at least")
