"""One sequence's text as its tokens arrive: detokenizing and stop strings put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastengine.protocol.requests import SamplingParams
from fastengine.text.detokenizer import make_detokenizer
from fastengine.text.stop_strings import StopStringMatcher
from fastengine.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What some tokens added.

    ``stop_hit`` is the stop string that ended the text, ``num_tokens`` how many of the tokens belong
    to the sequence: all of them, or those up to the one that completed the stop string.
    """

    text: str
    stop_hit: str | None
    num_tokens: int


class OutputText:
    """Turns one sequence's token ids into text that may be sent.

    The token that ends a sequence (EOS or one of ``stop_token_ids``) has no text; a stop string is cut
    off, with what its last token holds beyond it, unless ``include_stop_str_in_output`` keeps the
    string itself. One that is complete within the first ``min_tokens`` tokens ends nothing. With ``track_offsets``, ``token_offsets[i]`` is the place in the text, in characters,
    where the i-th token's own text begins (the character it takes part in, for half a character).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: SamplingParams, *, track_offsets: bool = False):
        self._detokenizer = make_detokenizer(tokenizer, prompt_ids, skip_special_tokens=sampling.skip_special_tokens)
        self._stops = StopStringMatcher(sampling.stop, include_in_output=sampling.include_stop_str_in_output) if sampling.stop else None
        self._track_offsets = track_offsets
        self._decoded_length = 0
        self._must_go_on = sampling.min_tokens  # in so many tokens to come no stop string counts
        self.token_offsets: list[int] = []
        self.stop_hit: str | None = None
        self.finished = False

    @property
    def is_plain(self) -> bool:
        """Whether tokens become text and nothing else: no stop strings, no offsets."""
        return self._stops is None and not self._track_offsets

    def plain(self, token_ids: Sequence[int]) -> str:
        """The text of tokens none of which ends the sequence. Only where :attr:`is_plain`, and before :meth:`finish`."""
        feed = self._detokenizer.feed
        return feed(token_ids[0]) if len(token_ids) == 1 else "".join([feed(token_id) for token_id in token_ids])

    def add(self, token_ids: Sequence[int], stop_token_id: int | None = None) -> TextDelta:
        """Take new tokens; ``stop_token_id`` says that the last of them ended the sequence and is no text."""
        if self.finished:
            raise RuntimeError("the text has ended: no token may follow a stop string or finish()")
        num_text_tokens = len(token_ids) - (stop_token_id is not None)
        if self._stops is None and not self._track_offsets:
            return TextDelta(self.plain(token_ids[:num_text_tokens]), None, len(token_ids))
        feed = self._detokenizer.feed
        parts: list[str] = []
        for position in range(num_text_tokens):
            if self._track_offsets:
                self.token_offsets.append(self._decoded_length)
            self._must_go_on -= 1
            parts.append(self._emit(feed(token_ids[position])))
            if self.stop_hit is not None:
                return TextDelta("".join(parts), self.stop_hit, position + 1)
        if stop_token_id is not None and self._track_offsets:
            self.token_offsets.append(self._decoded_length)
        return TextDelta("".join(parts), None, len(token_ids))

    def finish(self) -> str:
        """The text that was held back, when the sequence has ended; ``""`` after a stop string or a second call."""
        if self.finished:
            return ""
        text = self._emit(self._detokenizer.flush())
        if self._stops is not None and self.stop_hit is None:
            text += self._stops.flush()
        self.finished = True
        return text

    def _emit(self, text: str) -> str:
        self._decoded_length += len(text)
        if self._stops is None:
            return text
        text, self.stop_hit = self._stops.feed(text, may_end=self._must_go_on < 0)
        self.finished = self.stop_hit is not None
        return text
