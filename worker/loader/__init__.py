"""Weights from files into the model's storage.

| module | what it owns |
|---|---|
| ``checkpoint`` | what a checkpoint is, whatever its format |
| ``safetensors``, ``gguf``, ``dummy`` | the formats |
| ``weights`` | checking a checkpoint against a model, filling the model from it, hashing it |
"""
