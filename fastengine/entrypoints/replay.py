"""``fastengine replay FILE``: send the requests of a record file to a server again, and compare what comes back.

Files are those of ``--dump-requests`` and ``--crash-dump-dir``. Each sequence is sent to ``/v1/completions``
as token ids, with its own sampling parameters and the seed it had.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastengine.observability.request_log import RequestRecord, read_requests
from fastengine.protocol.requests import GrammarSpec

SAME, DIFFERENT, REFUSED = "same output", "different output", "refused"
# A grammar's kind -> the field that asks for it.
GRAMMAR_FIELDS = {
    "json_schema": "guided_json",
    "json_object": "guided_json_object",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "lark": "guided_grammar",
    "structural_tag": "structural_tag",
}
PLAIN_PARAMETERS = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


@dataclass(frozen=True)
class Outcome:
    record: RequestRecord
    verdict: str
    detail: str = ""


def body_of(record: RequestRecord) -> dict[str, Any]:
    """The ``/v1/completions`` body that asks for the same again. Raises ValueError for what HTTP can't say."""
    sampling = record.sampling
    if sampling.pooling is not None:
        raise ValueError("it asked for an embedding, not for tokens")
    reasoning = sampling.reasoning
    if reasoning is not None and (sampling.grammar is not None or reasoning.max_tokens is not None):
        raise ValueError("completions know no reasoning, whose end its grammar or budget depends on")
    body: dict[str, Any] = {name: getattr(sampling, name) for name in PLAIN_PARAMETERS}
    body |= {"model": "default", "prompt": record.prompt_token_ids, "return_token_ids": True}
    body |= grammar_field(sampling.grammar)
    optional = {
        "seed": record.seed,
        "bad_words_token_ids": [list(word) for word in sampling.bad_words_token_ids],
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "priority": record.priority,
        "timeout_s": record.timeout_s,
        "cache_salt": record.cache_salt,
    }
    return body | {name: value for name, value in optional.items() if value not in (None, "", [], {})}


def grammar_field(grammar: GrammarSpec | None) -> dict[str, Any]:
    """The field, with its value, that asks for ``grammar``. Raises ValueError for a kind that is none of this version's."""
    if grammar is None:
        return {}
    field = GRAMMAR_FIELDS.get(grammar.kind)
    if field is None:
        raise ValueError(f"this version knows no grammars of kind {grammar.kind!r}")
    if grammar.kind == "choice":
        return {field: json.loads(grammar.source)}
    return {field: True if grammar.kind == "json_object" else grammar.source}


class Replayer:
    """Sends records to one server. ``timeout_s`` bounds each request."""

    def __init__(self, url: str, key: str | None, timeout_s: float):
        self._url = url.rstrip("/") + "/v1/completions"
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._timeout_s = timeout_s

    def send(self, record: RequestRecord) -> Outcome:
        try:
            body = json.dumps(body_of(record)).encode()
            request = urllib.request.Request(self._url, data=body, headers=self._headers, method="POST")
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                answered = json.load(reply)["choices"][0]["completion_token_ids"]
        except ValueError as error:
            return Outcome(record, REFUSED, str(error))
        except urllib.error.HTTPError as error:
            return Outcome(record, REFUSED, f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}")
        except OSError as error:
            return Outcome(record, REFUSED, f"no answer: {error}")
        return self._compared(record, answered)

    @staticmethod
    def _compared(record: RequestRecord, answered: list[int]) -> Outcome:
        """The recorded output must be what the answer begins with: it may have been cut short by the crash or by its client."""
        expected = record.output_token_ids
        whole = record.finish_reason in ("stop", "length")
        if answered == expected or (not whole and answered[: len(expected)] == expected):
            return Outcome(record, SAME)
        step = next((i for i, (a, b) in enumerate(zip(answered, expected, strict=False)) if a != b), min(len(answered), len(expected)))
        return Outcome(record, DIFFERENT, f"from token {step} on ({len(expected)} recorded, {len(answered)} now)")

    def send_all(self, records: Sequence[RequestRecord], concurrency: int, keep_timing: bool) -> Iterator[Outcome]:
        """Outcomes in the order of ``records``; with ``keep_timing`` each is sent when it arrived, relative to the first."""
        started = time.monotonic()
        first = min((record.arrived_at_s for record in records), default=0.0)

        def due(record: RequestRecord) -> Outcome:
            if keep_timing:
                time.sleep(max(0.0, record.arrived_at_s - first - (time.monotonic() - started)))
            return self.send(record)

        with ThreadPoolExecutor(concurrency) as pool:
            yield from pool.map(due, records)


def replay(file: str, url: str, key: str | None, *, concurrency: int, keep_timing: bool, timeout_s: float) -> int:
    """Replay ``file`` and print what came of it. Returns 0 when every request was answered, 1 otherwise."""
    try:
        records = sorted(read_requests(Path(file)), key=lambda record: record.arrived_at_s)
    except (OSError, ValueError) as error:
        print(f"fastengine replay: {error}", file=sys.stderr)
        return 1
    verdicts: Counter[str] = Counter()
    for outcome in Replayer(url, key, timeout_s).send_all(records, concurrency, keep_timing):
        verdicts[outcome.verdict] += 1
        if outcome.verdict != SAME:
            print(f"{outcome.record.request_id}: {outcome.verdict}: {outcome.detail}")
    print(f"{len(records)} requests: " + ", ".join(f"{verdicts[name]} {name}" for name in (SAME, DIFFERENT, REFUSED)))
    return 1 if verdicts[REFUSED] else 0
