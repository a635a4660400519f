"""What the worker and the operators call of Paddle is there, with these arguments: a rename shows here and not on the first GPU.

A Paddle without CUDA has all of its Python half; of what is compiled, its own type stubs tell.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from fastengine.worker import parallel
from fastengine.worker.cuda_graphs import Graph

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "worker").rglob("*.py"), *(ROOT / "custom_ops").glob("*.py"), *(ROOT / "custom_ops" / "cuda").glob("*.py")])
PADDLE = Path(paddle.__file__).parent
COMPILED_STUBS = PADDLE / "_typing" / "libs" / "libpaddle" / "__init__.pyi"


@dataclass(frozen=True)
class Use:
    """A dotted name of Paddle in a source, and the call it stands in, if it is called."""

    place: str
    name: str
    call: ast.Call | None

    def __str__(self) -> str:
        return f"{self.place} {self.name}"


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute, or nothing of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def imported(tree: ast.Module) -> dict[str, str]:
    """What a source calls what it imports of Paddle: name -> dotted name."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name.split(".")[0]: a.name if a.asname else "paddle" for a in node.names if a.name.split(".")[0] == "paddle"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paddle":
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def uses() -> Iterator[Use]:
    for source in SOURCES:
        tree = ast.parse(source.read_text())
        names = imported(tree)
        place = str(source.relative_to(ROOT))
        for name in names.values():
            yield Use(place, name, None)
        called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
                first, _, rest = dotted(node).partition(".")
                if first in names and (rest or id(node) in called):
                    yield Use(place, f"{names[first]}.{rest}".rstrip("."), called.get(id(node)))


def stub_classes() -> dict[str, dict[str, ast.FunctionDef]]:
    """Of what is compiled, in a Paddle with everything: class -> its methods."""
    tree = ast.parse(COMPILED_STUBS.read_text())
    return {c.name: {f.name: f for f in c.body if isinstance(f, ast.FunctionDef)} for c in tree.body if isinstance(c, ast.ClassDef)}


STUBS = stub_classes()
USES = sorted({(str(use), ast.dump(use.call) if use.call else ""): use for use in uses()}.values(), key=str)


def find(name: str) -> Any:
    """The object of a dotted name; of a class that only a Paddle with CUDA has, what the stubs say of it. Raises AttributeError."""
    found: Any = paddle
    parts = name.split(".")[1:]
    for index, part in enumerate(parts):
        if found is paddle.base.core and not hasattr(found, part):
            if part not in STUBS:
                raise AttributeError(f"paddle.base.core.{part}")
            methods = parts[index + 1 :]
            return STUBS[part] if not methods else STUBS[part][methods[0]]
        found = getattr(found, part)
    return found


def signature_of(function: Any) -> inspect.Signature | None:
    """None for what is compiled and doesn't tell."""
    try:
        return inspect.signature(function) if callable(function) else None
    except (ValueError, TypeError):
        return None


@pytest.mark.parametrize("use", USES, ids=str)
def test_it_is_there_and_takes_these_arguments(use: Use) -> None:
    found = find(use.name)
    if use.call is None:
        return
    starred = any(isinstance(a, ast.Starred) for a in use.call.args) or any(k.arg is None for k in use.call.keywords)
    positional, named = len(use.call.args), [k.arg or "" for k in use.call.keywords]
    if isinstance(found, ast.FunctionDef):
        assert positional == len(found.args.args)
        assert not named
    elif (signature := signature_of(found)) is not None and not starred:
        signature.bind(*[None] * positional, **dict.fromkeys(named))


def test_what_a_gpu_needs_is_among_it() -> None:
    """The names that no test of a CPU ever calls."""
    names = {use.name for use in USES}
    assert {
        "paddle.device.cuda.graphs.CUDAGraph",
        "paddle.base.core.CUDAGraph.gen_new_memory_pool_id",
        "paddle.cuda.mem_get_info",
        "paddle.device.cuda.empty_cache",
        "paddle.device.cuda.memory_reserved",
        "paddle.device.cuda.max_memory_reserved",
        "paddle.device.cuda.reset_max_memory_reserved",
        "paddle.device.synchronize",
        "paddle.CUDAPlace",
        "paddle.distributed.ParallelEnv",
        "paddle.distributed.stream.all_reduce",
        "paddle.distributed.stream.all_gather",
    } <= names


@pytest.mark.parametrize("name", ["paddle.device.cuda.graphs.Graph", "paddle.base.core.NoSuchGraph", "paddle.base.core.CUDAGraph.rewind"])
def test_what_is_not_there_is_noticed(name: str) -> None:
    with pytest.raises((AttributeError, KeyError)):
        find(name)


def test_the_graphs_are_those_that_the_worker_takes_them_for() -> None:
    from paddle.device.cuda.graphs import CUDAGraph

    assert list(inspect.signature(CUDAGraph.__init__).parameters) == ["self", "place", "mode", "pool_id"]
    for name in (name for name, member in vars(Graph).items() if inspect.isfunction(member) and not name.startswith("_")):
        assert list(inspect.signature(getattr(CUDAGraph, name)).parameters) == ["self"], name
    # The pool goes where it is wanted, and all that it calls is compiled.
    assert "begin_capture_with_pool_id(\n            self._place, self._mode, self._pool_id" in inspect.getsource(CUDAGraph.capture_begin)
    assert {"begin_capture_with_pool_id", "end_capture", "replay", "reset", "gen_new_memory_pool_id"} <= STUBS["CUDAGraph"].keys()


def test_collectives_on_the_computations_stream_wait_for_nobody() -> None:
    """On it they are kernels like any other, so a graph can hold them; Paddle refuses it only together with sync_op=False."""
    for collective in (dist.stream.all_reduce, dist.stream.all_gather):
        assert inspect.signature(collective).parameters["sync_op"].default is True
    folder = PADDLE / "distributed" / "communication" / "stream"
    assert "all_reduce_on_calc_stream" in (folder / "all_reduce.py").read_text()
    assert "all_gather_on_calc_stream" in (folder / "all_gather.py").read_text()


def test_the_names_that_go_by_way_of_the_environment() -> None:
    source = (PADDLE / "distributed" / "parallel.py").read_text()
    assert "PADDLE_DISTRI_BACKEND" in inspect.getsource(parallel.TensorParallel.join)
    for name in ("PADDLE_DISTRI_BACKEND", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "FLAGS_selected_gpus"):
        assert name in source, name


def test_the_device_is_the_one_that_the_launcher_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle.base.core, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setitem(os.environ, "FLAGS_selected_gpus", "3")
    assert dist.ParallelEnv().device_id == 3
