"""Model runners in this process, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest

from fastengine.worker.model_host import ModelHost
from fastengine.worker.parallel import TensorParallel
from tests.worker.driver import Driver
from tests.worker.models import NUM_BLOCKS, config_for

paddle.set_grad_enabled(False)


def loaded_host(path: Path | str, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0, **flags: Any) -> ModelHost:
    host = ModelHost(config_for(path, **flags), TensorParallel(), num_threads=2)
    host.load(lambda share: None)
    host.init_cache(num_blocks, num_host_blocks)
    return host


def driver_of(host: ModelHost, num_blocks: int = NUM_BLOCKS) -> Driver:
    config = host.config
    return Driver(host.step, max_num_seqs=config.scheduler.max_num_seqs, block_size=config.cache.block_size, num_blocks=num_blocks)


@pytest.fixture(scope="session")
def llama_host(golden: Path) -> ModelHost:
    """The tiny golden Llama, loaded; tests may run requests on it but not change its weights."""
    return loaded_host(golden / "llama")


@pytest.fixture
def llama(llama_host: ModelHost) -> Driver:
    """A driver over an empty batch of the tiny golden Llama."""
    llama_host.init_cache(NUM_BLOCKS, 0)
    return driver_of(llama_host)


@pytest.fixture(scope="session")
def smollm2_host(default_model: Path) -> ModelHost:
    """In float32, as the recorded answers were computed."""
    return loaded_host(default_model, block_size=16, max_model_len=1024, quantization="none")


@pytest.fixture
def smollm2(smollm2_host: ModelHost) -> Driver:
    smollm2_host.init_cache(NUM_BLOCKS, 0)
    return driver_of(smollm2_host)


@pytest.fixture(scope="session")
def make_host() -> Callable[..., ModelHost]:
    return loaded_host
