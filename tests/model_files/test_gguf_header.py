"""The GGUF reader: equal to the gguf package's on good files, a clear error on every damaged one."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastengine.model_files import ModelFileError, read_gguf
from fastengine.model_files.gguf_header import TENSOR_TYPES, is_gguf


def write_sample(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "ä", "好" * 50])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 1, 1])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, 2.0, 0.25])
    writer.add_tensor("token_embd.weight", np.arange(12, dtype=np.float32).reshape(4, 3))
    writer.add_tensor("half", np.arange(6, dtype=np.float16).reshape(1, 2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    write_sample(path)
    return path


def test_metadata_and_tensors(sample: Path) -> None:
    header = read_gguf(sample)
    assert header.version == 3
    metadata = header.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["llama.rope.freq_base"] == 10000.0
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 4
    assert list(tokens) == ["a", "", "ä", "好" * 50]
    assert tokens[2] == "ä"
    assert tokens[1:3] == ["", "ä"]
    assert tokens.byte_strings()[2] == "ä".encode()
    assert metadata["tokenizer.ggml.token_type"].tolist() == [1, 3, 1, 1]
    assert metadata["tokenizer.ggml.scores"].tolist() == [0.0, -1.5, 2.0, 0.25]
    info = header.tensors["token_embd.weight"]
    assert (info.shape, info.type_name, info.nbytes) == ((4, 3), "F32", 48)
    stored = np.fromfile(sample, np.float32, 12, offset=info.offset)
    np.testing.assert_array_equal(stored, np.arange(12))
    assert header.tensors["half"].shape == (1, 2, 3)


def test_tensor_types_agree_with_the_gguf_package() -> None:
    for type_id, (name, block_elements, block_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, block_elements, block_bytes)


@pytest.mark.model
def test_default_model_is_read_quickly_and_right(default_model: Path) -> None:
    read_gguf(default_model)
    start = time.process_time()
    header = read_gguf(default_model)
    assert time.process_time() - start < 0.15
    reference = gguf.GGUFReader(default_model)
    assert header.metadata["tokenizer.chat_template"] == reference.fields["tokenizer.chat_template"].contents()
    assert header.metadata["tokenizer.ggml.tokens"].to_list() == reference.fields["tokenizer.ggml.tokens"].contents()
    assert len(header.tensors) == len(reference.tensors)
    for tensor in reference.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.type_name, info.offset, info.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)


def test_every_truncation_is_refused(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    last = max(info.offset + info.nbytes for info in read_gguf(sample).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(last):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            read_gguf(cut)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_never_crash(sample: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(sample.read_bytes())
    header_end = min(info.offset for info in read_gguf(sample).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header_end - 8))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        content[position : position + len(patch)] = patch
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        header = read_gguf(path)
    except ModelFileError:
        return
    for info in header.tensors.values():
        assert info.offset + info.nbytes <= len(content)


def header_bytes(num_tensors: int, num_pairs: int, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs) + body + bytes(64)


def pair(key: bytes, type_id: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", type_id) + value


def tensor(name: bytes, dims: list[int], type_id: int, offset: int = 0) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


HUGE = 1 << 60
BAD_FILES = {
    "many tensors": (header_bytes(HUGE, 0), "tensors"),
    "many pairs": (header_bytes(0, HUGE), "metadata pairs"),
    "version": (header_bytes(0, 0, version=1), "version 1"),
    "big-endian": (header_bytes(0, 0, version=0x03000000), "big-endian"),
    "long string": (header_bytes(0, 1, pair(b"k", 8, struct.pack("<Q", HUGE))), "k goes past"),
    "long key": (header_bytes(0, 1, struct.pack("<Q", 1 << 20)), "damaged"),
    "long number array": (header_bytes(0, 1, pair(b"k", 9, struct.pack("<IQ", 4, HUGE))), "k goes past"),
    "long string array": (header_bytes(0, 1, pair(b"k", 9, struct.pack("<IQ", 8, HUGE))), "k goes past"),
    "string past the end in an array": (header_bytes(0, 1, pair(b"k", 9, struct.pack("<IQQ", 8, 1, HUGE))), "k goes past"),
    "deep arrays": (header_bytes(0, 1, pair(b"k", 9, struct.pack("<IQ", 9, 1) * 6)), "nested"),
    "value type": (header_bytes(0, 1, pair(b"k", 77, b"")), "value type 77"),
    "same key twice": (header_bytes(0, 2, pair(b"k", 0, b"\1") * 2), "twice"),
    "alignment": (header_bytes(0, 1, pair(b"general.alignment", 4, struct.pack("<I", 0))), "alignment"),
    "dimensions": (header_bytes(1, 0, tensor(b"t", [1] * 5, 0)), "5 dimensions"),
    "huge shape": (header_bytes(1, 0, tensor(b"t", [HUGE, HUGE], 0)), "truncated"),
    "empty dimension": (header_bytes(1, 0, tensor(b"t", [0, 4], 0)), "empty dimension"),
    "tensor type": (header_bytes(1, 0, tensor(b"t", [4], 999)), "unknown type 999"),
    "ragged block": (header_bytes(1, 0, tensor(b"t", [33], 3)), "no multiple"),
    "offset past the end": (header_bytes(1, 0, tensor(b"t", [4], 0, 1 << 62)), "truncated"),
    "same tensor twice": (header_bytes(2, 0, tensor(b"t", [4], 0) * 2), "twice"),
    "no magic": (b"PK\3\4" + bytes(100), "magic"),
    "empty": (b"", "too short"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file(name: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        read_gguf(path)


def test_a_directory_or_a_missing_file_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(ModelFileError, match="can't be read"):
            read_gguf(path)
        assert not is_gguf(path)
