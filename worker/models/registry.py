"""Which class builds which architecture."""

from __future__ import annotations

from fastengine.model_files.spec import ModelSpec
from fastengine.worker.layers.linear import Place
from fastengine.worker.models.llama import LlamaForCausalLM
from fastengine.worker.parallel import TensorParallel

ARCHITECTURES: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "Ernie4_5ForCausalLM": LlamaForCausalLM,
    "Ernie4_5_ForCausalLM": LlamaForCausalLM,
}


def build_model(spec: ModelSpec, place: Place, tp: TensorParallel, max_position: int) -> LlamaForCausalLM:
    """The model without weights. Raises ValueError for an architecture that isn't supported."""
    builder = ARCHITECTURES.get(spec.architecture)
    if builder is None:
        raise ValueError(f"architecture {spec.architecture} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}")
    return builder(spec, place, tp, max_position)
