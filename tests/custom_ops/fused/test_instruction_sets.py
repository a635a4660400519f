"""Which instruction set the fused step takes, what the sets have in common, and that none holds another's instructions."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fastengine import custom_ops
from fastengine.custom_ops.fused import FusedError, FusedModel, KvType, Layout, Packing, Source, SourceKind, has_instruction_set, load_library
from fastengine.custom_ops.library import LIBRARY_PATH, Library

from .conftest import INSTRUCTION_SETS, can_run
from .tiny import Row, TinyCache, TinyModel, new_arena, step

# What /proc/cpuinfo must list for the fused step of a set.
AVX2_FLAGS = {"avx2", "fma", "f16c"}
FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "avxvnni": {*AVX2_FLAGS, "avx_vnni"},
    "avx2": AVX2_FLAGS,
}
# Instructions that are there in 256 bits but need AVX-512: registers that VEX cannot name, and masks.
EVEX_ONLY = re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b")
DOTS = re.compile(r"^\s*[0-9a-f]+:\s+((?:[0-9a-f]{2} )+)\s*(?:\{vex\} )?vpdp")


@dataclass(frozen=True)
class TablesToo(Packing):
    """The head as the linears, so that a GEMM of four bits can be looked at by itself."""

    @property
    def table_layout(self) -> Layout:
        return self.layout


def cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).partition(":")[2].split())


def runnable(compiled: Library) -> list[str]:
    return [name for name in INSTRUCTION_SETS if can_run(compiled, name)]


def test_the_choice_is_what_the_processor_tells(compiled: Library) -> None:
    code = f"""
from fastengine.custom_ops import fused, library
loaded = library.load()
print(loaded.isa, *(int(fused.has_instruction_set(loaded.handle, name)) for name in {INSTRUCTION_SETS}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ}, timeout=60)
    assert result.returncode == 0, result.stderr
    isa, *there = result.stdout.split()
    if "avx_vnni" not in cpu_flags() and tuple(map(int, platform.release().split(".")[:2])) < (5, 12):
        pytest.skip("this kernel does not list AVX-VNNI")
    wanted = {name: flags <= cpu_flags() for name, flags in FLAGS.items()}
    wanted["avxvnni"] &= can_run(compiled, "avxvnni")  # a compiler that did not know it left it out
    assert dict(zip(INSTRUCTION_SETS, map(bool, map(int, there)), strict=True)) == wanted
    if wanted[isa]:
        assert isa == next(name for name in INSTRUCTION_SETS if wanted[name])
    else:  # AVX-512 without VNNI: the other operators' set
        assert isa == "avx512"


def test_a_model_takes_the_best_that_is_left(compiled: Library, isa: str) -> None:
    model = TinyModel(Layout.INT8, "best")
    assert model.fused.instruction_set == isa
    assert set(custom_ops.compiled_ops().values()) == {"avx2" if isa == "avxvnni" else isa}
    compiled.use_isa("avx2")
    other = TinyModel(Layout.INT8, "best")
    assert (model.fused.instruction_set, other.fused.instruction_set) == (isa, "avx2")
    for each in (model, other):
        each.fused.close()


def test_a_set_that_is_not_there_is_refused(compiled: Library) -> None:
    shape = TinyModel(Layout.INT8, "avx2").shape
    with pytest.raises(FusedError, match="no fused step for sse9"):
        FusedModel(load_library(LIBRARY_PATH), shape, Packing(Layout.INT8), 1, isa="sse9")
    assert not compiled.force_isa("sse9")
    for name in INSTRUCTION_SETS:
        if not has_instruction_set(compiled.handle, name):
            with pytest.raises(FusedError, match=name):
                FusedModel(load_library(LIBRARY_PATH), shape, Packing(Layout.INT8), 1, isa=name)


