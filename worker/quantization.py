"""Which way a model is computed, and in how many bits: ``--quantization`` and what the machine has."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from fastengine import custom_ops
from fastengine.config import EngineConfig
from fastengine.custom_ops.fused import MAX_HEADS_PER_KV, Layout, Packing, load_library
from fastengine.custom_ops.library import LIBRARY_PATH
from fastengine.model_files.gguf_header import read_gguf
from fastengine.model_files.load import resolve_model, weight_files
from fastengine.model_files.spec import ModelSpec
from fastengine.worker.layers.attention import sliding_window_of_layer

LAYOUTS = {"wint8": Layout.INT8, "wint4": Layout.INT4}
NOT_QUANTIZED = frozenset({"F32", "F16", "BF16"})
# Whose nibbles the 4-bit layout keeps (their scales to half a percent); embedding and LM head are computed with in eight bits beside it.
KEPT_IN_FOUR_BITS = frozenset({"Q4_0", "Q4_1"})
FUSED_KV_DTYPES = ("float32", "bfloat16", "int8")
TABLES = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class ComputePlan:
    """``packing`` None: the plain layers in the compute type. ``reason`` says why, for the log."""

    packing: Packing | None
    reason: str


def plan_compute(config: EngineConfig, spec: ModelSpec, device: str, num_ranks: int) -> ComputePlan:
    """Raises ValueError if weights were asked for in fewer bits than can be computed with here."""
    wanted = config.model.quantization
    problem = _why_not_fused(config, spec, device, num_ranks)
    if wanted in LAYOUTS:
        if problem:
            raise ValueError(f"--quantization {wanted}: {problem}")
        return ComputePlan(Packing(LAYOUTS[wanted]), f"fused CPU step, {wanted} as asked for")
    if problem:
        return ComputePlan(None, f"plain layers: {problem}")
    chosen = _bits_of_file(config.model.model) if wanted == "auto" else ""
    if chosen:
        return ComputePlan(Packing(LAYOUTS[chosen]), f"fused CPU step, {chosen} for this quantized file")
    return ComputePlan(None, "plain layers, as asked for" if wanted == "none" else "plain layers: the weights are not quantized")


def kv_dtype(config: EngineConfig, plan: ComputePlan, device: str, compute_dtype: str) -> str:
    """The KV cache's element type. Raises ValueError for one that the chosen way can't compute with."""
    wanted = config.cache.kv_cache_dtype
    if plan.packing is None:
        return _plain_kv_dtype(wanted, plan, device, compute_dtype)
    if wanted not in ("auto", *FUSED_KV_DTYPES):
        raise ValueError(f"--kv-cache-dtype {wanted}: the fused CPU step has {', '.join(FUSED_KV_DTYPES)}")
    return "int8" if wanted == "auto" else wanted


def _plain_kv_dtype(wanted: str, plan: ComputePlan, device: str, compute_dtype: str) -> str:
    known = (compute_dtype, "int8", "fp8") if device == "gpu" else ("float32", "bfloat16")
    if wanted == "auto":
        return compute_dtype
    if wanted in known:
        return wanted
    if device == "cpu" and wanted == "int8":
        raise ValueError(f"--kv-cache-dtype int8 needs the fused CPU step ({plan.reason}); use float32 or bfloat16")
    raise ValueError(f"--kv-cache-dtype {wanted}: with {compute_dtype} on a {device.upper()} there are {', '.join(known)}")


def fused_library() -> ctypes.CDLL:
    return load_library(LIBRARY_PATH)


def _why_not_fused(config: EngineConfig, spec: ModelSpec, device: str, num_ranks: int) -> str:
    """What keeps the fused CPU step from computing this model, or nothing."""
    max_model_len = config.model.max_model_len or spec.max_position_embeddings
    windows = [sliding_window_of_layer(spec, layer) for layer in range(spec.num_hidden_layers)]
    obstacles = {
        "the null model computes nothing": config.model.load_format == "null",
        "the fused step runs on a CPU only": device != "cpu",
        "the compiled operators are not there": "reference" in custom_ops.compiled_ops().values(),
        "the fused step does not split over ranks": num_ranks > 1,
        f"the fused step needs a --block-size of a multiple of 16, not {config.cache.block_size}": config.cache.block_size % 16 != 0,
        f"the fused step needs a head_dim of a multiple of 16, not {spec.head_dim}": spec.head_dim % 16 != 0,
        "too many query heads share a key-value head": spec.num_attention_heads // spec.num_key_value_heads > MAX_HEADS_PER_KV,
        "the fused step has no sliding window": any(0 < window < max_model_len for window in windows),
    }
    return next((why for why, holds in obstacles.items() if holds), "")


def _bits_of_file(model: str) -> str:
    """The layout of a quantized GGUF file's own bits, or next above them; nothing for other files."""
    if not resolve_model(model).is_file():
        return ""
    tensors = [item for file in weight_files(model) for item in read_gguf(file).tensors.items()]
    types = {info.type_name for name, info in tensors if name not in TABLES} - NOT_QUANTIZED
    if not types:
        return ""
    return "wint4" if types <= KEPT_IN_FOUR_BITS else "wint8"
