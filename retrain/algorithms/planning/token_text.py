"""Text of sampled tokens with the characters that each token covers, without re-encoding anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_BROKEN = "\ufffd"  # what a tokenizer decodes an incomplete UTF-8 sequence to


class TokenText:
    """Incremental decoder that remembers each vocabulary entry's text.

    Most tokens decode to the same text wherever they stand (after the first position). Tokens that hold only
    part of a character are decoded together with their neighbors; each of them covers the whole character.

    Args:
        tokenizer: of the model; its `decode` is all that is used.
        special: special tokens have a text too, by which people see them.
    """

    def __init__(self, tokenizer: Any, special: bool = False) -> None:
        self._decode: Callable[[list[int]], str] = lambda ids: tokenizer.decode(
            ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        self._pieces: dict[int, str | None] = {}
        self._anchor = next((i for i in range(len(tokenizer)) if self._decode([i]).strip().isalnum()), 0)
        self._prefix = len(self._decode([self._anchor]))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Text that each token adds; a token that only continues a character adds nothing."""
        known = self._pieces
        for token in set(ids).difference(known):
            text = self._after_anchor([token])
            known[token] = None if _BROKEN in text else text
        found = [known[token] for token in ids]
        return self._mended(ids, found) if None in found else found  # pyright: ignore[reportReturnType]

    def _after_anchor(self, ids: list[int]) -> str:
        """Text of tokens in mid-sequence: some tokenizers strip the space of a first token."""
        return self._decode([self._anchor, *ids])[self._prefix :]

    def _mended(self, ids: Sequence[int], found: list[str | None]) -> list[str]:
        """Decode each run of incomplete tokens token by token, giving a character to the token that ends it."""
        pieces: list[str] = []
        start = done = 0
        for position, piece in enumerate(found):
            if piece is not None:
                pieces.append(piece)
                start, done = position + 1, 0
                continue
            text = self._after_anchor(list(ids[start : position + 1]))
            last = position + 1 == len(found) or found[position + 1] is not None
            complete = text if last else text.rstrip(_BROKEN)
            pieces.append(complete[done:])
            done = max(done, len(complete))
        return pieces
