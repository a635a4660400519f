"""Mixture of experts around the expert products, products with quantized weights, and the fragment probe."""

from __future__ import annotations

import numpy as np

from ..linear import pack_weight
from .arrays import encode, rounded
from .workload import ROUNDING, Bench, Workload, code, require_close, require_equal


def moe_gate(bench: Bench, tokens: int, experts: int, top_k: int, groups: int, top_groups: int) -> Workload:
    memory = bench.memory
    logits, bias = memory.random((tokens, experts), "float32"), memory.random((experts,), "float32", 0.1)
    ids, weights = memory.poisoned((tokens, top_k), "int32"), memory.poisoned((tokens, top_k))
    choice = {"num_groups": groups, "top_groups": top_groups, "sigmoid": 1, "group_by_top2": 1, "renormalize": 1, "scaling": 2.5}

    def launch() -> None:
        sizes = {"num_tokens": tokens, "num_experts": experts, "top_k": top_k}
        bench.call("moe_gate", logits=logits, bias=bias, expert_ids=ids, weights=weights, **sizes, **choice)

    def check() -> None:
        score = 1 / (1 + np.exp(-logits.values))
        chosen_by = (score + bias.values).reshape(tokens, groups, -1)
        of_group = np.sort(chosen_by, axis=2)[:, :, -2:].sum(axis=2)
        out = np.argsort(-of_group, axis=1, kind="stable")[:, top_groups:]
        np.put_along_axis(chosen_by, out[:, :, None], -np.inf, axis=1)
        order = np.argsort(-chosen_by.reshape(tokens, experts), axis=1, kind="stable")[:, :top_k]
        mine = np.take_along_axis(score, order, axis=1)
        # Scores closer than float32 resolves may be chosen in the other order.
        expected = 2.5 * mine / mine.sum(axis=1, keepdims=True)
        same = (ids.stored == order).all(axis=1)
        require_close("expert_ids", np.array([same.mean()]), np.ones(1), 0.0, 0.002)
        require_close("weights", weights.values[same], expected[same], 1e-4, 1e-5)

    return Workload(launch, check, logits.num_bytes)


