"""The operators in plain numpy: the specification that the compiled ones are tested against.

Written to be read. Arguments, results and errors are those of the functions of the same name in
``fastengine.custom_ops``; arithmetic is in float64 and rounded once at the end, so a difference from a
compiled operator is the compiled operator's. These also run, slowly, where no compiled library is.
"""

from __future__ import annotations

import numpy as np
import paddle
from paddle import Tensor

GREEDY_TEMPERATURE = 1e-5


def _require(holds: bool, argument: str, expected: str) -> None:
    if not holds:
        raise ValueError(f"{argument}: {expected}")


def _read(x: Tensor) -> np.ndarray:
    """The tensor's values as numpy (bfloat16 widened to float32)."""
    return x.astype("float32").numpy() if x.dtype == paddle.bfloat16 else x.numpy()


def _write(target: Tensor, values: np.ndarray) -> None:
    """Overwrites ``target`` in place, in its own dtype."""
    paddle.assign(paddle.to_tensor(values.astype(np.float32)).astype(target.dtype), target)


def _normalized(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def _check_norm(x: Tensor, weight: Tensor) -> None:
    _require(x.dtype == paddle.float32, "x", f"expected float32, got {x.dtype}")
    _require(weight.shape == x.shape[-1:], "weight", f"expected shape {x.shape[-1:]}, got {weight.shape}")


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    _check_norm(x, weight)
    return paddle.to_tensor(_normalized(_read(x), _read(weight), epsilon).astype(np.float32))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    _check_norm(x, weight)
    _require(residual.shape == x.shape, "residual", f"expected the shape of x, got {residual.shape}")
    _write(residual, _read(residual) + _read(x))
    return rms_norm(residual, weight, epsilon)


def silu_mul(gate_up: Tensor) -> Tensor:
    _require(len(gate_up.shape) == 2 and gate_up.shape[1] % 2 == 0, "gate_up", f"expected [T, 2I], got {gate_up.shape}")
    gate, up = np.split(_read(gate_up).astype(np.float64), 2, axis=1)
    # Clipped where e^-gate would overflow a float64; silu is 0 there to float32.
    return paddle.to_tensor((gate / (1.0 + np.exp(-np.maximum(gate, -700.0))) * up).astype(np.float32))


def _rotated(heads: np.ndarray, positions: np.ndarray, cos_sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """heads [T, n, D], of which the first rotary_dim values of each head turn."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions, None, :half].astype(np.float64), cos_sin[positions, None, half:].astype(np.float64)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    out = heads.astype(np.float64)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def _check_rotary(
    shapes: tuple[int, int, int, int, int], positions: Tensor, cos_sin: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor
) -> None:
    num_tokens, num_kv_heads, head_size, value_size, rotary_dim = shapes
    num_blocks, _, block_size, _ = key_cache.shape
    _require(key_cache.shape == [num_blocks, num_kv_heads, block_size, head_size], "key_cache", f"got shape {key_cache.shape}")
    _require(value_cache.shape == [num_blocks, num_kv_heads, block_size, value_size], "value_cache", f"got shape {value_cache.shape}")
    _require(value_cache.dtype == key_cache.dtype, "value_cache", f"expected {key_cache.dtype}, got {value_cache.dtype}")
    _require(rotary_dim % 2 == 0 and rotary_dim <= head_size, "cos_sin", f"expected an even last axis of at most {head_size}, got {rotary_dim}")
    for name, tensor, low, high in (("positions", positions, 0, cos_sin.shape[0]), ("slot_mapping", slot_mapping, -1, num_blocks * block_size)):
        _require(tensor.dtype == paddle.int32, name, f"expected int32, got {tensor.dtype}")
        _require(tensor.shape == [num_tokens], name, f"expected shape [{num_tokens}], got {tensor.shape}")
        values = tensor.numpy()
        _require(bool(((values >= low) & (values < high)).all()), name, f"a value is outside [{low}, {high})")


def _store(cache: Tensor, slots: np.ndarray, heads: np.ndarray) -> None:
    """Writes heads [T, Hkv, D] to their slots of a cache [num_blocks, Hkv, block_size, D]."""
    block_size = cache.shape[2]
    stored, valid = _read(cache), slots >= 0
    stored[slots[valid] // block_size, :, slots[valid] % block_size, :] = heads[valid]
    _write(cache, stored)


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
    _require(len(query.shape) == 3, "query", f"expected [T, Hq, D], got {query.shape}")
    num_tokens, _, head_size = query.shape
    _require(len(key.shape) == 3 and [key.shape[0], key.shape[2]] == [num_tokens, head_size], "key", f"got shape {key.shape}")
    _require(len(value.shape) == 3 and value.shape[:2] == key.shape[:2], "value", f"got shape {value.shape}")
    shapes = (num_tokens, key.shape[1], head_size, value.shape[2], cos_sin.shape[1])
    _check_rotary(shapes, positions, cos_sin, slot_mapping, key_cache, value_cache)
    for heads in (query, key):
        _write(heads, _rotated(_read(heads), positions.numpy(), _read(cos_sin), interleaved))
    _store(key_cache, slot_mapping.numpy(), _read(key))
    _store(value_cache, slot_mapping.numpy(), _read(value))


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
    head_size, value_size = key_cache.shape[3], value_cache.shape[3]
    width = (num_heads + num_kv_heads) * head_size + num_kv_heads * value_size
    _require(len(qkv.shape) == 2 and qkv.shape[1] == width, "qkv", f"expected [T, {width}], got {qkv.shape}")
    values = _read(qkv)
    num_tokens, key_at, value_at = qkv.shape[0], num_heads * head_size, (num_heads + num_kv_heads) * head_size
    query = values[:, :key_at].reshape(num_tokens, num_heads, head_size)
    key = values[:, key_at:value_at].reshape(num_tokens, num_kv_heads, head_size)
    value = values[:, value_at:].reshape(num_tokens, num_kv_heads, value_size)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        _require(norm is None or norm.shape == [head_size], name, f"expected shape [{head_size}]")
    query = query if q_norm is None else _normalized(query, _read(q_norm), epsilon)
    key = key if k_norm is None else _normalized(key, _read(k_norm), epsilon)
    out, keys, stored = (paddle.to_tensor(part.astype(np.float32)) for part in (query, key, value))
    rotary_write_kv(out, keys, stored, positions, cos_sin, slot_mapping, key_cache, value_cache, interleaved)
    return out


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
    _check_attention(query, key_cache, value_cache, block_tables, query_starts, context_lens, sliding_window)
    num_tokens, num_heads, _ = query.shape
    _, num_kv_heads, block_size, value_size = value_cache.shape
    q, tables, starts, lens = _read(query).astype(np.float64), block_tables.numpy(), query_starts.numpy(), context_lens.numpy()
    keys, values = _read(key_cache), _read(value_cache)
    out = np.zeros((num_tokens, num_heads, value_size))
    for s in range(len(lens)):
        length, context = int(starts[s + 1] - starts[s]), int(lens[s])
        if length == 0:
            continue
        queries = np.arange(context - length, context)[:, None]
        first = max(0, context - length - sliding_window + 1) if sliding_window else 0
        seen = np.arange(first, context)
        # Blocks wholly before the window may be freed already: only the visible ones are followed.
        blocks, offsets = tables[s, seen // block_size], seen % block_size
        k = keys[blocks, :, offsets].repeat(num_heads // num_kv_heads, axis=1).astype(np.float64)
        v = values[blocks, :, offsets].repeat(num_heads // num_kv_heads, axis=1).astype(np.float64)
        visible = seen[None, :] <= queries
        if sliding_window:
            visible &= seen[None, :] > queries - sliding_window
        scores = np.einsum("qhd,khd->hqk", q[starts[s] : starts[s + 1]], k) * scale
        scores = np.where(visible[None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[starts[s] : starts[s + 1]] = np.einsum("hqk,khd->qhd", weights, v)
    return paddle.to_tensor(out.astype(np.float32))


def _check_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor, sliding_window: int
) -> None:
    _require(len(query.shape) == 3, "query", f"expected [T, Hq, D], got {query.shape}")
    _require(len(key_cache.shape) == 4 and key_cache.shape[3] == query.shape[2], "key_cache", f"got shape {key_cache.shape}")
    _require(value_cache.shape[:3] == key_cache.shape[:3], "value_cache", f"got shape {value_cache.shape}")
    _require(query.shape[1] % key_cache.shape[1] == 0, "query", f"expected a multiple of {key_cache.shape[1]} heads, got {query.shape[1]}")
    _require(sliding_window >= 0, "sliding_window", "must not be negative")
    for name, tensor in (("block_tables", block_tables), ("query_starts", query_starts), ("context_lens", context_lens)):
        _require(tensor.dtype == paddle.int32, name, f"expected int32, got {tensor.dtype}")
    num_seqs, max_blocks = block_tables.shape
    _require(query_starts.shape == [num_seqs + 1], "query_starts", f"expected shape [{num_seqs + 1}], got {query_starts.shape}")
    _require(context_lens.shape == [num_seqs], "context_lens", f"expected shape [{num_seqs}], got {context_lens.shape}")
    starts, lens, tables = query_starts.numpy(), context_lens.numpy(), block_tables.numpy()
    _check_starts(starts, query.shape[0], "query_starts")
    block_size = key_cache.shape[2]
    for s in range(num_seqs):
        length, context = int(starts[s + 1] - starts[s]), int(lens[s])
        if length == 0:
            continue
        _require(context >= length, "context_lens", "below the sequence's own number of query tokens")
        blocks = -(-context // block_size)
        _require(blocks <= max_blocks, "block_tables", "too narrow for context_lens")
        first = max(0, context - length - sliding_window + 1) // block_size if sliding_window else 0
        used = tables[s, first:blocks]
        _require(bool(((used >= 0) & (used < key_cache.shape[0])).all()), "block_tables", f"a block is outside [0, {key_cache.shape[0]})")


def _check_starts(starts: np.ndarray, total: int, argument: str) -> None:
    _require(int(starts[0]) == 0, argument, "must start at 0")
    _require(bool((np.diff(starts) >= 0).all()), argument, "must not decrease")
    _require(int(starts[-1]) == total, argument, f"must end at {total}")


def _check_logits(logits: Tensor) -> tuple[int, int]:
    _require(len(logits.shape) == 2 and logits.shape[1] > 0, "logits", f"expected [R, V], got {logits.shape}")
    _require(logits.dtype == paddle.float32, "logits", f"expected float32, got {logits.dtype}")
    return logits.shape[0], logits.shape[1]


def argmax(logits: Tensor) -> Tensor:
    _check_logits(logits)
    return paddle.to_tensor(np.where(np.isnan(values := _read(logits)), -np.inf, values).argmax(axis=1).astype(np.int32))


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a seed (int64) and a counter (int32): Philox4x32-10.

    Key: the seed's low and high word. Counter block: (position, 0, 0, 0). Result: words 0 (low) and 1
    (high) of the block as a 64-bit number, shifted right by 11, times 2^-53. Salmon et al., SC 2011.
    """
    word = 0xFFFFFFFF
    counter = [position & word, 0, 0, 0]
    key = [seed & word, (seed >> 32) & word]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(second >> 32) ^ counter[1] ^ key[0], second & word, (first >> 32) ^ counter[3] ^ key[1], first & word]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return float(((counter[1] << 32 | counter[0]) >> 11) * 2.0**-53)


def kept_weights(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """A row's unnormalised probabilities e^((logit - max) / temperature), 0 for the filtered ones.

    In this order: temperature; the top_k largest; the fewest largest of those that hold top_p of their
    mass (at least one); those with at least min_p times the largest probability. Of equal
    logits the lower id counts as the larger.
    """
    row = np.where(np.isnan(logits), -np.inf, logits).astype(np.float32)
    inverse = np.float32(1.0) / np.float32(temperature)
    scaled = ((row - row.max()) * inverse).astype(np.float64)
    weights = np.where(scaled > -87.0, np.exp(np.maximum(scaled, -87.0)), 0.0)
    order = np.lexsort((np.arange(len(row)), -scaled))
    if 0 < top_k < len(row):
        order = order[:top_k]
    if top_p < 1.0:
        mass = np.cumsum(weights[order])
        order = order[: int(np.searchsorted(mass, float(np.float32(top_p)) * mass[-1], side="left")) + 1]
    if min_p > 0.0:
        order = order[scaled[order] >= np.log(min(float(min_p), 1.0))]
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    return kept


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    num_rows, _ = _check_logits(logits)
    dtypes = (paddle.float32, paddle.int32, paddle.float32, paddle.float32, paddle.int64, paddle.int32)
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    for name, tensor, dtype in zip(names, (temperature, top_k, top_p, min_p, seeds, positions), dtypes, strict=True):
        _require(tensor.dtype == dtype, name, f"expected {dtype}, got {tensor.dtype}")
        _require(tensor.shape == [num_rows], name, f"expected shape [{num_rows}], got {tensor.shape}")
    token_ids = argmax(logits).numpy()
    rows, temperatures = _read(logits), temperature.numpy()
    for r in range(num_rows):
        if not temperatures[r] >= GREEDY_TEMPERATURE or not np.isfinite(rows[r][token_ids[r]]):
            continue
        kept = kept_weights(rows[r], temperatures[r], int(top_k.numpy()[r]), float(top_p.numpy()[r]), float(min_p.numpy()[r]))
        mass = np.cumsum(kept)
        picked = int(np.searchsorted(mass, uniform(int(seeds.numpy()[r]), int(positions.numpy()[r])) * mass[-1], side="right"))
        token_ids[r] = min(picked, int(np.flatnonzero(kept)[-1]))
    return paddle.to_tensor(token_ids)


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
    num_rows, vocab_size = _check_logits(logits)
    for name, tensor in (("repetition", repetition), ("presence", presence), ("frequency", frequency), ("output_starts", output_starts)):
        _require(tensor.shape == [num_rows], name, f"expected shape [{num_rows}], got {tensor.shape}")
    _require(bias_values.shape == bias_ids.shape, "bias_values", f"expected shape {bias_ids.shape}, got {bias_values.shape}")
    ids, starts, outputs = token_ids.numpy(), row_starts.numpy(), output_starts.numpy()
    biased, added, bounds = bias_ids.numpy(), bias_values.numpy(), bias_starts.numpy()
    _require(starts.shape == (num_rows + 1,), "row_starts", f"expected shape [{num_rows + 1}]")
    _require(bounds.shape == (num_rows + 1,), "bias_starts", f"expected shape [{num_rows + 1}]")
    _check_starts(starts, len(ids), "row_starts")
    _check_starts(bounds, len(biased), "bias_starts")
    _require(bool(((outputs >= starts[:-1]) & (outputs <= starts[1:])).all()), "output_starts", "outside its row of token_ids")
    _require(bool((repetition.numpy() > 0).all()), "repetition", "must be positive")
    rows = _read(logits).copy()
    for r in range(num_rows):
        row, factor = rows[r], repetition.numpy()[r]
        known = ids[starts[r] : starts[r + 1]]
        seen = np.unique(known[(known >= 0) & (known < vocab_size)])
        row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
        output = ids[outputs[r] : starts[r + 1]]
        counts = np.bincount(output[(output >= 0) & (output < vocab_size)], minlength=vocab_size)
        emitted = counts > 0
        row[emitted] -= frequency.numpy()[r] * counts[emitted] + presence.numpy()[r]
        for token_id, bias in zip(biased[bounds[r] : bounds[r + 1]], added[bounds[r] : bounds[r + 1]], strict=True):
            if 0 <= token_id < vocab_size:
                row[token_id] += bias
    _write(logits, rows)


def log_softmax_gather(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, vocab_size = _check_logits(logits)
    _require(0 <= k <= vocab_size, "k", f"expected 0 to {vocab_size}, got {k}")
    _require(token_ids.shape == [num_rows], "token_ids", f"expected shape [{num_rows}], got {token_ids.shape}")
    ids = token_ids.numpy()
    _require(bool(((ids >= 0) & (ids < vocab_size)).all()), "token_ids", f"a token is outside [0, {vocab_size})")
    rows = np.where(np.isnan(values := _read(logits)), -np.inf, values).astype(np.float64)
    largest = rows.max(axis=1, keepdims=True, initial=-np.inf)
    base = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore"):
        log_sums = np.log(np.exp(rows - base).sum(axis=1, keepdims=True))
    logprobs = np.where(rows == -np.inf, -np.inf, rows - base - np.where(np.isfinite(log_sums), log_sums, 0.0))
    chosen = np.take_along_axis(rows, ids[:, None].astype(np.int64), axis=1)
    ranks = 1 + (rows > chosen).sum(axis=1)
    top = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    picked = np.take_along_axis(logprobs, ids[:, None].astype(np.int64), axis=1)[:, 0]
    results = (picked.astype(np.float32), ranks.astype(np.int32), top.astype(np.int32), np.take_along_axis(logprobs, top, axis=1).astype(np.float32))
    first, second, third, fourth = (paddle.to_tensor(result) for result in results)
    return first, second, third, fourth
