"""The operators for tensors on a GPU. Import it after :func:`library.load`.

The functions of ``fastengine.custom_ops`` have the same names and leading parameters here, and mean the same, with
these differences:

- Activations are bfloat16 or float16; norms, rotary and activation take float32 too. Results have their dtype.
- A cache has the activations' dtype, or is int8 (then key_scale and value_scale, float32 [num_blocks, Hkv,
  block_size], are needed) or fp8 (e4m3; a uint8 or float8_e4m3fn tensor, scales optional).
- Block sizes are powers of two from 8 on. Head sizes: multiples of 16 up to 256 to decode; with several query rows
  64, 96, 128, 192, 256, and 192 with values of 128.
- Values of indices are not checked: they lie in device memory.

The others exist on the GPU alone. Nothing waits for the device, and all may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddle import Tensor

from fastengine.custom_ops.compiled import _require_contiguous, _run

# Of paged_attention, whatever the number of query rows.
HEAD_SIZES = (64, 96, 128, 192, 256)
# Prefill by wgmma where card, sizes and cache have it. Off until scripts/gpu_check.py has found it right on a card.
WIDE_PREFILL = False


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return _run("fastengine_cuda_rms_norm", x, weight, epsilon)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    _require_contiguous(residual=residual)
    return _run("fastengine_cuda_add_rms_norm", x, residual, weight, epsilon)[1]


def silu_mul(gate_up: Tensor) -> Tensor:
    return _run("fastengine_cuda_silu_mul", gate_up)[0]


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
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    _require_contiguous(query=query, key=key, key_cache=key_cache, value_cache=value_cache)
    caches = (key_cache, value_cache, key_scale, value_scale)
    _run("fastengine_cuda_rotary_write_kv", query, key, value, positions, cos_sin, slot_mapping, *caches, interleaved)


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
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    _require_contiguous(key_cache=key_cache, value_cache=value_cache)
    tensors = (qkv, positions, cos_sin, slot_mapping, key_cache, value_cache, q_norm, k_norm, key_scale, value_scale)
    return _run("fastengine_cuda_rotary_write_kv_packed", *tensors, num_heads, num_kv_heads, interleaved, epsilon)[-1]


def attention_plan(
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    sliding_window: int = 0,
) -> Tensor:
    """Cuts a batch into pieces of work: int32, opaque. One plan serves all layers of a step with these sizes.

    num_tokens: rows of the query. For mla_decode num_kv_heads is 1.
    """
    sizes = (num_tokens, num_heads, num_kv_heads, block_size, sliding_window)
    return _run("fastengine_cuda_attention_plan", block_tables, query_starts, context_lens, *sizes)[0]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    plan: Tensor | None = None,
    max_query_tokens: int = 0,
    wide_prefill: bool = WIDE_PREFILL,
) -> Tensor:
    """``sinks`` float32 [Hq]: a further score of each row, of a value that is zero. ``plan``: of attention_plan,
    made on the way if missing. ``max_query_tokens``: the longest sequence's query rows, if known (0: not); 1
    leaves the prefill kernel out. ``wide_prefill``: by wgmma on sm_90, for head sizes 64 and 128 over a cache of 16
    bits; elsewhere it changes nothing."""
    batch = (block_tables, query_starts, context_lens)
    options = (key_scale, value_scale, sinks, plan)
    return _run(
        "fastengine_cuda_paged_attention", query, key_cache, value_cache, *batch, *options, scale, sliding_window, max_query_tokens, wide_prefill
    )[0]


def mla_decode(
    query: Tensor,
    latent_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    value_size: int = 512,
    plan: Tensor | None = None,
) -> Tensor:
    """Attention in the latent space (multi-head latent attention; DeepSeek-V2, 2024); returns [T, Hq, value_size].

    query [T, Hq, 576] and latent_cache [num_blocks, block_size, 576]: bfloat16 or float16, 512 latent values, then
    the rotary part. For sequences of one query row; the rows of others are left unwritten.
    """
    return _run("fastengine_cuda_mla_decode", query, latent_cache, block_tables, query_starts, context_lens, plan, scale, value_size)[0]


def argmax(logits: Tensor) -> Tensor:
    return _run("fastengine_cuda_argmax", logits)[0]


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    return _run("fastengine_cuda_sample", logits, temperature, top_k, top_p, min_p, seeds, positions)[0]


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
    _run("fastengine_cuda_apply_penalties", logits, repetition, presence, frequency, *packed)


def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Sets logits[rows[i], v] to -inf where bit v % 32 of mask[i, v / 32] is 0.

    logits float32 [R, V]; mask int32 [M, ceil(V / 32)]; rows int32 [M].
    """
    _require_contiguous(logits=logits)
    _run("fastengine_cuda_apply_bitmask", logits, mask, rows)