def moe_permute(bench: Bench, tokens: int, experts: int, top_k: int, align: int) -> Workload:
    memory, pairs = bench.memory, tokens * top_k
    given = bench.rng.integers(0, experts, pairs)
    rows = pairs + experts * (align - 1)
    ids, starts = memory.filled(given, "int32"), memory.poisoned((experts + 1,), "int32")
    pair_of_row, row_of_pair = memory.poisoned((rows,), "int32"), memory.poisoned((pairs,), "int32")

    def launch() -> None:
        outputs = {"expert_starts": starts, "pair_of_row": pair_of_row, "row_of_pair": row_of_pair}
        sizes = {"num_pairs": pairs, "first_expert": 0, "num_experts": experts, "align": align, "max_rows": rows}
        bench.call("moe_permute", expert_ids=ids, **outputs, **sizes)

    def check() -> None:
        counts = np.bincount(given, minlength=experts)
        begin = np.concatenate([[0], np.cumsum(-(-counts // align) * align)])
        order = np.argsort(given, kind="stable")
        place = np.empty(pairs, np.int64)
        place[order] = begin[given[order]] + np.arange(pairs) - np.concatenate([[0], np.cumsum(counts)])[given[order]]
        expected = np.full(rows, -1)
        expected[place] = np.arange(pairs)
        require_equal("expert_starts", starts.stored, begin)
        require_equal("row_of_pair", row_of_pair.stored, place)
        require_equal("pair_of_row", pair_of_row.stored, expected)

    return Workload(launch, check, 4 * (2 * pairs + rows))


def moe_gather(bench: Bench, tokens: int, top_k: int, size: int, dtype: str) -> Workload:
    memory, pairs = bench.memory, tokens * top_k
    pair_of_row = np.where(bench.rng.random(pairs) < 0.1, -1, bench.rng.permutation(pairs))
    x, order, rows = memory.random((tokens, size), dtype), memory.filled(pair_of_row, "int32"), memory.poisoned((pairs, size), dtype)

    def launch() -> None:
        bench.call("moe_gather", x=x, pair_of_row=order, rows=rows, num_rows=pairs, row_size=size, top_k=top_k, dtype=code(dtype))

    def check() -> None:
        require_equal("rows", rows.values, np.where(pair_of_row[:, None] < 0, 0.0, x.values[pair_of_row // top_k]))

    return Workload(launch, check, x.num_bytes + rows.num_bytes, target=0.85)


def moe_combine(bench: Bench, tokens: int, top_k: int, size: int, dtype: str) -> Workload:
    memory, pairs = bench.memory, tokens * top_k
    row_of_pair = bench.rng.permutation(pairs)
    row_of_pair[:: 2 * top_k + 1] = -1
    rows, base, order = memory.random((pairs, size), dtype), memory.random((tokens, size), dtype), memory.filled(row_of_pair, "int32")
    weights, out = memory.random((tokens, top_k), "float32"), memory.poisoned((tokens, size), dtype)

    def launch() -> None:
        tensors = {"rows": rows, "base": base, "row_of_pair": order, "weights": weights, "out": out}
        bench.call("moe_combine", **tensors, num_tokens=tokens, row_size=size, top_k=top_k, dtype=code(dtype))

    def check() -> None:
        used = weights.values * (row_of_pair >= 0).reshape(tokens, top_k)
        expected = base.values + (rows.values[row_of_pair].reshape(tokens, top_k, size) * used[..., None]).sum(axis=1)
        require_close("out", out.values, expected, ROUNDING[dtype], 1e-4)

    return Workload(launch, check, rows.num_bytes + base.num_bytes + out.num_bytes, target=0.85)


def quantized_gemm(bench: Bench, rows: int, in_size: int, out_size: int, bits: int, group: int, dtype: str) -> Workload:
    memory, rng = bench.memory, bench.rng
    quantized = rng.integers(0, 2**bits, (out_size, in_size), dtype=np.uint8)
    zero = rng.integers(0, 2**bits, (in_size // group, out_size), dtype=np.uint8)
    x, weight = memory.random((rows, in_size), dtype), memory.filled(pack_weight(quantized, bits), "uint8")
    scales, zeros = memory.filled(rng.uniform(0.5, 2, zero.shape)), memory.filled(zero, "uint8")
    bias, out = memory.random((out_size,), dtype), memory.poisoned((rows, out_size), dtype)

    def launch() -> None:
        tensors = {"x": x, "weight": weight, "scales": scales, "zeros": zeros, "bias": bias, "out": out}
        sizes = {"num_rows": rows, "in_size": in_size, "out_size": out_size, "group_size": group, "bits": bits}
        bench.call("quantized_gemm", **tensors, **sizes, dtype=code(dtype))

    def check() -> None:
        full = (quantized - zero.repeat(group, axis=0).T.astype(np.float64)) * scales.values.repeat(group, axis=0).T
        expected = x.values @ full.T + bias.values
        require_close("out", out.values, expected, ROUNDING[dtype], 4e-6 * float(np.abs(expected).max()))

    read = weight.num_bytes + scales.num_bytes + zeros.num_bytes + x.num_bytes + out.num_bytes
    return Workload(launch, check, read, 2 * rows * in_size * out_size, target=0.80 if rows <= 8 else 0.0)


def fragment_probe(bench: Bench, dtype: str, transposed: bool) -> Workload:
    """One product of 16 x 16 by 16 x 8 and one load of four matrices, with every lane's part as the PTX manual has it."""
    memory, rng = bench.memory, bench.rng
    a, b, c = rounded(rng.normal(size=(16, 16)), dtype), rounded(rng.normal(size=(16, 8)), dtype), rng.normal(size=(16, 8))
    lane, i8, i4 = np.arange(32)[:, None], np.arange(8)[None], np.arange(4)[None]
    lanes_a = a[lane // 4 + 8 * (i8 // 2 % 2), lane % 4 * 2 + i8 % 2 + 8 * (i8 // 4)]
    lanes_b = b[lane % 4 * 2 + i4 % 2 + 8 * (i4 // 2), lane // 4]
    place = (lane // 4 + 8 * (i4 // 2), lane % 4 * 2 + i4 % 2)
    matrices = rng.permutation(4 * 64).reshape(4, 8, 8).astype(np.uint16)
    packed = [memory.upload(encode(part, dtype).view(np.int32), "int32") for part in (lanes_a, lanes_b)]
    sums, loaded = memory.filled(c[place]), memory.poisoned((32, 4), "int32")
    bits = memory.upload(matrices.view(np.int16), "int16")

    def launch() -> None:
        bench.call("fragment_probe", a=packed[0], b=packed[1], matrices=bits, d=sums, loaded=loaded, dtype=code(dtype), transposed=int(transposed))

    def check() -> None:
        require_close("d", sums.values, (a @ b + c)[place], 1e-5, 1e-5)
        seen = matrices.transpose(0, 2, 1) if transposed else matrices
        require_equal("loaded", loaded.stored.view(np.uint16), seen[i8 // 2, lane // 4, 2 * (lane % 4) + i8 % 2])

    return Workload(launch, check, 2048)
