"""The C interface of the CUDA kernels through ctypes: argument structures read from ``kernels/args.h``.

Uses the standard library alone, so that it serves the host shim's tests and ``scripts/gpu_check.py``,
which knows no Paddle.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

ARGS_HEADER = Path(__file__).parent / "kernels" / "args.h"
OPERATORS_HEADER = ARGS_HEADER.with_name("launchers.h")
UNSUPPORTED = -1

# Of cudaError_t, those that a first run on a new machine may well meet.
KNOWN_ERRORS = {
    2: "out of memory",
    35: "the driver is older than the toolkit that this was built with",
    209: "the library has no code for this GPU",
    700: "a kernel reached memory that is not its own",
    719: "a kernel failed",
}

_SCALARS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}
_STRUCT = re.compile(r"^struct (\w+) \{$(.*?)^\};$", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^  ([\w ]+?(?:\*(?: const)?)*\**) (\w+);")


class DType:
    """Element types as the kernels number them (kernels/args.h)."""

    float32, bfloat16, float16, int8, fp8 = range(5)


class OperatorError(RuntimeError):
    """A launcher refused its arguments or a launch failed; the text says which operator and why."""


def parse_structs(header: Path = ARGS_HEADER) -> dict[str, type[ctypes.Structure]]:
    """A ctypes structure for every ``struct`` of the header, by name. Raises ValueError for a line it can't read."""
    structs: dict[str, type[ctypes.Structure]] = {}
    for name, body in _STRUCT.findall(header.read_text()):
        fields: list[tuple[str, Any]] = []
        for line in body.splitlines():
            if not line.strip() or line.strip().startswith("//"):
                continue
            match = _FIELD.match(line)
            if match is None:
                raise ValueError(f"{header.name}: can't read the field '{line.strip()}' of {name}")
            kind, field = match.groups()
            if "*" not in kind and kind not in _SCALARS:
                raise ValueError(f"{header.name}: unknown type '{kind}' of {name}.{field}")
            fields.append((field, ctypes.c_void_p if "*" in kind else _SCALARS[kind]))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


def parse_operators(header: Path = OPERATORS_HEADER) -> dict[str, str]:
    """Operator name -> name of its argument structure."""
    return dict(re.findall(r"^  X\((\w+), (\w+)\)", header.read_text(), re.MULTILINE))


class Operators:
    """The operators of a built library.

    ``operators.call("rms_norm", x=pointer, ..., num_rows=3)`` fills the structure by field name (pointers
    as integers or None; all fields must be given) and raises OperatorError unless the launcher returns 0.
    """

    def __init__(self, library: Path):
        self._library = ctypes.CDLL(str(library))
        self._structs = parse_structs()
        self._operators = parse_operators()
        for name, struct in self._operators.items():
            getattr(self._library, f"fe_{name}").argtypes = [ctypes.c_void_p, ctypes.c_void_p]
            # A field read wrong would shift all after it.
            size = int(getattr(self._library, f"fe_{name}_args_size")())
            if size != ctypes.sizeof(self._structs[struct]):
                raise OperatorError(f"{name}: the library's {struct} has {size} bytes, args.h {ctypes.sizeof(self._structs[struct])}")

    @property
    def library(self) -> ctypes.CDLL:
        return self._library

    def status(self, name: str, stream: int | None = None, **fields: Any) -> int:
        """What the launcher returned."""
        struct = self._structs[self._operators[name]]
        known = {field for field, _ in struct._fields_}
        if fields.keys() != known:
            raise TypeError(f"{name}: missing {sorted(known - fields.keys())}, unknown {sorted(fields.keys() - known)}")
        arguments = struct(**fields)
        return int(getattr(self._library, f"fe_{name}")(ctypes.byref(arguments), stream))

    def call(self, name: str, stream: int | None = None, **fields: Any) -> None:
        status = self.status(name, stream, **fields)
        if status == UNSUPPORTED:
            raise OperatorError(f"{name}: no kernel covers these arguments")
        if status != 0:
            raise OperatorError(f"{name}: {self._describe(status)}")

    def _describe(self, status: int) -> str:
        if status > 0:
            return f"CUDA error {status}" + (f": {KNOWN_ERRORS[status]}" if status in KNOWN_ERRORS else "")
        describe = self._library.fe_shim_error
        describe.restype = ctypes.c_char_p
        return str(describe().decode())
