"""Custom operators: one Python face for all devices.

Each function runs compiled code where there is some, else its twin in ``reference.py`` (plain numpy,
slow; one warning at import). ``compiled_ops()`` says which. The first tensor's place decides: on a GPU
``cuda/ops.py`` runs, which says what differs there. Common to all on the CPU:

- Shapes: T tokens of a step (of all sequences, one after the other), S sequences, R sampled rows,
  V vocabulary, H hidden, I intermediate, Hq/Hkv query/KV heads, D head size, Dv value head size.
- A KV cache is [num_blocks, Hkv, block_size, D]: float32, or bfloat16 (expanded to float32 when read).
- A row's (a token's, a sequence's) result depends on that row alone, and not on the number of threads:
  bit-identical alone and in any batch.
- A wrong shape, dtype or index raises ValueError whose text starts with the argument's name.
- Tensors are not differentiated: call under ``paddle.no_grad()``.
- Keyword-only arguments are the CUDA operators' own (see cuda/ops.py): elsewhere they raise ValueError.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import ModuleType

import numpy as _np
import paddle as _paddle
from paddle import Tensor

from fastengine.custom_ops import library as _library
from fastengine.custom_ops import reference as _reference
from fastengine.custom_ops.host_blocks import HostBlocks

OPERATORS = (
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "rotary_write_kv",
    "rotary_write_kv_packed",
    "paged_attention",
    "argmax",
    "sample",
    "apply_penalties",
    "log_softmax_gather",
)


def _choose_backend() -> tuple[ModuleType, _library.Library | None]:
    try:
        loaded = _library.load()
    except _library.LibraryUnavailable as error:
        warnings.warn(f"fastengine runs on its slow reference operators: {error}", RuntimeWarning, stacklevel=3)
        return _reference, None
    from fastengine.custom_ops import compiled

    return compiled, loaded


def _choose_gpu_backend() -> tuple[ModuleType | None, str]:
    """What tensors on a GPU run (None where this Paddle has none of them), and why it is not the compiled operators."""
    from fastengine.custom_ops.cuda import library as cuda_library

    try:
        cuda_library.load()
    except _library.LibraryUnavailable as error:
        if not _paddle.is_compiled_with_cuda():
            return None, str(error)
        warnings.warn(f"fastengine runs on its slow reference operators on the GPU: {error}", RuntimeWarning, stacklevel=3)
        return _reference, str(error)
    from fastengine.custom_ops.cuda import ops

    return ops, ""


_backend, _loaded = _choose_backend()
_gpu_backend, _no_cuda_reason = _choose_gpu_backend()


def _backend_of(tensor: Tensor) -> ModuleType:
    return _backend if _gpu_backend is None or not tensor.place.is_gpu_place() else _gpu_backend


def _cuda_options(backend: ModuleType, **options: object) -> dict[str, object]:
    """Those that were given. Raises ValueError where the backend does not know them."""
    given = {name: value for name, value in options.items() if value is not None}
    if given and backend in (_backend, _reference):
        raise ValueError(f"{next(iter(given))}: only the compiled CUDA operators take it")
    return given


def require_cuda() -> None:
    """Raises LibraryUnavailable, saying why, unless tensors on a GPU run the compiled CUDA operators."""
    if _no_cuda_reason:
        raise _library.LibraryUnavailable(_no_cuda_reason)


def compiled_ops() -> dict[str, str]:
    """What each operator runs on Paddle's current device: its name -> ``cuda``, ``avx512``, ``avx2`` or ``reference``."""
    if _gpu_backend is not None and _paddle.get_device().startswith("gpu"):
        return dict.fromkeys(OPERATORS, "reference" if _gpu_backend is _reference else "cuda")
    return dict.fromkeys(OPERATORS, _loaded.operators_isa if _loaded is not None else "reference")


