"""What copying KV blocks on a CPU costs: what a hit inside of a block pays in place of computing its tokens.

    python benchmarks/bench_block_copy.py [--blocks 1 8 32] [--kv-cache-dtype int8 bfloat16 float32]

All layers of the default model's shape, 1,000 blocks of 64 tokens, random pairs; the compiled copy and the same
by numpy in turn, medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np

from fastengine import custom_ops
from fastengine.custom_ops.host_blocks import HostBlocks
from fastengine.worker.kv_cache import KVCache, KVShape

NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 1000, 64, 30, 3, 64


def seconds(copies: HostBlocks, pairs: np.ndarray) -> float:
    started = time.perf_counter()
    copies.copy(pairs)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 8, 32], help="blocks copied by one plan")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["int8", "bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    custom_ops.set_num_threads(len(os.sched_getaffinity(0)))
    rng = np.random.default_rng(0)
    print(f"{'KV':>9} {'MB a block':>11} {'blocks':>7} {'compiled us':>12} {'numpy us':>9}")
    for dtype in args.kv_cache_dtype:
        cache = KVCache(KVShape(NUM_LAYERS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype), NUM_BLOCKS, 0, "cpu")
        pools = [storage.rows() for layer in cache.layers for storage in layer.storages()]
        for pool in pools:
            pool[:] = 1  # so that its pages are there
        ways = [custom_ops.copies_between([(pool, pool) for pool in pools]), HostBlocks([(pool, pool) for pool in pools], None)]
        for count in args.blocks:
            times: list[list[float]] = [[], []]
            for _ in range(args.repeats):
                pairs = rng.permutation(NUM_BLOCKS)[: 2 * count].reshape(-1, 2).astype(np.int32)
                for way, taken in zip(ways, times, strict=True):
                    taken.append(seconds(way, pairs))
            compiled, numpy = (statistics.median(taken) * 1e6 for taken in times)
            print(f"{dtype:>9} {cache.shape.bytes_per_block / 1e6:>11.2f} {count:>7} {compiled:>12.0f} {numpy:>9.0f}", flush=True)


if __name__ == "__main__":
    main()
