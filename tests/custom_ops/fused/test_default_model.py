"""The default model's own weights through the fused step, against the recorded greedy answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastengine.custom_ops.fused import MODEL_LEVEL, FusedModel, FusedShape, KvType, Layout, Packing, Source, SourceKind, load_library
from fastengine.custom_ops.library import LIBRARY_PATH, Library
from fastengine.model_files.gguf_header import GGUFTensorInfo, read_gguf
from tests.conftest import load_golden

from .conftest import INSTRUCTION_SETS, can_run
from .tiny import Row, TinyCache, new_arena, step

BLOCK_SIZE = 64
# Weights as the file has them are exact; eight-bit products decide between near-equal tokens differently.
MARGIN = {Layout.FLOAT32: 0.01, Layout.INT8: 0.5, Layout.INT4: 0.5}


def load(path: Path, layout: Layout, isa: str) -> FusedModel:
    tensors, data = read_gguf(path).tensors, np.memmap(path, np.uint8, "r")
    angles = np.arange(1024)[:, None] * 100000.0 ** (-np.arange(0, 64, 2) / 64)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    shape = FusedShape(30, 576, 9, 3, 64, 1536, 49152, 1e-5, table, rope_interleaved=True, tied=True)
    model = FusedModel(load_library(LIBRARY_PATH), shape, Packing(layout), 2, isa=isa)
    model.bind(new_arena(model))

    def pack(linear: str, names: list[str], layer: int = MODEL_LEVEL) -> None:
        first_row = 0
        for name in names:
            info = tensors[f"{name}.weight"]
            source = Source(data[info.offset : info.offset + info.nbytes], SourceKind[info.type_name], info.shape[0])
            model.set_rows(linear, source, layer, first_row=first_row)
            first_row += source.rows

    for layer in range(30):
        prefix = f"blk.{layer}"
        model.set_vector("input_norm", vector_of(data, tensors[f"{prefix}.attn_norm.weight"]), layer)
        model.set_vector("post_attention_norm", vector_of(data, tensors[f"{prefix}.ffn_norm.weight"]), layer)
        pack("qkv", [f"{prefix}.attn_{x}" for x in "qkv"], layer)
        pack("output", [f"{prefix}.attn_output"], layer)
        pack("gate_up", [f"{prefix}.ffn_gate", f"{prefix}.ffn_up"], layer)
        pack("down", [f"{prefix}.ffn_down"], layer)
    model.set_vector("final_norm", vector_of(data, tensors["output_norm.weight"]))
    pack("embedding", ["token_embd"])
    return model


def vector_of(data: np.ndarray, info: GGUFTensorInfo) -> np.ndarray:
    return np.array(data[info.offset : info.offset + info.nbytes]).view(np.float32)


@pytest.mark.model
@pytest.mark.parametrize(
    ("layout", "kv_type"),
    [(Layout.FLOAT32, KvType.FLOAT32), (Layout.INT8, KvType.BFLOAT16), (Layout.INT8, KvType.INT8), (Layout.INT4, KvType.BFLOAT16)],
)
def test_greedy_answers_equal_the_reference_where_it_is_sure(default_model: Path, layout: Layout, kv_type: KvType) -> None:
    check_answers(default_model, layout, kv_type, "best")


@pytest.mark.model
@pytest.mark.parametrize(("layout", "kv_type"), [(Layout.INT8, KvType.BFLOAT16), (Layout.INT4, KvType.INT8)])
@pytest.mark.parametrize("name", INSTRUCTION_SETS[1:])
def test_greedy_answers_of_lesser_instruction_sets(default_model: Path, compiled: Library, name: str, layout: Layout, kv_type: KvType) -> None:
    if not can_run(compiled, name):
        pytest.skip(f"this processor cannot run the fused step of {name}")
    check_answers(default_model, layout, kv_type, name)


def check_answers(path: Path, layout: Layout, kv_type: KvType, isa: str) -> None:
    """Every recorded token is fed back, so that each step is judged on its own."""
    model = load(path, layout, isa)
    assert isa in ("best", model.instruction_set)
    cache = TinyCache(kv_type, model.shape, num_blocks=12, block_size=BLOCK_SIZE)
    unsure = []
    for case in load_golden("smollm2_q4_1.json"):
        prompt, answer = case["prompt_ids"], case["greedy_ids"]
        logits = step(model, cache, [Row(np.array(prompt + answer[:-1]), 0, list(range(1, 11)))])
        got = logits[len(prompt) - 1 :].argmax(-1)
        unsure += [(margin, i) for i, (a, b, margin) in enumerate(zip(got, answer, case["margins"], strict=True)) if a != b]
    assert max((margin for margin, _ in unsure), default=0.0) < MARGIN[layout], unsure
    model.close()
