"""docs/rl.md, run as it stands: outputs change exactly when the weights do."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fastengine.rl import BFloat16, ControlClient, ControlFailed, shared_tensors
from tests.e2e.conftest import TINY
from tests.server import Server

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "rl.md"
PROMPT = [5, 9, 11]


def read_tensor(name: str) -> np.ndarray:
    data = (TINY / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    entry = json.loads(data[8 : 8 + length])[name]
    start, stop = entry["data_offsets"]
    return np.frombuffer(data[8 + length + start : 8 + length + stop], dtype=np.float32).reshape(entry["shape"])


def documented(server: Server) -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code.replace("http://127.0.0.1:8188", server.url), str(DOCUMENT), "exec"), names)
    return names


@pytest.fixture
def control(tiny_server: Server) -> Any:
    client = ControlClient(tiny_server.url)
    yield client
    with client.paused("abort"):
        client.update_weights(version="original")


def tokens(server: Server) -> list[int]:
    body = {"model": "default", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()["choices"][0]["completion_token_ids"]


def test_the_documented_loop_runs_and_every_answer_names_its_weights(tiny_server: Server, control: ControlClient) -> None:
    names = documented(tiny_server)
    layers = {f"model.layers.{i}.mlp.down_proj.weight": read_tensor(f"model.layers.{i}.mlp.down_proj.weight") * 40 for i in range(2)}
    answers = names["loop"](layers, "hello", 2)
    assert [version for _, version in answers[1:]] == ["step-1", "step-2"]
    assert len({text for text, _ in answers}) > 1


def test_outputs_change_exactly_when_the_weights_do(tiny_server: Server, control: ControlClient) -> None:
    name = "lm_head.weight"
    head = read_tensor(name)
    before, checksum = tokens(tiny_server), control.weights_checksum()
    with control.paused():
        control.push_tensors({name: head}, version="same")
    assert (tokens(tiny_server), control.weights_checksum()) == (before, checksum)
    with control.paused():
        control.push_tensors({name: head[::-1].copy()}, version="turned round")
    changed = tokens(tiny_server)
    assert changed != before
    assert changed[0] == len(head) - 1 - before[0]
    assert control.weights_checksum() != checksum
    with control.paused():
        control.push_tensors({name: head}, version="back")
    assert (tokens(tiny_server), control.weights_checksum()) == (before, checksum)


def test_a_refused_push_names_the_tensor_and_changes_nothing(tiny_server: Server, control: ControlClient) -> None:
    before = tokens(tiny_server)
    head = read_tensor("lm_head.weight")
    with pytest.raises(ControlFailed, match="409"):
        control.push_tensors({"lm_head.weight": head})
    with control.paused():
        for bad in ({"no.such.tensor": head}, {"lm_head.weight": head[:-1]}, {"lm_head.weight": head, "model.norm.weight": head}):
            with pytest.raises(ControlFailed, match=r"no\.such\.tensor|lm_head\.weight|model\.norm\.weight") as refused:
                control.push_tensors(bad)
            assert refused.value.code == 400
    assert tokens(tiny_server) == before


def test_shared_tensors_leave_nothing_behind_and_take_bfloat16(tmp_path: Path) -> None:
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    with shared_tensors({"a": BFloat16(bits), "b": np.zeros((0, 4), np.float32)}, tmp_path) as path:
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        assert header["a"] == {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
        assert data[8 + length :] == bits.tobytes()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="complex64"), shared_tensors({"c": np.zeros(2, np.complex64)}, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