@pytest.mark.parametrize("layout", list(Layout))
def test_packed_weights_are_the_same_bytes(compiled: Library, layout: Layout) -> None:
    """So packed files on disk serve every set."""
    models = [TinyModel(layout, name, bias=True, tied=False) for name in runnable(compiled)]
    for model in models[1:]:
        np.testing.assert_array_equal(model.fused_arena, models[0].fused_arena)
    for model in models:
        model.fused.close()


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("kv_type", list(KvType))
def test_avxvnni_computes_what_avx2_does(compiled: Library, layout: Layout, kv_type: KvType) -> None:
    """Bit for bit: integer sums are exact, and all float operations are the same. Tiles whole, half, of odd sizes, and single rows."""
    if not can_run(compiled, "avxvnni"):
        pytest.skip("this processor has no AVX-VNNI")
    found = []
    for name in ("avxvnni", "avx2"):
        model = TinyModel(layout, name, qk_norm=True, hidden=96, head_dim=48)
        cache, rng, hidden = TinyCache(kv_type, model.shape), np.random.default_rng(9), []
        assert model.fused.instruction_set == name
        for lengths in ([33, 7, 16], [8], [1, 150, 1], [1], [1, 1, 1], [6], [1] * 13):
            rows = [Row(rng.integers(0, 300, n), 0, list(range(20 * i, 20 * i + 10))) for i, n in enumerate(lengths)]
            states = np.empty((sum(lengths), model.shape.hidden), np.float32)
            hidden += [step(model.fused, cache, rows, hidden_out=states), states]
        found.append([*hidden, *cache.pools, *cache.scales])
        model.fused.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("layout", [Layout.INT8, Layout.INT4])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 15, 29])
def test_sums_hold_the_largest_products(isa: str, layout: Layout, num_rows: int) -> None:
    """Weights of the largest sizes times activations of 127: where bytes are multiplied in pairs, sums of 16 bits must not saturate."""
    shape = TinyModel(layout, isa, tied=False).shape
    model = FusedModel(load_library(LIBRARY_PATH), shape, TablesToo(layout), 2, isa=isa)
    model.bind(new_arena(model))
    blocks = (shape.vocab, shape.hidden // 32)
    signs = np.sign(np.random.default_rng(10).standard_normal((shape.vocab, shape.hidden))) * (np.arange(shape.vocab)[:, None] % 3 > 0)
    if layout == Layout.INT8:
        integers = np.where(signs < 0, -128, np.where(signs > 0, 127, -128)).astype(np.int8)
        raw = np.concatenate([np.full((*blocks, 1), 1, np.float16).view(np.uint8), integers.reshape(*blocks, 32).view(np.uint8)], axis=-1)
        source = Source(raw.reshape(shape.vocab, -1), SourceKind.Q8_0, shape.vocab)
    else:
        integers = np.where(signs < 0, 0, 15).astype(np.uint8)
        halves = integers.reshape(*blocks, 2, 16)
        scales = np.tile(np.array([1, 0], np.float16).view(np.uint8), (*blocks, 1))
        source = Source(
            np.concatenate([scales, halves[..., 0, :] | halves[..., 1, :] << 4], axis=-1).reshape(shape.vocab, -1), SourceKind.Q4_1, shape.vocab
        )
    model.set_rows("lm_head", source)
    rows = np.random.default_rng(11).choice([-1.0, 1.0], (num_rows, shape.hidden)).astype(np.float32)
    rows[0], rows[-1] = -1.0, 1.0
    got = np.empty((num_rows, shape.vocab), np.float32)
    model.logits(rows, got)
    np.testing.assert_allclose(got, rows @ integers.T.astype(np.float32), rtol=1e-6, atol=1e-3)
    model.close()


def test_kernels_hold_only_their_sets_instructions() -> None:
    """A VEX encoding begins with c4 or c5; without its prefix in the source the assembler takes AVX-512's."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump")
    listing = subprocess.run([objdump, "-d", "--insn-width=16", str(LIBRARY_PATH)], capture_output=True, text=True, check=True).stdout
    dots: dict[str, int] = {}
    for function in listing.split("\n\n"):
        kernel = re.match(r"\S+ <_Z\w*10fastengine\d+(avx2|avxvnni|avx512)", function)
        if kernel is None or kernel[1] == "avx512":
            continue
        assert not EVEX_ONLY.search(function), function.splitlines()[0]
        encodings = [found[1] for line in function.splitlines() if (found := DOTS.match(line))]
        dots[kernel[1]] = dots.get(kernel[1], 0) + len(encodings)
        assert all(encoding.startswith(("c4 ", "c5 ")) for encoding in encodings), function.splitlines()[0]
    assert dots["avx2"] == 0
    assert dots.get("avxvnni", 0) > 100 or not has_instruction_set(load_library(LIBRARY_PATH), "avxvnni")