def log_softmax_gather(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs, ranks, top_ids, top_logprobs = _run("fastengine_cuda_log_softmax_gather", logits, token_ids, k)
    return logprobs, ranks, top_ids, top_logprobs


def copy_blocks(sources: Sequence[Tensor], targets: Sequence[Tensor], source_ids: Tensor, target_ids: Tensor) -> None:
    """targets[p][target_ids[i]] = sources[p][source_ids[i]] for every pool p.

    Pools [num_blocks, ...] of blocks of one size, a multiple of 16 bytes; ids int32 on the GPU.
    """
    for target in targets:
        _require_contiguous(targets=target)
    _run("fastengine_cuda_copy_blocks", list(sources), list(targets), source_ids, target_ids)


def moe_gate(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    sigmoid: bool = False,
    group_by_top2: bool = False,
    renormalize: bool = True,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first (int32 [T, top_k]), and their weights (float32 [T, top_k]).

    logits float32 [T, E]; scores are their softmax, or sigmoid. bias float32 [E] is added for choosing only. Experts
    outside the best top_groups of num_groups are out; a group's score is its best, or the sum of its two best.
    """
    choice = (top_k, num_groups, top_groups, sigmoid, group_by_top2, renormalize, scaling)
    expert_ids, weights = _run("fastengine_cuda_moe_gate", logits, bias, *choice)
    return expert_ids, weights


def moe_permute(expert_ids: Tensor, first_expert: int, num_experts: int, align: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts (token, choice) pairs by expert, those of first_expert .. first_expert + num_experts - 1.

    expert_ids int32 [T, top_k]. Returns int32: expert_starts [num_experts + 1], each expert's first row, a multiple of
    align; pair_of_row [rows], -1 where a row fills up; row_of_pair [T, top_k], -1 for other experts.
    """
    expert_starts, pair_of_row, row_of_pair = _run("fastengine_cuda_moe_permute", expert_ids, first_expert, num_experts, align)
    return expert_starts, pair_of_row, row_of_pair


def moe_gather(x: Tensor, pair_of_row: Tensor, top_k: int) -> Tensor:
    """x[pair_of_row[r] / top_k] for every row, zeros where that is -1: [T, H] -> [rows, H]."""
    return _run("fastengine_cuda_moe_gather", x, pair_of_row, top_k)[0]


def moe_combine(rows: Tensor, row_of_pair: Tensor, weights: Tensor, base: Tensor | None = None) -> Tensor:
    """base[t] + the sum over j of weights[t, j] * rows[row_of_pair[t, j]], in order of j: [T, H]."""
    return _run("fastengine_cuda_moe_combine", rows, row_of_pair, weights, base)[0]


def quantized_gemm(
    x: Tensor, weight: Tensor, scales: Tensor, bits: int, group_size: int, zeros: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """x times the transpose of (q - zeros) * scales, plus bias; for few rows: [R, K] -> [R, N].

    weight uint8: ``linear.pack_weight`` of q [N, K], 4 or 8 bits. scales float32 and zeros uint8 [K / group_size, N];
    without zeros, 8 or 128 is subtracted. bias [N] in the dtype of x. K is a multiple of 64, N of 32, group_size of 32.
    """
    return _run("fastengine_cuda_quantized_gemm", x, weight, scales, zeros, bias, bits, group_size)[0]
