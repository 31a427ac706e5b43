"""A language model as the judge of completions, behind an endpoint that speaks OpenAI's chat API."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field

from retrain.registry import Finding, reward
from retrain.rewards.text import Capturing
from retrain.system.files import write_text
from retrain.system.http_client import FAILURES, Calls, HttpError, key_from, key_mistakes
from retrain.system.masking import masked

_TEMPLATE = """Grade an answer to a question.

Question:
{prompt}

Reference answer:
{answer}

Answer to grade:
{completion}

Give a score from 0 (wrong) to 10 (right and complete). Explain briefly, then end with a line "Score: N"."""
_SCORE = (
    r"(?i)[*_#\s]*(?:final\s+)?score\s*(?:\([^()]*\))?[*_:=\s]*"
    r"(-?\d+(?:[.,]\d+)?)(?:\s*(?:/|out\s+of)\s*\d+)?[*_.\s]*\Z"
)
"""A line that is a score and nothing else: "Score: 7", "**Final score (0-10): 7.5/10**"."""
_PLACES = re.compile(r"\{(prompt|answer|completion)\}")
_TRY_AGAIN = (408, 409, 425, 429)
_CALL_S = 60.0
_MAX_BYTES = 1 << 24


def _check(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Settings that cannot give a score."""
    if not re.match(r"https?://[^/\s]+", params["base_url"]):
        yield Finding(("base_url",), "is not the address of a server", 'write it as "http://127.0.0.1:8000/v1"')
    if "{completion}" not in params["prompt"]:
        yield Finding(("prompt",), "does not show the completion", "write {completion} where it belongs")
    if params["lowest"] >= params["highest"]:
        yield Finding(("highest",), "is not above lowest", "give the ends of the judge's scale")
    for found in key_mistakes(params["api_key_env"]):
        yield Finding(("api_key_env",), *found)


