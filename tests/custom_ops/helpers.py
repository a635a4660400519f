"""Small makers of inputs, and comparisons, shared by the operators' tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor


def tensor(values: object, dtype: str = "float32") -> Tensor:
    """A tensor with these values; bfloat16 is rounded from float32."""
    if dtype == "bfloat16":
        return paddle.to_tensor(np.asarray(values, dtype=np.float32)).astype(dtype)
    return paddle.to_tensor(np.asarray(values, dtype=dtype))


def values(x: Tensor) -> np.ndarray:
    return x.astype("float32").numpy() if x.dtype == paddle.bfloat16 else x.numpy()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Same shape and dtype, no NaN, and within ``tolerance`` of the largest expected magnitude."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    a, b = values(actual), values(expected)
    assert not np.isnan(a).any()
    if a.size:
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max())))


def assert_identical(actual: Tensor, expected: Tensor) -> None:
    """Bit for bit the same."""
    np.testing.assert_array_equal(values(actual), values(expected))


@dataclass(frozen=True)
class Heads:
    """The sizes of one attention layer."""

    query: int
    kv: int
    size: int
    value_size: int


@dataclass(frozen=True)
class Batch:
    """A ragged batch over a paged cache, with every block in a random place."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor

    def args(self) -> tuple[Tensor, ...]:
        return (self.query, self.key_cache, self.value_cache, self.block_tables, self.query_starts, self.context_lens)

    def only(self, seq: int) -> Batch:
        """The same caches, with one sequence alone."""
        begin, end = self.query_starts.numpy()[seq : seq + 2]
        return Batch(
            self.query[int(begin) : int(end)].clone(),
            self.key_cache,
            self.value_cache,
            tensor(self.block_tables.numpy()[seq : seq + 1], "int32"),
            tensor([0, end - begin], "int32"),
            tensor(self.context_lens.numpy()[seq : seq + 1], "int32"),
        )


def make_batch(
    rng: np.random.Generator, heads: Heads, block_size: int, query_lens: list[int], context_lens: list[int], dtype: str = "float32"
) -> Batch:
    blocks = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(blocks) + 3
    order = rng.permutation(num_blocks)
    # Unused entries point far outside: following one would be an error.
    tables = np.full((len(blocks), max([*blocks, 1])), 2**30)
    taken = 0
    for seq, count in enumerate(blocks):
        tables[seq, :count] = order[taken : taken + count]
        taken += count
    keys = rng.normal(size=(num_blocks, heads.kv, block_size, heads.size))
    stored = rng.normal(size=(num_blocks, heads.kv, block_size, heads.value_size))
    # What no sequence owns is poison: reading it, even with weight 0, shows.
    keys[order[taken:]] = stored[order[taken:]] = np.nan
    for seq, context in enumerate(context_lens):
        if context % block_size:
            last = tables[seq, context // block_size]
            keys[last, :, context % block_size :] = stored[last, :, context % block_size :] = np.nan
    return Batch(
        tensor(rng.normal(size=(sum(query_lens), heads.query, heads.size))),
        tensor(keys, dtype),
        tensor(stored, dtype),
        tensor(tables, "int32"),
        tensor(np.concatenate([[0], np.cumsum(query_lens)]), "int32"),
        tensor(context_lens, "int32"),
    )
