"""Expert choice, permutation and combination against numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fastengine.custom_ops.cuda.abi import DType
from tests.custom_ops.cuda.memory import Kernels, filled, poisoned, rounded


@dataclass(frozen=True)
class Gate:
    experts: int
    top_k: int
    groups: int = 1
    top_groups: int = 1
    sigmoid: bool = False
    biased: bool = False
    by_top2: bool = False
    renormalize: bool = True
    scaling: float = 1.0


GATES = [
    Gate(8, 2),
    Gate(60, 4, renormalize=False),
    Gate(128, 8),
    Gate(160, 6, groups=8, top_groups=3, renormalize=False, scaling=16.0),
    Gate(256, 8, groups=8, top_groups=4, sigmoid=True, biased=True, by_top2=True, scaling=2.5),
    Gate(3, 3, sigmoid=True),
]


def chosen(logits: np.ndarray, bias: np.ndarray | None, gate: Gate) -> tuple[np.ndarray, np.ndarray]:
    """One token's experts, the best first, and their weights."""
    exponentials = np.exp(logits - logits.max())
    weights = 1 / (1 + np.exp(-logits)) if gate.sigmoid else exponentials / exponentials.sum()
    scores = weights + (bias if bias is not None else 0)
    if gate.groups > 1:
        grouped = np.sort(scores.reshape(gate.groups, -1), axis=1)[:, ::-1]
        by_group = grouped[:, :2].sum(axis=1) if gate.by_top2 else grouped[:, 0]
        kept = np.argsort(-by_group, kind="stable")[: gate.top_groups]
        out = ~np.isin(np.arange(gate.experts) // (gate.experts // gate.groups), kept)
        scores = np.where(out, -np.inf, scores)
    ids = np.argsort(-scores, kind="stable")[: gate.top_k]
    return ids, weights[ids] / (weights[ids].sum() if gate.renormalize else 1) * gate.scaling


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_gate(cuda: Kernels, rng: np.random.Generator, gate: Gate) -> None:
    tokens = 9
    logits = filled(rng.normal(size=(tokens, gate.experts)) * 2)
    bias = filled(rng.normal(size=gate.experts) * 0.2) if gate.biased else None
    ids, weights = poisoned((tokens, gate.top_k), "int32"), poisoned((tokens, gate.top_k))
    cuda.call(
        "moe_gate",
        logits=logits,
        bias=bias,
        expert_ids=ids,
        weights=weights,
        num_tokens=tokens,
        num_experts=gate.experts,
        top_k=gate.top_k,
        num_groups=gate.groups,
        top_groups=gate.top_groups,
        sigmoid=int(gate.sigmoid),
        group_by_top2=int(gate.by_top2),
        renormalize=int(gate.renormalize),
        scaling=gate.scaling,
    )
    for t in range(tokens):
        expected_ids, expected_weights = chosen(logits.values[t], bias.values if bias else None, gate)
        np.testing.assert_array_equal(ids.stored[t], expected_ids)
        np.testing.assert_allclose(weights.stored[t], expected_weights, rtol=1e-5)


def test_gate_prefers_the_lower_of_equal_experts(cuda: Kernels) -> None:
    ids, weights = poisoned((1, 5), "int32"), poisoned((1, 5))
    flags = {"num_groups": 1, "top_groups": 1, "sigmoid": 0, "group_by_top2": 0, "renormalize": 1, "scaling": 1.0}
    logits = filled(np.zeros((1, 70)))
    cuda.call("moe_gate", logits=logits, bias=None, expert_ids=ids, weights=weights, num_tokens=1, num_experts=70, top_k=5, **flags)
    assert ids.stored.tolist() == [[0, 1, 2, 3, 4]]
    np.testing.assert_allclose(weights.stored, 0.2, rtol=1e-6)


@pytest.mark.parametrize(("first_expert", "local", "align"), [(0, 10, 1), (4, 3, 16), (0, 10, 8)])
@pytest.mark.parametrize("pairs", [0, 5, 400])
def test_permute(cuda: Kernels, rng: np.random.Generator, first_expert: int, local: int, align: int, pairs: int) -> None:
    ids = filled(rng.integers(0, 10, pairs), "int32")
    max_rows = pairs + local * align
    starts, pair_of_row, row_of_pair = poisoned((local + 1,), "int32"), poisoned((max_rows,), "int32"), poisoned((pairs,), "int32")
    sizes = {"num_pairs": pairs, "first_expert": first_expert, "num_experts": local, "align": align, "max_rows": max_rows}
    pair_of_row.stored[...] = 77
    cuda.call("moe_permute", expert_ids=ids, expert_starts=starts, pair_of_row=pair_of_row, row_of_pair=row_of_pair, **sizes)
    expected_rows = np.full(max_rows, -1)
    expected_pairs = np.full(pairs, -1)
    row = 0
    for e in range(local):
        assert starts.stored[e] == row
        mine = np.flatnonzero(ids.stored == first_expert + e)
        expected_rows[row : row + len(mine)] = mine
        expected_pairs[mine] = np.arange(row, row + len(mine))
        row += -(-len(mine) // align) * align
    assert starts.stored[local] == row
    np.testing.assert_array_equal(pair_of_row.stored, expected_rows)
    np.testing.assert_array_equal(row_of_pair.stored, expected_pairs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("with_base", [False, True])
def test_gather_and_combine(cuda: Kernels, rng: np.random.Generator, dtype: str, with_base: bool) -> None:
    tokens, top_k, size = 5, 3, 1096
    x, code = filled(rng.normal(size=(tokens, size)), dtype), getattr(DType, dtype)
    pair_of_row = filled(np.array([14, -1, 0, 3, 7, -1, 1]), "int32")
    rows = poisoned((7, size), dtype)
    cuda.call("moe_gather", x=x, pair_of_row=pair_of_row, rows=rows, num_rows=7, row_size=size, top_k=top_k, dtype=code)
    for r, pair in enumerate(pair_of_row.stored):
        np.testing.assert_array_equal(rows.values[r], x.values[pair // top_k] if pair >= 0 else 0)
    row_of_pair = filled(rng.integers(-1, 7, tokens * top_k), "int32")
    weights, base = filled(rng.random((tokens, top_k))), filled(rng.normal(size=(tokens, size)), dtype)
    out = poisoned((tokens, size), dtype)
    expected = base.values.copy() if with_base else np.zeros((tokens, size))
    for pair, row in enumerate(row_of_pair.stored):
        if row >= 0:
            expected[pair // top_k] += weights.values.reshape(-1)[pair] * rows.values[row]
    sizes = {"num_tokens": tokens, "row_size": size, "top_k": top_k, "dtype": code}
    cuda.call("moe_combine", rows=rows, base=base if with_base else None, row_of_pair=row_of_pair, weights=weights, out=out, **sizes)
    tolerance = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(out.values, rounded(expected, dtype), rtol=tolerance, atol=1e-5)