def set_num_threads(num_threads: int) -> None:
    """How many threads an operator may use, the caller's included (at import: the process's cores).

    The operators' own pool; Paddle's matrix products have another. Workers park when there is nothing
    to do. Raises ValueError below 1.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads: must be at least 1, got {num_threads}")
    if _loaded is not None:
        _loaded.set_num_threads(num_threads)


def copies_between(pools: Sequence[tuple[_np.ndarray, _np.ndarray]]) -> HostBlocks:
    """Copies of blocks between pairs of (source, target) pools, uint8 [num_blocks, bytes of a block] each, in one call for all pairs."""
    return HostBlocks(pools, None if _loaded is None else _loaded.handle)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis (Zhang & Sennrich, 2019).

    x float32 [..., H]; weight float32 [H]. Returns float32 of x's shape.
    """
    return _backend_of(x).rms_norm(x, weight, epsilon)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Adds x to ``residual`` in place and returns rms_norm(residual).

    x, residual float32 [..., H] (residual contiguous); weight float32 [H].
    """
    return _backend_of(x).add_rms_norm(x, residual, weight, epsilon)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half: float32 [T, 2I] -> [T, I] (SwiGLU; Shazeer, 2020)."""
    return _backend_of(gate_up).silu_mul(gate_up)


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
    """Rotates query and key in place (RoPE; Su et al., 2021) and stores key and value in the caches.

    query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv]: float32; query, key and the caches contiguous.
    positions int32 [T]: rows of cos_sin. cos_sin float32 [max_positions, rotary_dim]: cosines, then
    sines; the first rotary_dim <= D values of a head turn, the rest passes through.
    slot_mapping int32 [T]: block * block_size + offset, or -1 for a token that is not stored.
    key_cache [num_blocks, Hkv, block_size, D], value_cache [.., Dv]: float32 or bfloat16.
    ``interleaved`` turns the pairs (2i, 2i+1), else (i, i + rotary_dim / 2).
    """
    _backend_of(query).rotary_write_kv(query, key, value, positions, cos_sin, slot_mapping, key_cache, value_cache, interleaved)


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
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """rotary_write_kv on the packed projection output; returns the rotated query [T, Hq, D].

    qkv float32 [T, Hq * D + Hkv * D + Hkv * Dv], unchanged; D and Dv are the caches'. With q_norm / k_norm
    (float32 [D]) each head of query / key goes through RMSNorm first. The rest as in rotary_write_kv.
    """
    backend = _backend_of(qkv)
    options = _cuda_options(backend, key_scale=key_scale, value_scale=value_scale)
    caches = (slot_mapping, key_cache, value_cache)
    return backend.rotary_write_kv_packed(qkv, num_heads, num_kv_heads, positions, cos_sin, *caches, interleaved, q_norm, k_norm, epsilon, **options)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    plan: Tensor | None = None,
    max_query_tokens: int | None = None,
) -> Tensor:
    """Causal attention of a ragged batch over the paged cache; returns float32 [T, Hq, Dv].

    query float32 [T, Hq, D]; the caches already hold this step's keys and values. Hq is a multiple of Hkv:
    query head h reads KV head h // (Hq // Hkv). block_tables int32 [S, max_blocks]; query_starts int32
    [S + 1]: sequence s owns the query rows query_starts[s] to query_starts[s + 1] - 1; context_lens
    int32 [S]: its tokens in the cache, this step's included. With n query rows, row j of a sequence is
    at position p = context_len - n + j and sees the positions up to p; of these, with sliding_window w > 0,
    the last w only. Scores are query . key * scale. Prefill chunks and decodes mix freely; a sequence may be
    empty. Decode: flash-decoding in pieces of fixed length; prefill: FlashAttention-2.
    """
    backend = _backend_of(query)
    options = _cuda_options(backend, key_scale=key_scale, value_scale=value_scale, sinks=sinks, plan=plan, max_query_tokens=max_query_tokens)
    batch = (block_tables, query_starts, context_lens)
    return backend.paged_attention(query, key_cache, value_cache, *batch, scale, sliding_window, **options)


def argmax(logits: Tensor) -> Tensor:
    """The id of each row's largest logit: float32 [R, V] -> int32 [R]. Ties: the lowest id. NaN counts as -inf."""
    return _backend_of(logits).argmax(logits)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draws one token per row; returns int32 [R].

    logits float32 [R, V] (NaN counts as -inf). temperature float32 [R]: below 1e-5 means argmax, lowest id
    first. Filters, in this order: top_k int32 [R] (0: off) keeps exactly the k largest; top_p float32 [R]
    (1: off) the fewest largest that hold this much of the mass left, at least one; min_p float32 [R]
    (0: off) those with at least min_p times the largest probability. Of equal logits the lower id counts as
    the larger. seeds int64 [R], positions int32 [R] (the sampled token's index in its sequence): the row's
    random number is Philox4x32-10 of the two (``reference.uniform``), and the token is where the running
    sum of the kept probabilities, in order of id, passes it. A row without a finite maximum gives argmax.
    """
    return _backend_of(logits).sample(logits, temperature, top_k, top_p, min_p, seeds, positions)


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
    """Changes logits float32 [R, V] (contiguous) in place.

    token_ids int32 [N] packs every row's known tokens, prompt then output: row r owns row_starts[r] to
    row_starts[r + 1] - 1 (int32 [R + 1]), of which those from output_starts[r] (int32 [R], an index into
    token_ids) on are output. repetition, presence, frequency: float32 [R], neutral at 1, 0, 0.

        repetition   every known token: logit / repetition if positive, else logit * repetition (Keskar et al., 2019)
        frequency    every output token: logit -= frequency * count, presence: logit -= presence
        bias         logits[r, bias_ids[i]] += bias_values[i] for i in bias_starts[r] .. bias_starts[r + 1] - 1

    A bias of -inf bans a token. bias_ids int32 [B], bias_values float32 [B], bias_starts int32 [R + 1].
    Ids outside [0, V), such as placeholders of images, are passed over.
    """
    _backend_of(logits).apply_penalties(
        logits, repetition, presence, frequency, token_ids, row_starts, output_starts, bias_ids, bias_values, bias_starts
    )


def log_softmax_gather(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of chosen tokens and of the k most likely ones, without a [R, V] result.

    logits float32 [R, V]; token_ids int32 [R]; 0 <= k <= V. Returns (logprobs float32 [R]; ranks int32 [R]: 1 +
    how many logits are larger; top_ids int32 [R, k], most likely first, of equals the lowest id; top_logprobs
    float32 [R, k]). A token at -inf has the log-probability -inf.
    """
    return _backend_of(logits).log_softmax_gather(logits, token_ids, k)
