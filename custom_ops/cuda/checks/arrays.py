"""Element types that numpy lacks: encoding and decoding, rounding to nearest even."""

from __future__ import annotations

import numpy as np

STORAGE = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(np.uint8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}


def _fp8_table() -> np.ndarray:
    """The values of the codes 0 to 126 of float8 e4m3fn (no infinity; 127 is NaN)."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10))


FP8_TABLE = _fp8_table()


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as they are stored, rounded to nearest even; int8 and fp8 saturate."""
    if dtype == "bfloat16":
        bits = np.asarray(values, dtype=np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if dtype == "int8":
        return np.clip(np.rint(values), -127, 127).astype(np.int8)
    if dtype == "fp8":
        magnitude = np.minimum(np.abs(np.asarray(values, dtype=np.float64)), 448.0)
        above = np.clip(np.searchsorted(FP8_TABLE, magnitude), 1, 126)
        low, high = FP8_TABLE[above - 1], FP8_TABLE[above]
        nearer_low = (magnitude - low < high - magnitude) | ((magnitude - low == high - magnitude) & ((above - 1) % 2 == 0))
        return (np.where(nearer_low, above - 1, above) | np.where(np.signbit(values), 128, 0)).astype(np.uint8)
    return np.asarray(values).astype(STORAGE[dtype])


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Stored elements as float64 (integers stay integers)."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "fp8":
        codes = stored & 127
        return np.where(codes == 127, np.nan, FP8_TABLE[np.minimum(codes, 126)]) * np.where(stored & 128, -1.0, 1.0)
    return stored.astype(np.float64) if dtype.startswith("float") else stored


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """What remains of values once stored as ``dtype``, as float64."""
    return decode(encode(values, dtype), dtype)
