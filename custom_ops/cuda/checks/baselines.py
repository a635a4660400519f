"""What PyTorch makes of the same device: the ceilings to measure against, and its attention (FlashInfer's, too) as a yardstick."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .attention import Heads
from .catalogue import DECODE, DECODE_BATCH, DECODE_CONTEXT, LLAMA, PREFILL, PREFILL_TOKENS
from .memory import TorchMemory

Launch = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """``copy_bytes`` and ``matrix`` (rows and columns) are the ceilings', the others those of the catalogue's entries."""

    heads: Heads = LLAMA
    decode_batch: int = DECODE_BATCH
    decode_context: int = DECODE_CONTEXT
    prefill_tokens: int = PREFILL_TOKENS
    copy_bytes: int = 1 << 30
    matrix: int = 8192
    repeats: int = 10


TINY_SIZES = Sizes(Heads(4, 2, 64, 64), 2, 64, 32, 1 << 16, 64, 2)
PAGE = 16  # tokens
FLASHINFER_WORKSPACE = 256 << 20


def ceilings(memory: TorchMemory, sizes: Sizes) -> dict[str, float]:
    """Bytes a second of a large copy (read and written), operations a second of a large bfloat16 product."""
    torch, device, n = memory.torch, memory.device, sizes.matrix
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = memory.seconds(lambda: target.copy_(source), sizes.repeats)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product = memory.seconds(lambda: torch.matmul(a, b, out=out), sizes.repeats)
    return {"copy": 2 * sizes.copy_bytes / copy, "matrix": 2 * n**3 / product}


def import_flashinfer() -> Any:
    """The module, or None where it isn't or does not import."""
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None


class Baselines:
    """The attention of DECODE and PREFILL by others: over contiguous (PyTorch) and paged (FlashInfer's decode) bfloat16 caches."""

    def __init__(self, memory: TorchMemory, sizes: Sizes, flashinfer: Any):
        self._torch, self._memory, self._sizes, self._flashinfer = memory.torch, memory, sizes, flashinfer

    def texts(self, name: str) -> list[str]:
        """``SDPA 12.3 us`` and the like, for the two names there are; nothing for others."""
        makers = {
            DECODE: {"SDPA": self._torch_decode, "FlashInfer": self._flashinfer_decode},
            PREFILL: {"SDPA": self._torch_prefill, "FlashInfer": self._flashinfer_prefill},
        }.get(name, {})
        return [self._timed(who, make) for who, make in makers.items() if who == "SDPA" or self._flashinfer is not None]

    def _timed(self, who: str, make: Callable[[], Launch]) -> str:
        try:
            return f"{who} {self._memory.seconds(make(), self._sizes.repeats) * 1e6:.1f} us"
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            # Another library's version may want other arguments: it is a yardstick, no part of the check.
            return f"{who} failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"

    def _random(self, *shape: int) -> Any:
        return self._torch.randn(*shape, device=self._memory.device, dtype=self._torch.bfloat16)

    def _torch_decode(self) -> Launch:
        heads, seqs, context = self._sizes.heads, self._sizes.decode_batch, self._sizes.decode_context
        query = self._random(seqs, heads.query, 1, heads.size)
        key, value = (self._random(seqs, heads.kv, context, heads.size) for _ in range(2))
        attend = self._torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(query, key, value, enable_gqa=True)

    def _torch_prefill(self) -> Launch:
        heads, tokens = self._sizes.heads, self._sizes.prefill_tokens
        query, key, value = (self._random(1, n, tokens, heads.size) for n in (heads.query, heads.kv, heads.kv))
        attend = self._torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(query, key, value, is_causal=True, enable_gqa=True)

    def _flashinfer_decode(self) -> Launch:
        torch, sizes, heads, device = self._torch, self._sizes, self._sizes.heads, self._memory.device
        seqs, pages = sizes.decode_batch, sizes.decode_context // PAGE
        workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        starts = torch.arange(seqs + 1, device=device, dtype=torch.int32) * pages
        order = torch.randperm(seqs * pages, device=device).to(torch.int32)
        last = torch.full((seqs,), PAGE, device=device, dtype=torch.int32)
        wrapper.plan(starts, order, last, heads.query, heads.kv, heads.size, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        query, cache = self._random(seqs, heads.query, heads.size), self._random(seqs * pages, 2, PAGE, heads.kv, heads.size)
        return lambda: wrapper.run(query, cache)

    def _flashinfer_prefill(self) -> Launch:
        heads, tokens = self._sizes.heads, self._sizes.prefill_tokens
        query, key, value = (self._random(tokens, n, heads.size) for n in (heads.query, heads.kv, heads.kv))
        return lambda: self._flashinfer.single_prefill_with_kv_cache(query, key, value, causal=True)
