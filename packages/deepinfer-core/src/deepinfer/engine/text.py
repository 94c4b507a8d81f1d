"""The text of one growing output, and where a stop string ends it.

An occurrence of a stop string counts when its last character came with a token that may stop. Of
all that count, the one that is complete first ends the text; of several that end at the same
character, the longest. The text does not depend on how tokens cut it, nor on when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.engine.detokenizer import detokenizer
from deepinfer.tokenizer import Tokenizer

__all__ = ["OutputText"]


class OutputText:
    """The text of one output, token by token.

    Args:
        tokenizer: whose `decode` of all tokens is the text.
        stop: stop strings, none of them empty.
        skip_special_tokens: whether special tokens give no text.
        include_stop: whether the text keeps the stop string that ended it.

    Attributes:
        stop_reason: the stop string that ended the text, or None.
        num_certain_tokens: with stop strings, tokens that no stop string can take back any more.

    Example:
        >>> text = OutputText(tokenizer, stop=["\\n\\n"])
        >>> for token_id in token_ids:
        ...     is_over = text.append(token_id)
        ...     print(text.take_delta(), end="")
        ...     if is_over:
        ...         break
        >>> print(text.finish())
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        assert all(stop), f"an empty stop string among {stop!r}"
        self.stop_reason: str | None = None
        self._stop, self._includes_stop = tuple(stop), include_stop
        self._tokens = detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, tracks=bool(stop)
        )
        self._num_kept = 0
        self.num_certain_tokens = 0
        self._is_finished = False
        self._may_stop = True
        # the text is shown + fresh + held; with include_stop, held is part of fresh or shown
        self._shown: list[str] = []
        self._fresh: list[str] = []
        self._held = ""  # the end of the text, where it may begin a stop string

    def append(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Take the next token. After a stop string, tokens are ignored.

        Args:
            token_id: the token.
            may_stop: False while the output is shorter than it must be: a stop string that this
                token completes does not end the text, now or later.

        Returns:
            Whether a stop string has ended the text. One that is only complete when the bytes of an
            unfinished character are given up is found by `finish`.
        """
        if self.stop_reason is not None:
            return True
        new = self._tokens.push(token_id)
        if self._stop:
            self._may_stop = may_stop
            return self._take(new)
        self._fresh.append(new)
        return False

    def take_delta(self) -> str:
        """The text that is certain and was not taken yet.

        Held back are the bytes of an unfinished character, and an end that may turn out to be the
        beginning of a stop string.
        """
        delta = "".join(self._fresh)
        self._fresh.clear()
        if delta:
            self._shown.append(delta)
        return delta

    def finish(self) -> str:
        """The last delta, as no token follows: all that was held back, up to a stop string.

        Look at `stop_reason` after it, too. Further calls give "".
        """
        if not self._is_finished and self.stop_reason is None:
            self._take(self._tokens.flush())
            if self.stop_reason is None and not self._includes_stop:
                self._fresh.append(self._held)
            self._held = ""
        self._is_finished = True
        return self.take_delta()

    @property
    def text(self) -> str:
        """The text so far, without an unfinished character; all of it after `finish`."""
        end = "" if self._includes_stop else self._held
        return "".join((*self._shown, *self._fresh, end))

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to the text: all of them, or, where a stop string ended it, the
        fewest whose text begins with the text that is kept.
        """
        return self._tokens.num_tokens if self.stop_reason is None else self._num_kept

    def _take(self, new: str) -> bool:
        """Add certain text: look for a stop string, then for what may become one."""
        if not new:
            return False
        text, num_old = self._held + new, len(self._held)
        begin = num_old if self._includes_stop else 0
        found = self._first_stop(text, num_old) if self._may_stop else None
        if found is not None:
            end, stop = found
            self.stop_reason, self._held = stop, ""
            self._fresh.append(text[begin : end if self._includes_stop else end - len(stop)])
            self._num_kept = self._tokens.tokens_for(self.text)
            return True
        at = self._unfinished_stop(text)
        self._held = text[at:]
        if not self._held:
            self.num_certain_tokens = self._tokens.num_needed_tokens
        self._fresh.append(text[begin : None if self._includes_stop else at])
        return False

    def _first_stop(self, text: str, num_old: int) -> tuple[int, str] | None:
        """End and stop string of the first occurrence that ends behind `num_old` characters."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = text.find(stop, max(0, num_old - len(stop) + 1))
            end = at + len(stop)
            if at >= 0 and (found is None or (end, -len(stop)) < (found[0], -len(found[1]))):
                found = end, stop
        return found

    def _unfinished_stop(self, text: str) -> int:
        """Where the longest end of the text begins that is a beginning of a stop string."""
        first = len(text)
        for stop in self._stop:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
            while at >= 0:
                if stop.startswith(text[at:]):
                    first = at
                    break
                at = text.find(stop[0], at + 1, first)
        return first
