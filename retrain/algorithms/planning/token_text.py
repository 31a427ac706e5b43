"""Text of each sampled token, without encoding text again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_BROKEN = "\ufffd"  # tokenizers decode an incomplete UTF-8 sequence to this character


class TokenText:
    """Incremental decoder that caches the text of each vocabulary entry.

    Most tokens have the same text at every position except the first. Tokens that contain only part of a character are
    decoded together with their neighbors, and the last of them gets the character.

    Args:
        tokenizer: the model's tokenizer, of which only `decode` and the length are used.
        special: give special tokens their text, for display; otherwise it is "".
    """

    def __init__(self, tokenizer: Any, special: bool = False) -> None:
        self._decode: Callable[[list[int]], str] = lambda ids: tokenizer.decode(
            ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        self._pieces: dict[int, str | None] = {}
        # A plain word: the bytes of an incomplete character would join those of the next token.
        self._anchor = next((i for i in range(len(tokenizer)) if self._decode([i]).strip().isalnum()), 0)
        self._prefix = len(self._decode([self._anchor]))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds; a token that does not complete a character adds ""."""
        cached = self._pieces
        for token in set(ids).difference(cached):
            text = self._after_anchor([token])
            # None: the text depends on the neighbors, so it cannot be cached.
            cached[token] = None if _BROKEN in text else text
        pieces = [cached[token] for token in ids]
        return self._completed(ids, pieces) if None in pieces else pieces  # pyright: ignore[reportReturnType]

    def _after_anchor(self, ids: list[int]) -> str:
        """Return the text of tokens inside a sequence; some tokenizers strip the space of the first token."""
        return self._decode([self._anchor, *ids])[self._prefix :]

    def _completed(self, ids: Sequence[int], texts: list[str | None]) -> list[str]:
        """Decode each run of incomplete tokens token by token; the token that ends a character gets it."""
        pieces: list[str] = []
        start = done = 0
        for position, piece in enumerate(texts):
            if piece is not None:
                pieces.append(piece)
                start, done = position + 1, 0
                continue
            text = self._after_anchor(list(ids[start : position + 1]))
            last = position + 1 == len(texts) or texts[position + 1] is not None
            # Later tokens may complete the character; at the end of the run nothing can.
            complete = text if last else text.rstrip(_BROKEN)
            pieces.append(complete[done:])
            done = max(done, len(complete))
        return pieces
