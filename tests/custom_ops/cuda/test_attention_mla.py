"""Decode attention over a latent cache (tensor-core instructions emulated) against float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from fastengine.custom_ops.cuda.abi import DType
from tests.custom_ops.cuda.attention_case import TOLERANCE
from tests.custom_ops.cuda.memory import Kernels, decode, encode, filled, poisoned, poisoned_from

SIZE, VALUE_SIZE = 576, 512


class LatentCase:
    """Sequences with ``lengths`` query rows over ``contexts`` tokens; only those with one row are attended to."""

    def __init__(
        self, rng: np.random.Generator, heads: int, block_size: int, dtype: str, lengths: list[int], contexts: list[int], first_block: int = 0
    ):
        self.heads, self.block_size, self.dtype, self.lengths, self.contexts = heads, block_size, dtype, lengths, contexts
        blocks = [-(-context // block_size) for context in contexts]
        self.max_blocks = max(blocks) + 1
        tables = np.full((len(contexts), self.max_blocks), 10**8)
        free = list(first_block + rng.permutation(sum(blocks) + 1))
        self.cache = poisoned_from(first_block, (first_block + len(free), block_size, SIZE), dtype)
        self.latent = []
        for seq, context in enumerate(contexts):
            tables[seq, : blocks[seq]] = [free.pop() for _ in range(blocks[seq])]
            seen = np.arange(context)
            self.cache.stored[tables[seq, seen // block_size], seen % block_size] = encode(rng.normal(size=(context, SIZE)), dtype)
            self.latent.append(decode(self.cache.stored[tables[seq, seen // block_size], seen % block_size], dtype))
        self.tables = filled(tables, "int32")
        self.starts = filled(np.cumsum([0, *lengths]), "int32")
        self.context_lens = filled(np.array(contexts), "int32")
        self.query = filled(rng.normal(size=(sum(lengths), heads, SIZE)), dtype)

    def run(self, cuda: Kernels) -> np.ndarray:
        sizes = (ctypes.c_int64 * 2)()
        seqs, tokens = len(self.lengths), sum(self.lengths)
        shape = {"num_seqs": seqs, "num_tokens": tokens, "num_heads": self.heads, "num_kv_heads": 1}
        pages = {"max_blocks": self.max_blocks, "block_size": self.block_size, "value_size": VALUE_SIZE}
        places = {"plan_ints": ctypes.addressof(sizes), "partial_floats": ctypes.addressof(sizes) + 8}
        cuda.call("attention_workspace", **shape, **pages, **places)
        plan, partials, out = poisoned((sizes[0],), "int32"), poisoned((sizes[1],)), poisoned((tokens, self.heads, VALUE_SIZE), self.dtype)
        batch = {"query_starts": self.starts, "context_lens": self.context_lens, "plan": plan, "sliding_window": 0, **shape}
        cuda.call("attention_plan", **batch)
        unused = dict.fromkeys(("value_cache", "key_scale", "value_scale", "sinks"))
        tensors = {"query": self.query, "key_cache": self.cache, "block_tables": self.tables, "partials": partials, "out": out}
        types = {
            "dtype": getattr(DType, self.dtype),
            "cache_dtype": getattr(DType, self.dtype),
            "max_query_tokens": 1,
            "wide_prefill": 0,
            "scale": SIZE**-0.5,
        }
        cuda.call("mla_decode", **batch, **pages, **unused, **tensors, **types, query_stride=self.heads * SIZE, head_size=SIZE)
        return out.values

    def assert_right(self, cuda: Kernels) -> None:
        out = self.run(cuda)
        for row, length, latent in zip(self.starts.stored, self.lengths, self.latent, strict=False):
            if length != 1:
                assert np.isnan(out[row : row + length]).all()
                continue
            scores = self.query.values[row] @ latent.T * SIZE**-0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            expected = weights @ latent[:, :VALUE_SIZE] / weights.sum(axis=1, keepdims=True)
            # The weights are rounded as well as the result.
            np.testing.assert_allclose(out[row], expected, rtol=2 * TOLERANCE[self.dtype], atol=2 * TOLERANCE[self.dtype])


@pytest.mark.parametrize(("heads", "block_size", "dtype"), [(1, 16, "bfloat16"), (16, 64, "float16"), (37, 8, "bfloat16")])
def test_matches_float64(cuda: Kernels, rng: np.random.Generator, heads: int, block_size: int, dtype: str) -> None:
    """One token, a part of a step, several steps, several pieces; a chunk of a prompt and an empty sequence between."""
    LatentCase(rng, heads, block_size, dtype, [1, 1, 3, 0, 1, 1], [1, 30, 9, 5, 97, 300]).assert_right(cuda)


@pytest.mark.parametrize("change", [{"head_size": 512}, {"sliding_window": 5}, {"cache_dtype": DType.int8}, {"block_size": 24}])
def test_what_has_no_kernel_is_refused(cuda: Kernels, change: dict[str, int]) -> None:
    pointers = ("query", "key_cache", "value_cache", "key_scale", "value_scale", "block_tables", "query_starts", "context_lens", "sinks")
    sizes = {"query_stride": SIZE, "num_tokens": 1, "num_seqs": 1, "max_blocks": 1, "num_heads": 1, "num_kv_heads": 1, "head_size": SIZE}
    sizes |= {"value_size": VALUE_SIZE, "block_size": 16, "sliding_window": 0, "max_query_tokens": 1, "wide_prefill": 0, "dtype": DType.bfloat16}
    fields = sizes | {"cache_dtype": DType.bfloat16} | change
    assert cuda.status("mla_decode", **dict.fromkeys((*pointers, "plan", "partials", "out")), scale=1.0, **fields) == -1
