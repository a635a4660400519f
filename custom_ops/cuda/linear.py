"""Weights as ``quantized_gemm`` reads them. Uses numpy alone."""

from __future__ import annotations

import numpy as np


def pack_weight(quantized: np.ndarray, bits: int) -> np.ndarray:
    """Lays unsigned weights out in the order in which the kernel's lanes use them (see kernels/quantized_gemm.cu).

    quantized uint8 [out_size, in_size], below 2^bits; bits 4 or 8; out_size a multiple of 32, in_size of 64.
    Returns uint8 [out_size * in_size * bits / 8]. Raises ValueError for other sizes or larger values.
    """
    out_size, in_size = quantized.shape
    if bits not in (4, 8):
        raise ValueError(f"bits: expected 4 or 8, got {bits}")
    if out_size % 32 or in_size % 64 or quantized.dtype != np.uint8:
        raise ValueError(f"quantized: expected uint8 [a multiple of 32, a multiple of 64], got {quantized.dtype} {list(quantized.shape)}")
    if bits == 4 and quantized.size and int(quantized.max()) > 15:
        raise ValueError("quantized: expected values below 16")
    chunks = 2 if bits == 4 else 1
    # Axes: tile of 16 channels, channel / 8 of it, channel % 8, unit, 32 inner values of it, lane % 4, step, pair, value of the pair.
    split = quantized.reshape(out_size // 16, 2, 8, in_size // (32 * chunks), chunks, 4, 2, 2, 2)
    if bits == 8:
        return np.ascontiguousarray(split.transpose(0, 3, 2, 5, 4, 6, 7, 8, 1)).reshape(-1)
    nibbles = np.ascontiguousarray(split.transpose(0, 3, 2, 5, 4, 6, 8, 7, 1)).reshape(-1, 2)
    return nibbles[:, 0] | nibbles[:, 1] << 4
