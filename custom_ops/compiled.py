"""The operators as calls of the registered custom operators. Import it after :func:`library.load`.

Shapes and dtypes are checked in C++. What can't be checked there is whether a tensor that is changed
in place is contiguous: Paddle hands an operator a copy of one that isn't, and the change is lost.
"""

from __future__ import annotations

from typing import Any

from paddle import Tensor, _C_ops

_run_custom_op = _C_ops._run_custom_op
_MARK, _END = "[fastengine] ", " [/fastengine]"


def _run(name: str, *args: Any) -> list[Tensor]:
    try:
        return _run_custom_op(name, *args)
    except ValueError as error:
        text = str(error)
        if _MARK not in text:
            raise
        raise ValueError(text[text.index(_MARK) + len(_MARK) : text.index(_END)]) from None


def _require_contiguous(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: is changed in place and must be contiguous")


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return _run("fastengine_rms_norm", x, weight, epsilon)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if not residual.is_contiguous():
        _require_contiguous(residual=residual)
    return _run("fastengine_add_rms_norm", x, residual, weight, epsilon)[1]


def silu_mul(gate_up: Tensor) -> Tensor:
    return _run("fastengine_silu_mul", gate_up)[0]


def rotary_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    interleaved: bool = False,
) -> None:
    _require_contiguous(query=query, key=key, key_cache=key_cache, value_cache=value_cache)
    _run("fastengine_rotary_write_kv", query, key, value, positions, cos_sin, slot_mapping, key_cache, value_cache, interleaved)


def rotary_write_kv_packed(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    epsilon: float = 1e-6,
) -> Tensor:
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        _require_contiguous(key_cache=key_cache, value_cache=value_cache)
    tensors = (qkv, positions, cos_sin, slot_mapping, key_cache, value_cache, q_norm, k_norm)
    return _run("fastengine_rotary_write_kv_packed", *tensors, num_heads, num_kv_heads, interleaved, epsilon)[2]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
) -> Tensor:
    return _run("fastengine_paged_attention", query, key_cache, value_cache, block_tables, query_starts, context_lens, scale, sliding_window)[0]


def argmax(logits: Tensor) -> Tensor:
    return _run("fastengine_argmax", logits)[0]


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    return _run("fastengine_sample", logits, temperature, top_k, top_p, min_p, seeds, positions)[0]


def apply_penalties(
    logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    token_ids: Tensor,
    row_starts: Tensor,
    output_starts: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    bias_starts: Tensor,
) -> None:
    _require_contiguous(logits=logits)
    packed = (token_ids, row_starts, output_starts, bias_ids, bias_values, bias_starts)
    _run("fastengine_apply_penalties", logits, repetition, presence, frequency, *packed)


def log_softmax_gather(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs, ranks, top_ids, top_logprobs = _run("fastengine_log_softmax_gather", logits, token_ids, k)
    return logprobs, ranks, top_ids, top_logprobs
