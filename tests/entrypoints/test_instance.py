"""What a server works out from the installed Paddle before it starts anything."""

from __future__ import annotations

import pytest

from fastengine.config import CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET, ConfigError, EngineConfig
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


@pytest.mark.parametrize(
    ("package", "flags", "problem"),
    [
        (instance.CPU_PACKAGE, {"device": "gpu"}, "built without CUDA; install paddlepaddle-gpu"),
        (instance.CPU_PACKAGE, {"dtype": "bfloat16"}, "no bfloat16 matrix product on a CPU"),
        (instance.CPU_PACKAGE, {"max_capture_batch_size": 8}, "no CUDA graphs on a CPU"),
        (instance.GPU_PACKAGE, {"device": "cpu", "max_capture_batch_size": 0}, "no CUDA graphs on a CPU"),
        (instance.GPU_PACKAGE, {"dtype": "float32"}, "the CUDA operators compute in bfloat16 or float16"),
    ],
)
def test_what_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch, package: str, flags: dict[str, str], problem: str) -> None:
    monkeypatch.setattr(instance, "paddle_package", lambda: package)
    with pytest.raises(ConfigError, match=problem):
        instance.check_device(EngineConfig.from_flags(model="m", **flags))


def test_what_the_device_has_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, flags in (
        (instance.CPU_PACKAGE, {}),
        (instance.GPU_PACKAGE, {"dtype": "bfloat16", "max_capture_batch_size": 8}),
        (instance.GPU_PACKAGE, {"device": "cpu", "dtype": "float32"}),
    ):
        monkeypatch.setattr(instance, "paddle_package", lambda package=package: package)
        instance.check_device(EngineConfig.from_flags(model="m", **flags))
