"""Log-probabilities in the two shapes OpenAI gives them, and vLLM's shape for the prompt's.

Every entry belongs to one token of ``completion_token_ids``, the ending stop token included, so the
lists always have the length of ``usage.completion_tokens``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fastengine.entrypoints.openai.response_types import (
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from fastengine.protocol.outputs import TopLogprobs
from fastengine.text.tokenizer import Tokenizer

# OpenAI's own stand-in for minus infinity, which JSON can't hold.
LEAST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(token_ids: Iterable[int], logprobs: Iterable[TopLogprobs], tokenizer: Tokenizer) -> list[TokenLogprob]:
    return [_chat_entry(token_id, entry, tokenizer) for token_id, entry in zip(token_ids, logprobs, strict=True)]


def _chat_entry(token_id: int, entry: TopLogprobs, tokenizer: Tokenizer) -> TokenLogprob:
    top = []
    for top_id, top_logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        raw = tokenizer.token_bytes(top_id)
        top.append(TopLogprob(token=_lossy(raw), logprob=finite(top_logprob), bytes=list(raw)))
    raw = tokenizer.token_bytes(token_id)
    return TokenLogprob(token=_lossy(raw), logprob=finite(entry.logprob), bytes=list(raw), top_logprobs=top)


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TopLogprobs | None],
    tokenizer: Tokenizer,
    *,
    num_top: int,
    offsets: Sequence[int] | None = None,
) -> CompletionLogprobs:
    """The completions shape. None among ``logprobs`` stands for the prompt's first token, which has none.

    ``offsets`` say where each token's text begins in the choice's text, in characters; without them the
    tokens' own lengths are added up.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    lengths: list[int] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        raw = tokenizer.token_bytes(token_id)
        name = exact(raw)
        tokens.append(name)
        lengths.append(len(_lossy(raw)))
        values.append(None if entry is None else finite(entry.logprob))
        tops.append(None if entry is None else _top(name, entry, tokenizer, num_top))
    if offsets is None:
        offsets = list(itertools.accumulate(lengths, initial=0))[:-1]
    return CompletionLogprobs(tokens=tokens, token_logprobs=values, top_logprobs=tops if num_top else None, text_offset=list(offsets))


def _top(name: str, entry: TopLogprobs, tokenizer: Tokenizer, num_top: int) -> dict[str, float]:
    top = {
        exact(tokenizer.token_bytes(top_id)): finite(logprob) for top_id, logprob in zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
    }
    top.setdefault(name, finite(entry.logprob))
    return top


def prompt_logprobs(token_ids: Sequence[int], logprobs: Sequence[TopLogprobs | None], tokenizer: Tokenizer) -> PromptLogprobs:
    """One dictionary per prompt token; the first token's is None."""
    out: PromptLogprobs = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        if entry is None:
            out.append(None)
            continue
        by_id = {
            str(top_id): PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=_lossy(tokenizer.token_bytes(top_id)))
            for rank, (top_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
        }
        own = PromptLogprob(logprob=finite(entry.logprob), rank=entry.rank, decoded_token=_lossy(tokenizer.token_bytes(token_id)))
        by_id.setdefault(str(token_id), own)
        out.append(by_id)
    return out


def _lossy(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def exact(raw: bytes) -> str:
    """The token's text, or OpenAI's ``bytes:\\xe2\\x80`` where it is not a whole character: names stay distinct."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
