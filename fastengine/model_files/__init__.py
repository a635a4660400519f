"""What the control plane must know of a model, read from its files without Paddle."""

from fastengine.model_files.errors import ModelFileError
from fastengine.model_files.gguf_header import GGUFHeader, GGUFTensorInfo, is_gguf, read_gguf
from fastengine.model_files.load import default_model_name, load_spec, resolve_model, weight_files
from fastengine.model_files.spec import ModelSpec

__all__ = [
    "GGUFHeader",
    "GGUFTensorInfo",
    "ModelFileError",
    "ModelSpec",
    "default_model_name",
    "is_gguf",
    "load_spec",
    "read_gguf",
    "resolve_model",
    "weight_files",
]
