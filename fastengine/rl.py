"""A trainer's side of the control API: hand new weights to a running server, in place.

The tensors travel through shared memory: they are written once, in safetensors layout, to a file on
tmpfs that the workers map. Nothing here imports Paddle or a training framework.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fastengine.ipc.runtime_dir import default_root

HEADER_ALIGNMENT = 8
# numpy has no bfloat16: such tensors are given as their 16-bit patterns (see BFloat16).
DTYPE_NAMES = {"float32": "F32", "float16": "F16", "float64": "F64", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8"}


class ControlFailed(RuntimeError):
    """The server refused a control call; ``code`` is its HTTP status."""

    def __init__(self, code: int, message: str):
        super().__init__(f"{code}: {message}")
        self.code = code


class BFloat16:
    """A bfloat16 tensor as ``uint16`` bit patterns, e.g. ``BFloat16(t.view(torch.uint16).numpy())``."""

    def __init__(self, bits: np.ndarray):
        if bits.dtype != np.uint16:
            raise TypeError(f"bfloat16 tensors are given as uint16 bit patterns, not {bits.dtype}")
        self.bits = bits


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray | BFloat16]) -> None:
    """Write ``tensors`` in safetensors layout. Raises TypeError for a dtype it has no name for."""
    header: dict[str, Any] = {}
    arrays: list[np.ndarray] = []
    offset = 0
    for name, tensor in tensors.items():
        array, dtype = (tensor.bits, "BF16") if isinstance(tensor, BFloat16) else (tensor, DTYPE_NAMES.get(tensor.dtype.name))
        if dtype is None:
            raise TypeError(f"{name}: tensors of {array.dtype} can't be handed over; convert to float32, float16 or BFloat16")
        array = np.ascontiguousarray(array)
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        arrays.append(array)
        offset += array.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % HEADER_ALIGNMENT)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for array in arrays:
            file.write(array.data.cast("B") if array.size else b"")


@contextlib.contextmanager
def shared_tensors(tensors: Mapping[str, np.ndarray | BFloat16], root: Path | None = None) -> Iterator[Path]:
    """A file in shared memory that holds ``tensors`` for the length of the block."""
    path = (root or default_root()) / f"fastengine-tensors-{secrets.token_hex(8)}.safetensors"
    try:
        write_safetensors(path, tensors)
        yield path
    finally:
        path.unlink(missing_ok=True)


class ControlClient:
    """Control calls to one server on this machine.

    Every method raises ControlFailed when the server says no, OSError when it does not answer.
    """

    def __init__(self, url: str = "http://127.0.0.1:8188", *, key: str | None = None, timeout_s: float = 660.0):
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._timeout_s = timeout_s

    def call(self, route: str, /, **body: Any) -> dict[str, Any]:
        """POST ``body`` without its None values to ``route`` and return the reply's ``result``."""
        sent = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        request = urllib.request.Request(self.url + route, data=sent, headers=self._headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                return json.load(reply)["result"]
        except urllib.error.HTTPError as error:
            raise ControlFailed(error.code, _message(error.read())) from None

    def pause(self, mode: Literal["abort", "drain", "retract", "in_place"] = "in_place") -> None:
        self.call("/v1/pause", mode=mode)

    def resume(self) -> None:
        self.call("/v1/resume")

    def update_weights(self, model_path: str | None = None, *, version: str | None = None, keep_kv: bool = False) -> dict[str, Any]:
        """Load weights from files; the engine must be paused."""
        return self.call("/v1/update_weights", model_path=model_path, version=version, keep_kv=keep_kv)

    def push_tensors(self, tensors: Mapping[str, np.ndarray | BFloat16], *, version: str | None = None, keep_kv: bool = False) -> dict[str, Any]:
        """Replace the named tensors (Hugging Face names and shapes), all ranks or none; the engine must be paused.

        Tensors that are not named keep their values; after workers have crashed and lost what was pushed before, all must be
        named (see docs/control-api.md). ``keep_kv``: requests kept by an ``in_place`` pause go
        on over KV of the old weights; otherwise they are recomputed.
        """
        with shared_tensors(tensors) as path:
            return self.call("/v1/update_weights_from_tensors", path=str(path), version=version, keep_kv=keep_kv)

    def weights_checksum(self) -> str:
        return self.call("/v1/weights_checksum")["checksum"]

    @contextlib.contextmanager
    def paused(self, mode: Literal["abort", "drain", "retract", "in_place"] = "in_place") -> Iterator[None]:
        """Pause for the length of the block; resumes however it is left."""
        self.pause(mode)
        try:
            yield
        finally:
            self.resume()


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
