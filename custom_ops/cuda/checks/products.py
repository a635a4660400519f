"""One product of a warpgroup (wgmma), operands laid out here as the PTX manual has them: not by the kernels' own functions."""

from __future__ import annotations

import numpy as np

from .arrays import encode, rounded
from .workload import Bench, Workload, code, require_close

ROW = 128  # bytes of a row of a panel: 64 values
GROUP = 8 * ROW
COLUMNS = 128


def panel(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rows of 64 values as bytes under the 128-byte swizzle: bits 4-6 of a byte's place exchanged by bits 7-9, the row's number."""
    rows = np.ascontiguousarray(encode(values, dtype)).view(np.uint8).reshape(len(values), ROW)
    place = np.arange(ROW)[None] ^ (np.arange(len(values))[:, None] % 8 * 16)
    out = np.empty_like(rows)
    np.put_along_axis(out, place, rows, axis=1)
    return out.reshape(-1)


def product_probe(bench: Bench, dtype: str, in_registers: bool, across: bool, adds: bool = True, step: int = 1) -> Workload:
    """64 x 16 by 16 x 128. ``step``: which sixteen of the inner values that lie in memory; ``across``: the right operand's rows are those."""
    memory, rng = bench.memory, bench.rng
    a, b, c = rounded(rng.normal(size=(64, 64)), dtype), rounded(rng.normal(size=(64, COLUMNS)), dtype), rng.normal(size=(64, COLUMNS))
    inner = slice(16 * step, 16 * step + 16)
    # Left: rows of 64 inner values. Right: the same for each column, or for each inner value one row in each of two panels.
    right = [b[:, :64], b[:, 64:]] if across else [b.T]
    image = np.concatenate([panel(a, dtype), *(panel(part, dtype) for part in right)])
    left_begin, right_begin = 32 * step, 64 * ROW + (16 * step * ROW if across else 32 * step)
    thread, i8, i64 = np.arange(128)[:, None], np.arange(8)[None], np.arange(64)[None]
    lane = thread % 32
    fragment = a[:, inner][16 * (thread // 32) + lane // 4 + 8 * (i8 // 2 % 2), lane % 4 * 2 + i8 % 2 + 8 * (i8 // 4)]
    left = memory.upload(encode(fragment, dtype).view(np.int32), "int32")
    place = (16 * (thread // 32) + lane // 4 + 8 * (i64 // 2 % 2), 8 * (i64 // 4) + 2 * (lane % 4) + i64 % 2)
    given, sums = memory.upload(image, "uint8"), memory.filled(c[place])
    places = {"left_begin": left_begin, "left_stride": GROUP, "right_begin": right_begin, "right_stride": GROUP}
    # Between panels; of a single one the manual assumes 16.
    places["right_leading"] = 64 * ROW if across else 16
    kind = {"in_registers": int(in_registers), "across": int(across), "adds": int(adds), "dtype": code(dtype)}

    def launch() -> None:
        bench.call("product_probe", image=given, left=left, d=sums, image_bytes=len(image), **places, **kind)

    def check() -> None:
        require_close("d", sums.values, (a[:, inner] @ b[inner] + (c if adds else 0.0))[place], 1e-5, 1e-5)

    return Workload(launch, check, len(image))
