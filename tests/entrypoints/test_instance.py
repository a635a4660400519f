"""What a server works out from the installed Paddle before it starts anything."""

from __future__ import annotations

import pytest

from fastengine.config import CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET, EngineConfig
from fastengine.entrypoints import instance


@pytest.mark.parametrize(
    ("package", "device", "flags", "budget"),
    [
        (instance.CPU_PACKAGE, "auto", {}, CPU_TOKEN_BUDGET),
        (instance.GPU_PACKAGE, "auto", {}, GPU_TOKEN_BUDGET),
        (instance.GPU_PACKAGE, "cpu", {}, CPU_TOKEN_BUDGET),
        (instance.CPU_PACKAGE, "auto", {"max_num_seqs": CPU_TOKEN_BUDGET + 1}, CPU_TOKEN_BUDGET + 1),
        (instance.GPU_PACKAGE, "gpu", {"max_num_seqs": GPU_TOKEN_BUDGET + 1}, GPU_TOKEN_BUDGET + 1),
        (instance.CPU_PACKAGE, "auto", {"max_num_batched_tokens": 100}, 100),
    ],
)
def test_the_token_budget_depends_on_the_device_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch, package: str, device: str, flags: dict[str, int], budget: int
) -> None:
    monkeypatch.setattr(instance, "paddle_package", lambda: package)
    config = instance.with_device_defaults(EngineConfig.from_flags(model="m", device=device, **flags))
    assert config.scheduler.max_num_batched_tokens == config.scheduler.token_budget == budget
    assert EngineConfig.from_json(config.to_json()) == config
