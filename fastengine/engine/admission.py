"""Admission to the engine: what a new request must satisfy, and how many tokens it may come to.

The rules, in order; the first that fails names the error:

* prompt: at least one token, every id in the vocabulary, ``prompt + 1 <= max_model_len`` -> 400; with a ``max_tokens`` of 1, as
  whoever wants the prompt's scores or embedding alone has it, ``prompt <= max_model_len``: the last token is sampled, not computed
* sampling settings (bias, grammar, stop tokens ...) must fit one message beside the prompt -> 400
* ``max_tokens`` at least 1 -> 400; beyond what the model's length leaves, it is cut to that
* KV: all positions that will be computed (prompt + output - 1) must fit the whole pool -> 400, with the
  numbers. Without ``max_tokens`` a request may grow until the model's length or the pool's size, whichever
  is less, and then ends with ``length``.
* paused under ``--reject-while-paused`` -> 503; too many waiting requests or prompt tokens -> 429
"""

from __future__ import annotations

from collections.abc import Callable

from fastengine.config import EngineConfig
from fastengine.engine.request_state import ModelLimits
from fastengine.protocol.outputs import EngineError
from fastengine.protocol.requests import GenerateRequest
from fastengine.protocol.tokens import TOKEN_DTYPE, unpack_token_ids
from fastengine.sampling_rules import MAX_SAMPLING_BYTES, largest_field, sampling_bytes


class Refused(Exception):
    """The request can't be taken; ``error`` goes to its client."""

    def __init__(self, code: int, message: str, *, param: str | None = None, retry_after_s: float | None = None, reason: str | None = None):
        super().__init__(message)
        self.error = EngineError(code, message, param, retry_after_s, reason)


class AdmissionRules:
    """Checks that need nothing but the request, the limits and the sizes of the queues."""

    def __init__(self, config: EngineConfig, limits: ModelLimits, num_blocks: int):
        self._limits = limits
        self._block_size = config.cache.block_size
        self._max_waiting_requests = config.scheduler.max_waiting_requests
        self._max_queued_tokens = config.scheduler.max_queued_tokens
        self.num_blocks = num_blocks

    def most_tokens(self, request: GenerateRequest) -> int:
        """Prompt and output tokens that ``request`` may come to. Raises Refused with code 400."""
        num_prompt = self._checked_prompt_length(request)
        self._check_size(request)
        asked = request.sampling.max_tokens
        if asked is not None and asked < 1:
            raise Refused(400, f"max_tokens must be at least 1, got {asked}", param="max_tokens")
        room = self._limits.max_model_len - num_prompt
        if asked is None:
            # The last token is sampled, not computed: it needs no KV.
            fits = self.num_blocks * self._block_size + 1
            end = min(self._limits.max_model_len, fits)
            if end <= num_prompt:
                raise self._never_fits(num_prompt, 1)
            return end
        num_output = min(asked, max(1, room))
        if not self.fits(num_prompt + num_output):
            raise self._never_fits(num_prompt, num_output)
        return num_prompt + num_output

    def fits(self, end: int) -> bool:
        """Whether a sequence of ``end`` tokens fits the pool when it is alone."""
        return -(-(end - 1) // self._block_size) <= self.num_blocks

    def check_queues(self, num_waiting: int, num_queued_tokens: int, num_prompt: int, retry_after_s: Callable[[], float]) -> None:
        """Raises Refused with code 429 when the request would have to wait in a full queue; ``retry_after_s()`` is then asked for."""
        if num_waiting >= self._max_waiting_requests:
            raise Refused(
                429,
                f"{num_waiting} requests are waiting, the most allowed is {self._max_waiting_requests}; try again later",
                retry_after_s=retry_after_s(),
            )
        if num_queued_tokens + num_prompt > self._max_queued_tokens and num_waiting > 0:
            raise Refused(
                429,
                f"{num_queued_tokens} prompt tokens are waiting; {num_prompt} more would exceed the most allowed, {self._max_queued_tokens}; try again later",
                retry_after_s=retry_after_s(),
            )

    def _checked_prompt_length(self, request: GenerateRequest) -> int:
        packed = request.prompt_token_ids
        if not packed or len(packed) % TOKEN_DTYPE.itemsize:
            raise Refused(400, "the prompt must hold at least one token", param="prompt")
        tokens = unpack_token_ids(packed)
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= self._limits.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise Refused(400, f"token id {wrong} is outside the vocabulary of {self._limits.vocab_size}", param="prompt")
        if len(tokens) + (request.sampling.max_tokens != 1) > self._limits.max_model_len:
            raise Refused(
                400,
                f"the prompt has {len(tokens)} tokens, which leaves no room for output in the longest sequence this server takes, "
                f"{self._limits.max_model_len} tokens",
                param="prompt",
            )
        return len(tokens)

    def _check_size(self, request: GenerateRequest) -> None:
        """What a request brings for its sampling must fit the one message that starts it, whoever checked it before."""
        size = sampling_bytes(request.sampling)
        if size > MAX_SAMPLING_BYTES:
            field = largest_field(request.sampling)
            raise Refused(400, f"{field}: the request's sampling settings take {size} bytes; {MAX_SAMPLING_BYTES} are allowed", param=field)

    def _never_fits(self, num_prompt: int, num_output: int) -> Refused:
        need = -(-(num_prompt + num_output - 1) // self._block_size)
        return Refused(
            400,
            f"{num_prompt} prompt tokens and {num_output} output tokens need {need} KV blocks of {self._block_size} tokens, "
            f"and the whole pool has {self.num_blocks}; send a shorter prompt or a smaller max_tokens",
            param="max_tokens" if self.fits(num_prompt + 1) else "prompt",
        )
