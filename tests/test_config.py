"""Every flag is a field; a bad value is refused with the field's name; the tree survives the wire."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from fastengine.config import SECTIONS, ConfigError, EngineConfig, config_from_values, parse_args


def test_flags_reach_their_fields_and_the_tree_survives_json() -> None:
    config = parse_args(["--model", "m", "--max-model-len", "512", "--api-key", "a", "b", "--no-overlap", "--gpu-memory-utilization", "0.5"])
    assert (config.model.max_model_len, config.server.api_key, config.scheduler.overlap) == (512, ("a", "b"), False)
    assert EngineConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", "many"),
        ("max_model_len", "0"),
        ("max_num_seqs", "-1"),
        ("block_size", "17"),
        ("gpu_memory_utilization", "1.5"),
        ("port", "70000"),
        ("scheduling_policy", "lifo"),
        ("max_num_batched_tokens", "1"),
        ("api_workers", "0"),
        ("swap_space", "-1"),
        ("kv_storage_path", "d"),
        ("kv_storage_size", "1"),
        ("ssl_certfile", "x.pem"),
        ("null_step_time", "0.02"),  # without --load-format null
    ],
)
def test_a_bad_value_is_refused_by_its_flag_name(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_args(["--" + name.replace("_", "-"), value])
    assert exit_.value.code == 2
    flag = {"ssl_certfile": "--ssl-keyfile"}.get(name, "--" + name.replace("_", "-"))
    assert flag in capsys.readouterr().err


def test_yaml_lies_under_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max-model-len: 100\nmax_num_seqs: 7\nserved_model_name: [a, b]\n")
    config = config_from_values({"config": str(file), "max_num_seqs": "9"})
    assert (config.model.max_model_len, config.scheduler.max_num_seqs, config.model.served_model_name) == (100, 9, ("a", "b"))


@pytest.mark.parametrize("text", ["max_nun_seqs: 7", "- 1", "a: [", "max_num_seqs: [1]"])
def test_a_bad_yaml_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        config_from_values({"config": str(file)})


def test_unknown_settings_are_refused_and_abbreviations_too() -> None:
    with pytest.raises(ConfigError, match="--max-len"):
        EngineConfig.from_flags(max_len=5)
    with pytest.raises(SystemExit):
        parse_args(["--max-mod", "5"])


def test_every_field_has_help_and_secrets_stay_hidden() -> None:
    for section in SECTIONS.values():
        for field in dataclasses.fields(section):
            assert field.metadata["help"].endswith("."), field.name
    config = EngineConfig.from_flags(api_key=("k",))
    assert config.flat()["api_key"] == "***"
    assert config.flat(with_secrets=True)["api_key"] == ("k",)


def test_blocks_in_files_need_the_host_and_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="--kv-storage-path: needs --swap-space"):
        EngineConfig.from_flags(kv_storage_path="d")
    with pytest.raises(ConfigError, match="--swap-space: needs prefix caching"):
        EngineConfig.from_flags(kv_storage_path="d", swap_space=1, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="--kv-storage-size: must be greater than 0"):
        EngineConfig.from_flags(kv_storage_path="d", swap_space=1, kv_storage_size=0)
    with pytest.raises(ConfigError, match="--swap-space: the null model"):
        EngineConfig.from_flags(load_format="null", swap_space=1)
    assert EngineConfig.from_flags(kv_storage_path="d", swap_space=1, kv_storage_size=2).cache.kv_storage_gib == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x00\xff\n", "--config: .*is not UTF-8"),
        (b"config: other.yaml\n", "--config: a configuration file can't name another one"),
        (b"max-num-seqs: many\n", "--max-num-seqs: 'many' is not usable"),
        (b"no-such: 1\n", "--no-such: no such setting"),
        (b"a: b: c\n", "--config: can't read"),
        (b"- a\n", "--config: .*must map"),
    ],
)
def test_a_bad_configuration_file_is_one_line_even_where_flags_override_it(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with pytest.raises(SystemExit):
        parse_args(["--config", str(file), "--max-num-seqs", "5"])
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("usage:")]
    assert len([line for line in lines if line]) == 1
    assert re.search(words, lines[-1])


@pytest.mark.parametrize("name", ["api_key", "control_api_key", "served_model_name"])
def test_empty_names_and_keys_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        EngineConfig.from_flags(**{name: ("a", "")})