@reward(
    "judge",
    network=True,
    timeout_s=180.0,
    check=_check,
    reaches={"base_url": "sends prompts, completions and the key of api_key_env to a server"},
)
class Judge:
    """Score in [0, 1] by another language model: (s - lowest) / (highest - lowest), s the number in its answer.

    The endpoint takes POST base_url/chat/completions. Equal questions are asked once. A judge that gives no answer
    after all retries, or one without a score on its scale, has failed: the completion is left out of training.
    The judge runs outside the sandbox. It reads text of the model that it grades, and training may
    exploit it.

    Args:
        base_url: "https://.../v1"; no proxy of the environment is used.
        model: its name there.
        prompt: the question, with {prompt}, {answer} and {completion} filled in.
        pattern: regular expression whose first group is the score. It must match the last line of the answer, from its
            beginning, and only once: what the judge quotes before that is not read.
        json_field: read the score from this field of the JSON object that ends the answer instead.
        lowest, highest: ends of the judge's scale.
        api_key_env: name of the environment variable with the key; "" sends none.
        max_tokens, temperature: of its answer.
        retries: further attempts after an overload, a lost connection or a missing score.
        per_minute: most requests per minute; 0 for no limit.
        cache: folder that keeps answers for later runs; unset: they last as long as the run.
    """

    def __init__(  # noqa: PLR0913 - its keyword-only parameters are its table
        self,
        *,
        base_url: str,
        model: str,
        prompt: str = _TEMPLATE,
        pattern: Capturing = _SCORE,
        json_field: str | None = None,
        lowest: float = 0.0,
        highest: float = 10.0,
        api_key_env: str = "",
        max_tokens: Annotated[int, Field(ge=1)] = 512,
        temperature: Annotated[float, Field(ge=0)] = 0.0,
        retries: Annotated[int, Field(ge=0)] = 3,
        per_minute: Annotated[float, Field(ge=0)] = 0.0,
        cache: str | None = None,
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._settings = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._template, self._pattern, self._json_field = prompt, re.compile(pattern), json_field
        self._lowest, self._highest = lowest, highest
        self._reading = [pattern, json_field, lowest, highest]
        self._retries, self._gap_s, self._next = retries, 60.0 / per_minute if per_minute else 0.0, 0.0
        self._folder = Path(cache).expanduser() if cache else None
        self._known: dict[str, asyncio.Future[float]] = {}
        self._calls = Calls(_CALL_S, _MAX_BYTES, key_from(api_key_env))

    async def __call__(self, completion: str, answer: str, problem: Mapping[str, Any]) -> float:
        said = {"completion": completion, "answer": answer, "prompt": _as_text(problem["prompt"])}
        text = _PLACES.sub(lambda place: said[place[1]], self._template)
        body = {**self._settings, "messages": [{"role": "user", "content": text}]}
        digest = hashlib.sha256(json.dumps([self._url, body, *self._reading], sort_keys=True).encode()).hexdigest()
        if digest not in self._known:
            self._known[digest] = asyncio.ensure_future(self._judged(digest, body))
        try:
            return await asyncio.shield(self._known[digest])
        except Exception:
            self._known.pop(digest, None)  # The next attempt may succeed.
            raise

    async def _judged(self, digest: str, body: Mapping[str, Any]) -> float:
        """The score of the answer in the cache, or of a new one."""
        file = self._folder / f"{digest}.json" if self._folder else None
        if file and file.exists():
            with suppress(OSError, ValueError, KeyError, TypeError):  # A damaged entry is requested again.
                return self._score(json.loads(file.read_text(encoding="utf-8"))["answer"])
        answer = await self._answer(body)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            # The answer may repeat the key.
            write_text(file, json.dumps({"request": body, "answer": masked(answer)}, ensure_ascii=False))
        return self._score(answer)

    async def _answer(self, body: Mapping[str, Any]) -> str:
        """The judge's first answer that has a score."""
        attempt = 0
        while True:
            try:
                await self._turn()
                reply = await self._calls.ask(self._url, body)
                answer = str(reply["choices"][0]["message"]["content"])
                self._score(answer)
                return answer
            except FAILURES as error:
                refused = isinstance(error, HttpError) and error.code < 500 and error.code not in _TRY_AGAIN
                if attempt == self._retries or refused:
                    raise
            await asyncio.sleep(0.5 * 2**attempt)
            attempt += 1

    async def _turn(self) -> None:
        """Wait until the rate limit allows the next request."""
        self._next = max(self._next + self._gap_s, time.monotonic())
        await asyncio.sleep(self._next - time.monotonic())

    def _score(self, answer: str) -> float:
        """Parse the score of an answer, scaled to [0, 1]; ValueError without a readable score."""
        if self._json_field:
            value = _final_object(answer, self._json_field)
        else:
            line = answer.strip().rpartition("\n")[2].strip()
            found = [*self._pattern.finditer(line)]
            value = found[0][1] if len(found) == 1 and found[0].start() == 0 else None
        try:
            number = float(value.replace(",", ".") if isinstance(value, str) else value)  # pyright: ignore[reportArgumentType] - None and objects raise TypeError
        except (TypeError, ValueError):
            raise ValueError(f"the judge's answer holds no score: {masked(answer)[-200:]!r}") from None
        if not self._lowest <= number <= self._highest:
            raise ValueError(f"the judge's score {number:g} is not between {self._lowest:g} and {self._highest:g}")
        return (number - self._lowest) / (self._highest - self._lowest)


def _final_object(text: str, key: str) -> Any:
    """The value of `key` in the JSON object that ends a text, in a fenced block or not; None without one."""
    text, decoder = text.rstrip("` \n\t\r"), json.JSONDecoder()
    for start in (found.start() for found in re.finditer(r"\{", text)):
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if end == len(text):
            return value.get(key)
    return None


def _as_text(prompt: Any) -> str:
    """The question without a chat template."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{one['role']}: {one['content']}" for one in cast("list[dict[str, str]]", prompt))
