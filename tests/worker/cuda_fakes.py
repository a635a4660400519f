"""Stand-ins for what the worker uses of CUDA: graphs that replay by computing again, memory of a card that isn't there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import paddle

from fastengine.custom_ops.cuda import ops
from fastengine.worker.cuda_memory import MemoryFigures
from fastengine.worker.cuda_plans import AttentionPlans, PlanMaker
from fastengine.worker.cuda_runtime import CudaRuntime
from fastengine.worker.model_host import ModelHost
from fastengine.worker.parallel import TensorParallel
from fastengine.worker.step_inputs import StepInputs
from tests.worker.models import config_for


class FakeGraph:
    """Records the one wrapped call between begin and end; a replay runs it again into the output of then."""

    def __init__(self, device: FakeDevice):
        self.device = device
        self.call: tuple[Callable[..., paddle.Tensor], tuple[Any, ...], paddle.Tensor] | None = None
        self.replays = 0

    def capture_begin(self) -> None:
        assert self.device.capturing is None
        assert not self.device.work_is_open, "a capture began before earlier work was waited for"
        self.device.capturing = self

    def capture_end(self) -> None:
        assert self.device.capturing is self
        self.device.capturing = None

    def replay(self) -> None:
        assert self.call is not None, "nothing was captured, or the graph was reset"
        function, args, output = self.call
        self.replays += 1
        output.copy_(function(*map(without_plans, args)), True)

    def reset(self) -> None:
        self.call = None


def without_plans(argument: Any) -> Any:
    """A graph makes its plans again at each replay."""
    if not isinstance(argument, StepInputs) or argument.plans is None:
        return argument
    return replace(argument, plans=AttentionPlans(argument.plans.make, argument.plans.max_query_tokens))


class FakeDevice:
    """Makes graphs, and records what runs while one is captured."""

    def __init__(self) -> None:
        self.capturing: FakeGraph | None = None
        self.graphs: list[FakeGraph] = []
        self.work_is_open = False
        self.eager_calls = 0

    def wrap(self, function: Callable[..., paddle.Tensor]) -> Callable[..., paddle.Tensor]:
        def recorded(*args: Any) -> paddle.Tensor:
            output = function(*args)
            if self.capturing is not None:
                assert self.capturing.call is None, "one call a graph"
                self.capturing.call = (function, args, output)
            else:
                self.work_is_open = True
                self.eager_calls += 1
            return output

        return recorded

    def new_graph(self) -> FakeGraph:
        self.graphs.append(FakeGraph(self))
        return self.graphs[-1]

    def synchronize(self) -> None:
        self.work_is_open = False


class FakeMemory:
    """Answers with the figures it was given, one after the other, and the last again and again."""

    def __init__(self, *figures: MemoryFigures):
        self._figures = list(figures)
        self.started = 0

    def start(self) -> None:
        self.started += 1

    def figures(self) -> MemoryFigures:
        return self._figures.pop(0) if len(self._figures) > 1 else self._figures[0]


PLENTY = MemoryFigures(total=1 << 34, free=1 << 34, reserved=0, peak_reserved=0)


def cuda_host(
    path: Path | str,
    device: FakeDevice,
    *,
    dtypes: tuple[str, ...] = ("float32",),
    head_sizes: tuple[int, ...] = (16,),
    make_plan: PlanMaker | None = None,
    memory: FakeMemory | None = None,
    **flags: Any,
) -> ModelHost:
    """A host that believes to be on a GPU, loaded, without a KV cache."""
    memory = memory or FakeMemory(PLENTY)
    runtime = CudaRuntime(dtypes, head_sizes, make_plan, ops.copy_blocks, lambda: device.new_graph, memory, device.synchronize)
    host = ModelHost(config_for(path, **{"dtype": "float32", **flags}), TensorParallel(), num_threads=2, cuda=runtime)
    assert host.model is not None
    host.model.forward = device.wrap(host.model.forward)  # type: ignore[method-assign]
    host.load(lambda share: None)
    return host
