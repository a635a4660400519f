"""Which architectures the workers can build, known without Paddle. A test compares it with the workers' own registry."""

from __future__ import annotations

ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_ForCausalLM",
    }
)
