"""Which workloads there are: tiny ones for the host shim, small ones that launch every kernel there is (on the shim and on a
GPU), larger ones to check and ones to time on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from . import attention, elementwise, linear, logits, products
from .attention import Heads
from .workload import Bench, Workload


@dataclass(frozen=True)
class Entry:
    name: str
    build: Callable[[Bench], Workload]


def make_entry(builder: Callable[..., Workload], label: str = "", /, **sizes: Any) -> Entry:
    return Entry(f"{builder.__name__} {label}".strip(), partial(builder, **sizes))


LLAMA = Heads(32, 8, 128, 128)

PROBES = [
    make_entry(linear.fragment_probe, f"{dtype} {how}", dtype=dtype, transposed=how == "transposed")
    for dtype in ("bfloat16", "float16")
    for how in ("plain", "transposed")
]

# Prefill by wgmma, on sm_90: the products on their own, then attention. Nothing uses it unless told to.
WIDE_PROBES = [
    make_entry(
        products.product_probe,
        f"{d} {'registers' if r else 'memory'}, {'across' if x else 'along'}, step {s}",
        dtype=d,
        in_registers=r,
        across=x,
        step=s,
    )
    for d in ("bfloat16", "float16")
    for r in (False, True)
    for x in (False, True)
    for s in (0, 3)
] + [make_entry(products.product_probe, "overwriting", dtype="bfloat16", in_registers=False, across=True, adds=False)]

WIDE = [
    make_entry(
        attention.paged_attention,
        f"by wgmma, {size} {dtype}, blocks of {block_size}{f', window {window}' if window else ''}{', sinks' if sinks else ''}",
        heads=Heads(heads, 1, size, size, dtype, dtype, window, sinks, wide=True),
        lengths=[150 // heads, 1, 3],
        contexts=[300, 90, 3],
        block_size=block_size,
    )
    for size, dtype, block_size, heads, window, sinks in (
        (64, "bfloat16", 16, 1, 0, False),
        (64, "float16", 64, 3, 100, True),
        (128, "bfloat16", 32, 3, 21, False),
        (128, "float16", 16, 2, 0, True),
    )
]

TINY = [
    make_entry(elementwise.rms_norm, rows=3, size=72, dtype="bfloat16", residual=True),
    make_entry(elementwise.silu_mul, rows=2, half=24, dtype="float16"),
    make_entry(elementwise.rotary_write_kv, tokens=5, heads=3, kv_heads=1, size=32, dtype="bfloat16", cache="int8", interleaved=False),
    make_entry(
        elementwise.rotary_write_kv,
        "in place",
        tokens=5,
        heads=3,
        kv_heads=1,
        size=24,
        dtype="float16",
        cache="float16",
        interleaved=False,
        in_place=True,
    ),
    make_entry(elementwise.copy_blocks, pools=2, blocks=3, block_bytes=64),
    make_entry(attention.attention_plan, seqs=20, heads=3, window=0),
    make_entry(attention.paged_attention, "decode", heads=Heads(4, 2, 64, 64), lengths=[1, 1], contexts=[300, 9]),
    make_entry(attention.paged_attention, "prefill", heads=Heads(3, 1, 64, 64, window=9, sinks=True), lengths=[7, 1], contexts=[30, 9]),
    make_entry(attention.mla_decode, heads=2, contexts=[33, 270], dtype="bfloat16"),
    make_entry(logits.argmax, rows=2, vocab=600),
    make_entry(logits.sample, rows=6, vocab=600),
    make_entry(logits.log_softmax_gather, rows=2, vocab=600, k=4),
    make_entry(logits.apply_penalties, rows=2, vocab=100, known=20),
    make_entry(logits.apply_bitmask, rows=3, vocab=100),
    make_entry(linear.moe_gate, tokens=5, experts=16, top_k=3, groups=4, top_groups=2),
    make_entry(linear.moe_permute, tokens=7, experts=4, top_k=2, align=4),
    make_entry(linear.moe_gather, tokens=3, top_k=2, size=16, dtype="bfloat16"),
    make_entry(linear.moe_combine, tokens=3, top_k=2, size=16, dtype="float16"),
    make_entry(linear.quantized_gemm, "4 bit", rows=3, in_size=128, out_size=32, bits=4, group=32, dtype="bfloat16"),
]

SIZES = (64, 96, 128, 192, 256)
BLOCK_SIZES = (16, 32, 64)
CACHES = (("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "int8"), ("float16", "fp8"))
OPTIONS: tuple[tuple[int, bool], ...] = ((0, False), (21, False), (0, True), (40, True))  # window, sinks


def _every_attention() -> list[Entry]:
    """A chunk over cached context, a decode and a first chunk: every head size with every block size and cache, each of them
    with every option in turn, and groups of every decode kernel's size."""
    entries = []
    for number, (size, block_size, (dtype, cache)) in enumerate(product(SIZES, BLOCK_SIZES, CACHES)):
        window, sinks = OPTIONS[(number + number // len(OPTIONS)) % len(OPTIONS)]
        heads = Heads((2, 4, 7)[(number + number // 12) % 3], 1, size, size, dtype, cache, window, sinks)
        options = f"{f', window {window}' if window else ''}{', sinks' if sinks else ''}"
        label = f"{size} {dtype} over {cache}, blocks of {block_size}, {heads.query} heads{options}"
        entries.append(make_entry(attention.paged_attention, label, heads=heads, lengths=[9, 1, 3], contexts=[61, 90, 3], block_size=block_size))
    return entries


HALVES = ("bfloat16", "float16")
# Every kernel of the library, as it is compiled, and every attention that is promised.
EVERY_KERNEL = [
    *_every_attention(),
    *(make_entry(attention.paged_attention, f"192/128 {d}", heads=Heads(2, 1, 192, 128, d, d), lengths=[9, 1], contexts=[61, 90]) for d in HALVES),
    *(
        make_entry(attention.paged_attention, f"pieces of {c}, {n} heads {d}", heads=Heads(n, 1, 64, 64, d, c), lengths=[1, 1], contexts=[300, 9])
        for n in (1, 3, 8)
        for d, c in (*CACHES, ("bfloat16", "fp8"))
    ),
    *(
        make_entry(attention.mla_decode, f"{d}, blocks of {b}", heads=3, contexts=[33, 270], dtype=d, block_size=b)
        for d, b in zip(HALVES, (16, 64), strict=True)
    ),
    *(
        make_entry(elementwise.rms_norm, f"{d} {n}", rows=3, size=n, dtype=d, residual=n == 512)
        for d in ("float32", *HALVES)
        for n in (72, 512, 16640)
    ),
    *(make_entry(elementwise.silu_mul, f"small {d}", rows=2, half=2056, dtype=d) for d in ("float32", *HALVES)),
    *(
        make_entry(elementwise.rotary_write_kv, f"{d} {n} into {c}", tokens=5, heads=3, kv_heads=1, size=n, dtype=d, cache=c, interleaved=n == 96)
        for d, c in (("float32", "fp8"), ("bfloat16", "int8"), ("float16", "float16"))
        for n in (64, 96, 128, 256)
    ),
    *(
        make_entry(linear.quantized_gemm, f"{d} {bits} bit, {n} rows", rows=n, in_size=192, out_size=32, bits=bits, group=96, dtype=d)
        for d in HALVES
        for bits in (4, 8)
        for n in (3, 13, 33)
    ),
    *(make_entry(linear.moe_combine, f"small {d}", tokens=3, top_k=2, size=1032, dtype=d) for d in HALVES),
    make_entry(linear.moe_gather, "small", tokens=3, top_k=2, size=1032, dtype="float16"),
    make_entry(linear.moe_gate, "small", tokens=5, experts=1024, top_k=3, groups=4, top_groups=2),
    make_entry(linear.moe_permute, "small", tokens=70, experts=4, top_k=3, align=8),
    make_entry(elementwise.copy_blocks, "small", pools=66, blocks=3, block_bytes=48),
    make_entry(attention.attention_plan, "small", seqs=20, heads=3, window=300),
    make_entry(logits.argmax, "small", rows=2, vocab=600),
    make_entry(logits.sample, "small", rows=6, vocab=600),
    make_entry(logits.log_softmax_gather, "small", rows=2, vocab=1500, k=1024),
    make_entry(logits.apply_penalties, "small", rows=2, vocab=9000, known=20),
    make_entry(logits.apply_bitmask, "small", rows=3, vocab=100),
]

_MIXED = {"lengths": [1, 300, 1, 0, 77, 1], "contexts": [4000, 900, 17, 5, 77, 300]}

CHECKS = [
    *(
        make_entry(elementwise.rms_norm, f"{d} {n}", rows=33, size=n, dtype=d, residual=r)
        for d, n, r in (("bfloat16", 4096, True), ("float16", 576, False), ("float32", 16384, True))
    ),
    *(make_entry(elementwise.silu_mul, d, rows=33, half=1536, dtype=d) for d in ("float32", "bfloat16", "float16")),
    *(
        make_entry(elementwise.rotary_write_kv, f"{d} into {c}", tokens=77, heads=8, kv_heads=2, size=n, dtype=d, cache=c, interleaved=i)
        for d, c, n, i in (
            ("bfloat16", "bfloat16", 128, False),
            ("float16", "int8", 64, True),
            ("bfloat16", "fp8", 256, False),
            ("float32", "float32", 96, False),
        )
    ),
    make_entry(elementwise.copy_blocks, pools=5, blocks=70, block_bytes=20000),
    *(make_entry(attention.attention_plan, f"{n} window {w}", seqs=n, heads=8, window=w) for n, w in ((1500, 0), (3, 700))),
    *(
        make_entry(
            attention.paged_attention,
            f"mixed {h.size}/{h.value_size} {h.cache} group {h.query // h.kv}, blocks of {b}",
            heads=h,
            block_size=b,
            **_MIXED,
        )
        for h, b in (
            (Heads(8, 8, 64, 64), 16),
            (Heads(8, 4, 96, 96, "float16", "float16", sinks=True), 32),
            (Heads(8, 2, 128, 128, window=200), 64),
            (Heads(14, 2, 128, 128, cache="int8"), 16),
            (Heads(8, 1, 128, 128, "float16", "fp8", window=333, sinks=True), 64),
            (Heads(4, 2, 192, 128), 32),
            (Heads(4, 4, 192, 192, cache="fp8"), 16),
            (Heads(4, 2, 256, 256, "float16", "float16"), 64),
        )
    ),
    *(
        make_entry(attention.mla_decode, f"{n} heads {d}", heads=n, contexts=[3000, 17, 400, 9000], dtype=d)
        for n, d in ((16, "bfloat16"), (128, "float16"))
    ),
    make_entry(logits.argmax, rows=9, vocab=128256),
    make_entry(logits.sample, rows=16, vocab=50000),
    make_entry(logits.log_softmax_gather, rows=9, vocab=50000, k=20),
    make_entry(logits.apply_penalties, rows=9, vocab=50000, known=1000),
    make_entry(logits.apply_bitmask, rows=9, vocab=50001),
    make_entry(linear.moe_gate, tokens=500, experts=256, top_k=8, groups=8, top_groups=4),
    make_entry(linear.moe_permute, tokens=500, experts=128, top_k=8, align=16),
    make_entry(linear.moe_gather, tokens=100, top_k=8, size=2048, dtype="bfloat16"),
    make_entry(linear.moe_combine, tokens=100, top_k=8, size=2048, dtype="bfloat16"),
    *(
        make_entry(linear.quantized_gemm, f"{bits} bit {d} {rows} rows", rows=rows, in_size=1536, out_size=512, bits=bits, group=g, dtype=d)
        for bits, d, rows, g in ((4, "bfloat16", 1, 128), (4, "float16", 13, 32), (8, "bfloat16", 70, 64), (8, "float16", 3, 1536))
    ),
]

# The names here are what gpu_check.py's baselines refer to.
DECODE, PREFILL = "paged_attention decode 64 x 4k", "paged_attention prefill 8k"
DECODE_BATCH, DECODE_CONTEXT, PREFILL_TOKENS = 64, 4096, 8192

SPEED = [
    make_entry(attention.paged_attention, "decode 16 x 4k", heads=LLAMA, lengths=[1] * 16, contexts=[4096] * 16),
    make_entry(attention.paged_attention, "decode 64 x 4k", heads=LLAMA, lengths=[1] * DECODE_BATCH, contexts=[DECODE_CONTEXT] * DECODE_BATCH),
    make_entry(attention.paged_attention, "decode 64 x 4k int8", heads=Heads(32, 8, 128, 128, cache="int8"), lengths=[1] * 64, contexts=[4096] * 64),
    make_entry(attention.paged_attention, "decode 64 x 4k fp8", heads=Heads(32, 8, 128, 128, cache="fp8"), lengths=[1] * 64, contexts=[4096] * 64),
    make_entry(attention.paged_attention, "decode 1 x 32k", heads=LLAMA, lengths=[1], contexts=[32768]),
    make_entry(attention.paged_attention, "prefill 8k", heads=LLAMA, lengths=[PREFILL_TOKENS], contexts=[PREFILL_TOKENS]),
    make_entry(attention.paged_attention, "prefill 2k after 6k", heads=LLAMA, lengths=[2048], contexts=[8192]),
    make_entry(attention.mla_decode, "16 heads 64 x 4k", heads=16, contexts=[4096] * 64, dtype="bfloat16"),
    make_entry(attention.mla_decode, "128 heads 64 x 4k", heads=128, contexts=[4096] * 64, dtype="bfloat16"),
    make_entry(elementwise.rms_norm, "8192 x 8192", rows=8192, size=8192, dtype="bfloat16", residual=True),
    make_entry(elementwise.silu_mul, "8192 x 14336", rows=8192, half=14336, dtype="bfloat16"),
    make_entry(
        elementwise.rotary_write_kv, "16k tokens", tokens=16384, heads=32, kv_heads=8, size=128, dtype="bfloat16", cache="bfloat16", interleaved=False
    ),
    make_entry(elementwise.copy_blocks, "32 pools", pools=32, blocks=256, block_bytes=65536),
    *(
        make_entry(linear.quantized_gemm, f"{bits} bit {rows} rows", rows=rows, in_size=8192, out_size=8192, bits=bits, group=128, dtype="bfloat16")
        for bits in (4, 8)
        for rows in (1, 8, 32)
    ),
    make_entry(linear.moe_gather, "4096 x 8 x 4096", tokens=4096, top_k=8, size=4096, dtype="bfloat16"),
    make_entry(linear.moe_combine, "4096 x 8 x 4096", tokens=4096, top_k=8, size=4096, dtype="bfloat16"),
    make_entry(linear.moe_gate, "4096 x 256", tokens=4096, experts=256, top_k=8, groups=8, top_groups=4),
    make_entry(logits.argmax, "256 x 128k", rows=256, vocab=128256),
    make_entry(logits.sample, "256 x 128k", rows=256, vocab=128256),
    make_entry(logits.log_softmax_gather, "256 x 128k", rows=256, vocab=128256, k=20),
]

# Beside these where the card has wgmma and its checks went right.
WIDE_SPEED = [
    make_entry(attention.paged_attention, f"{label} by wgmma", heads=replace(LLAMA, wide=True), lengths=[length], contexts=[PREFILL_TOKENS])
    for label, length in (("prefill 8k", PREFILL_TOKENS), ("prefill 2k after 6k", 2048))
]
