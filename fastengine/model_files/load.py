"""Entry points: what a model is, what it is called, and which files hold its weights."""

from __future__ import annotations

from pathlib import Path

from fastengine.model_files.errors import ModelFileError
from fastengine.model_files.gguf_header import is_gguf
from fastengine.model_files.gguf_spec import spec_from_gguf, split_files
from fastengine.model_files.hf_config import read_json, spec_from_directory
from fastengine.model_files.spec import ModelSpec

INDEX_FILE = "model.safetensors.index.json"


def resolve_model(path: str | Path) -> Path:
    """The directory or GGUF file that ``path`` means; a directory with a lone GGUF means that file.

    Raises ModelFileError when nothing usable is there.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ModelFileError(path, "does not exist: give a model directory in Hugging Face layout or a .gguf file (models are not downloaded)")
    if path.is_file():
        if not is_gguf(path):
            raise ModelFileError(path, "is not a GGUF file: give a .gguf file, or the directory that holds config.json")
        return path
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1 or (files and len(split_files(files[0])) == len(files)):
            return files[0]
        if files:
            raise ModelFileError(path, f"holds several GGUF files ({', '.join(f.name for f in files[:4])}, ...): name one of them")
    return path


def load_spec(path: str | Path) -> ModelSpec:
    """Read a model's shape from its files, without Paddle. Raises ModelFileError."""
    path = resolve_model(path)
    return spec_from_gguf(path) if path.is_file() else spec_from_directory(path)


def default_model_name(path: str | Path) -> str:
    """What clients call a model that was given no name: the directory's name, or the file's without ``.gguf``."""
    path = Path(path).expanduser()
    name = path.name or path.resolve().name
    return name[: -len(".gguf")] if name.endswith(".gguf") else name


def weight_files(path: str | Path) -> list[Path]:
    """The files that hold the weights, in a fixed order. Raises ModelFileError when any is missing."""
    path = resolve_model(path)
    if path.is_file():
        return split_files(path)
    index = path / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelFileError(index, "weight_map: must map tensor names to file names")
        files = [path / name for name in sorted(set(weight_map.values()))]
        outside = [file for file in files if file.parent != path]
        if outside:
            raise ModelFileError(index, f"weight_map: {outside[0]} is not a file of this directory")
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelFileError(path, f"{len(missing)} of {len(files)} weight files are missing: {', '.join(missing[:5])}")
    if not files:
        raise ModelFileError(path, "holds no *.safetensors weights (other formats, such as *.bin, are not read)")
    return files
