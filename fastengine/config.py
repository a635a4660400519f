"""EngineConfig: one tree of frozen dataclasses. Every command line flag is a field with its help text.

The same tree is read by every process: the supervisor parses it once, writes it into the instance's
runtime directory, and the others load it from there (:meth:`EngineConfig.to_json`). Flag names are
FastDeploy's where it has one. Precedence: command line, then ``--config FILE.yaml``, then defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

DEFAULT_KV_STORAGE_GIB = 16.0
DEFAULT_PACKED_CACHE_DIR = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fastengine", "packed")
# A step's length is what running streams, pauses and aborts wait for. A CPU is busy from a few dozen rows on and takes
# some 0.1 s for this many; a GPU needs more rows to be busy and has them done sooner.
CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET = 512, 2048
# How long a run of decodes may be: as long as a stream's reader doesn't notice. Each message costs the step a core for most of a millisecond.
DEFAULT_DECODE_RUN_MS, MAX_DECODE_RUN_MS = 25.0, 1000.0
OTEL_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
TEXT_TO_BOOL = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class ConfigError(ValueError):
    """A setting that can't be used; ``name`` is the field as the user wrote it (``max_model_len``)."""

    def __init__(self, name: str, message: str):
        super().__init__(f"--{name.replace('_', '-')}: {message}")
        self.name = name


def flag(default: Any, help: str, *, metavar: str | None = None, secret: bool = False) -> Any:
    """A dataclass field that is also a command line flag. Secrets are left out of ``/config-info``."""
    metadata = {"help": help, "metavar": metavar, "secret": secret}
    return field(default=default, metadata=metadata)


def require(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise ConfigError(name, message)


def require_positive(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        require(value is None or value > 0, name, f"must be greater than 0, got {value}")


def _is_installed(*modules: str) -> bool:
    try:
        return all(importlib.util.find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # not even the package it would be in
        return False


@dataclass(frozen=True)
class ModelConfig:
    """Model: what is served"""

    model: str = flag("", "Directory in Hugging Face layout (safetensors) or a GGUF file.", metavar="PATH")
    served_model_name: tuple[str, ...] = flag((), "Name(s) clients call the model by; default: the file or directory name.", metavar="NAME")
    tokenizer: str | None = flag(None, "Tokenizer directory or tokenizer.json; default: the model's own.", metavar="PATH")
    tokenizer_backend: Literal["auto", "tokenizers", "transformers", "paddlenlp", "paddleformers"] = flag("auto", "Library that reads the tokenizer.")
    chat_template: str | None = flag(None, "File with a Jinja chat template; default: the model's own.", metavar="FILE")
    tool_call_parser: str | None = flag(
        None, "How the model writes tool calls (hermes, llama3-json, mistral, ...); default: none are looked for.", metavar="NAME"
    )
    reasoning_parser: str | None = flag(
        None, "How the model marks its reasoning (qwen3, deepseek-r1, ...); default: it is not looked for.", metavar="NAME"
    )
    tool_parser_plugin: tuple[str, ...] = flag((), "Python file(s) that register further tool and reasoning parsers.", metavar="FILE")
    logprobs_mode: Literal["raw", "processed"] = flag(
        "raw", "Log-probabilities of what the model says, or after penalties, bias, grammar and temperature."
    )
    max_model_len: int | None = flag(None, "Longest prompt + output in tokens; default: the model's own context length.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag("auto", "Compute type; auto: float32 on a CPU, the checkpoint's on a GPU.")
    quantization: Literal["auto", "none", "wint8", "wint4"] = flag(
        "auto",
        "Bits that weights are computed with on a CPU; none: the compute type; auto: as a quantized GGUF file has them (wint4 for Q4_0 and Q4_1, else wint8), else none.",
    )
    device: Literal["auto", "cpu", "gpu"] = flag("auto", "Where the workers run; auto: what Paddle was compiled for.")
    load_format: Literal["auto", "safetensors", "gguf", "dummy", "null"] = flag(
        "auto", "dummy: random weights; null: a model without compute that always yields the same token, to measure everything around it."
    )
    null_step_time: float = flag(0.0, "Seconds a step of the null model takes, as if an accelerator computed: it sleeps.")
    packed_cache: bool = flag(
        True, "Keep quantized weights on disk as they are packed for this processor: the next start maps them instead of packing them again."
    )
    packed_cache_dir: str = flag(DEFAULT_PACKED_CACHE_DIR, "Directory for that.", metavar="DIR")
    packed_cache_gib: float = flag(16.0, "GiB that may be kept there; what was not used for longest goes first.")

    def __post_init__(self) -> None:
        require_positive(self, "max_model_len", "packed_cache_gib")
        require(0.0 <= self.null_step_time <= 60.0, "null_step_time", f"must be in 0..60, got {self.null_step_time}")
        require(not self.null_step_time or self.load_format == "null", "null_step_time", "is for --load-format null alone")
        require(all(name.strip() for name in self.served_model_name), "served_model_name", "must not be empty")


@dataclass(frozen=True)
class CacheConfig:
    """KV cache"""

    block_size: int = flag(64, "Tokens per KV block.")
    num_gpu_blocks_override: int | None = flag(None, "Number of KV blocks on the device (the CPU too); default: measured by the workers.")
    gpu_memory_utilization: float = flag(0.9, "Share of the device's memory that weights and KV may take together.")
    kv_cache_memory_gib: float | None = flag(None, "KV pool size per rank in GiB; CPU default: a quarter of free memory, at most 4.")
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"] = flag(
        "auto", "Element type of the KV cache; auto: int8 with quantized weights on a CPU, else the compute type; fp8 (e4m3) on GPUs."
    )
    enable_prefix_caching: bool = flag(True, "Reuse the KV of equal prefixes: whole blocks, and the beginning of one.")
    swap_space: float = flag(0.0, "Host memory in GiB that keeps evicted KV blocks; 0: none.")
    kv_storage_path: str | None = flag(
        None, "Directory for KV blocks that the host has no room for either; needs --swap-space. Emptied at the end.", metavar="DIR"
    )
    kv_storage_size: float | None = flag(None, f"GiB per rank that may be kept there; default: {DEFAULT_KV_STORAGE_GIB:g}.", metavar="GIB")

    def __post_init__(self) -> None:
        require(self.block_size in (8, 16, 32, 64, 128), "block_size", f"must be 8, 16, 32, 64 or 128, got {self.block_size}")
        require(0.0 < self.gpu_memory_utilization <= 1.0, "gpu_memory_utilization", f"must be in (0, 1], got {self.gpu_memory_utilization}")
        require(self.swap_space >= 0, "swap_space", f"must not be negative, got {self.swap_space}")
        require_positive(self, "num_gpu_blocks_override", "kv_cache_memory_gib", "kv_storage_size")
        require(self.kv_storage_size is None or self.kv_storage_path is not None, "kv_storage_size", "needs --kv-storage-path")
        require(self.swap_space == 0 or self.enable_prefix_caching, "swap_space", "needs prefix caching: what was swapped out is found by it alone")
        if self.kv_storage_path is not None:
            require(self.swap_space > 0, "kv_storage_path", "needs --swap-space: blocks reach the disk through the host's memory")

    @property
    def kv_storage_gib(self) -> float:
        """Bound of what each rank keeps in files, if it keeps anything there."""
        return self.kv_storage_size or DEFAULT_KV_STORAGE_GIB


@dataclass(frozen=True)
class SchedulerConfig:
    """Scheduling"""

    max_num_seqs: int = flag(64, "Most sequences in one step.")
    max_num_batched_tokens: int | None = flag(None, "Token budget of one step; default: 512 on a CPU, 2048 on a GPU, --max-num-seqs if that is more.")
    max_capture_batch_size: int | None = flag(
        None, "Most sequences of a decode step that is captured as a CUDA graph (on GPUs); 0: none; default: --max-num-seqs, at most 512."
    )
    max_num_partial_prefills: int = flag(4, "Most prompts that are prefilled in chunks at the same time.")
    long_prefill_token_threshold: int = flag(1024, "Longest piece of one prompt in a step while others wait; 0: no limit.")
    scheduling_policy: Literal["fcfs", "priority"] = flag("fcfs", "Order of waiting requests.")
    max_waiting_requests: int = flag(4096, "Waiting requests past which new ones get 429.")
    max_queued_tokens: int = flag(8_388_608, "Prompt tokens waiting past which new requests get 429.")
    max_waiting_time: float | None = flag(None, "Seconds a request may wait before it gets 503; default: its own timeout.")
    overlap: bool = flag(True, "Prepare the next step while the workers run this one.")
    decode_run_ms: float | None = flag(
        None,
        "Milliseconds of decoding that workers do at a stretch while no request waits, to the nearest step, several tokens a message; 0: one step at a time; "
        f"default: {DEFAULT_DECODE_RUN_MS:g} with the fused CPU step, else 0.",
    )

    def __post_init__(self) -> None:
        require_positive(
            self,
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_partial_prefills",
            "max_waiting_requests",
            "max_queued_tokens",
            "max_waiting_time",
        )
        run_ms = self.decode_run_ms or 0.0
        require(0.0 <= run_ms <= MAX_DECODE_RUN_MS, "decode_run_ms", f"must be in 0..{MAX_DECODE_RUN_MS:g}, got {run_ms:g}")
        require((self.max_capture_batch_size or 0) >= 0, "max_capture_batch_size", "must not be negative")
        require(self.long_prefill_token_threshold >= 0, "long_prefill_token_threshold", "must not be negative")
        require(
            self.max_num_batched_tokens is None or self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            f"({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs})",
        )

    @property
    def token_budget(self) -> int:
        return self.max_num_batched_tokens or max(GPU_TOKEN_BUDGET, self.max_num_seqs)


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism and workers"""

    tensor_parallel_size: int = flag(1, "Ranks that share every layer.")
    cpu_threads: int | None = flag(None, "Threads per worker on a CPU; default: cores divided by ranks.")
    worker_start_timeout: float = flag(600.0, "Seconds the workers may take to load.")
    worker_log_dir: str | None = flag(None, "Directory for the workers' logs; default: in the runtime directory.", metavar="DIR")
    max_worker_restarts: int = flag(5, "Worker crashes within ten minutes after which the engine gives up.")
    watchdog_timeout: float = flag(
        300.0, "Seconds a step, a command, a thread with work or a whole process may stand still before that process counts as dead; 0: never."
    )

    def __post_init__(self) -> None:
        require_positive(self, "tensor_parallel_size", "cpu_threads", "worker_start_timeout")
        require(self.max_worker_restarts >= 0, "max_worker_restarts", "must not be negative")
        require(self.watchdog_timeout >= 0, "watchdog_timeout", "must not be negative")


@dataclass(frozen=True)
class ServerConfig:
    """HTTP server"""

    host: str = flag("127.0.0.1", "Address to listen on.")
    port: int = flag(8188, "Port to listen on.")
    api_workers: int = flag(1, "Front-end processes (HTTP, templates, tokenizing).")
    api_key: tuple[str, ...] = flag((), "Key(s) a client must send as 'Authorization: Bearer KEY'.", metavar="KEY", secret=True)
    control_api: bool = flag(True, "Serve the control API (pause, resume, update weights, ...).")
    control_api_key: tuple[str, ...] = flag((), "Key(s) for the control API; default: those of --api-key.", metavar="KEY", secret=True)
    max_body_mib: float = flag(32.0, "Largest request body in MiB; past it 413.")
    request_read_timeout: float = flag(60.0, "Seconds a client may take to send a request, headers and body; past it 408.")
    max_connections: int = flag(4096, "Open connections per API process past which new ones get 503.")
    request_timeout: float = flag(1800.0, "Seconds after which a request that sets no timeout_s ends with an error.")
    strict_fields: bool = flag(False, "Refuse unknown fields with 400 instead of naming them in a warning header.")
    reject_while_paused: bool = flag(False, "Answer 503 with Retry-After while paused instead of queueing.")
    max_stored_responses: int = flag(1024, "Responses of /v1/responses kept for later requests, in memory, the oldest dropped first; 0: none.")
    stored_responses_mib: float = flag(64.0, "Memory in MiB that the kept responses may take.")
    shutdown_timeout: float = flag(30.0, "Seconds that running requests get to finish after SIGTERM.")
    restart_engine: bool = flag(False, "Start a crashed engine process again instead of exiting.")
    cors_origins: tuple[str, ...] = flag((), "Origins allowed by CORS; default: none.", metavar="ORIGIN")
    ssl_certfile: str | None = flag(None, "TLS certificate file.", metavar="FILE")
    ssl_keyfile: str | None = flag(None, "TLS key file.", metavar="FILE")

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "port", f"must be in 0..65535, got {self.port}")
        require_positive(self, "api_workers", "max_body_mib", "request_read_timeout", "max_connections", "request_timeout", "stored_responses_mib")
        for name in ("api_key", "control_api_key"):
            require(all(key.strip() for key in getattr(self, name)), name, "an empty key is no key: leave the flag out to ask for none")
        require(self.max_stored_responses >= 0, "max_stored_responses", "must not be negative")
        require(self.shutdown_timeout >= 0, "shutdown_timeout", "must not be negative")
        require((self.ssl_certfile is None) == (self.ssl_keyfile is None), "ssl_keyfile", "needs --ssl-certfile, and the other way round")


@dataclass(frozen=True)
class ObservabilityConfig:
    """Logs and metrics"""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = flag("INFO", "Least severe level that is logged.")
    log_requests: bool = flag(False, "One structured line per finished request.")
    check_invariants: bool = flag(False, "Assert the KV accounting after every step (slow; for tests).")
    crash_dump_dir: str | None = flag(
        None, "Directory for crash reports: the requests of the last five minutes, configuration and tracebacks, as JSON lines.", metavar="DIR"
    )
    otlp_endpoint: str | None = flag(
        None, "OpenTelemetry collector that takes spans over HTTP (http://host:4318); needs the extra 'otel'.", metavar="URL"
    )
    dump_requests: int = flag(0, "Write every N finished requests to --crash-dump-dir, for 'fastengine replay'; 0: none.", metavar="N")

    def __post_init__(self) -> None:
        endpoint = self.otlp_endpoint
        require(endpoint is None or endpoint.startswith(("http://", "https://")), "otlp_endpoint", f"must be an http(s) URL, got {endpoint!r}")
        require(endpoint is None or _is_installed(*OTEL_MODULES), "otlp_endpoint", "needs the extra 'otel': pip install 'fastengine[otel]'")
        require(self.dump_requests >= 0, "dump_requests", "must not be negative")
        require(not self.dump_requests or self.crash_dump_dir is not None, "dump_requests", "needs --crash-dump-dir to write to")


@dataclass(frozen=True)
class EngineConfig:
    """The whole configuration: one section per concern, each a frozen dataclass of flags."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    def __post_init__(self) -> None:
        require(not self.cache.swap_space or self.model.load_format != "null", "swap_space", "the null model keeps no KV to swap")

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> EngineConfig:
        return msgspec.json.decode(data, type=EngineConfig)

    @staticmethod
    def from_flags(**values: Any) -> EngineConfig:
        """Build from flat flag names (``max_model_len=512``), as the command line and ``LLM()`` do.

        Raises ConfigError that names an unknown or unusable flag.
        """
        sections: dict[str, Any] = {}
        for section in dataclasses.fields(EngineConfig):
            section_type = SECTIONS[section.name]
            hints = typing.get_type_hints(section_type)
            chosen = {f.name: _converted(f.name, values.pop(f.name), hints[f.name]) for f in dataclasses.fields(section_type) if f.name in values}
            sections[section.name] = section_type(**chosen)
        for unknown in values:
            raise ConfigError(unknown, "no such setting")
        return EngineConfig(**sections)

    def flat(self, *, with_secrets: bool = False) -> dict[str, Any]:
        """Flag name -> value over all sections; secrets as ``"***"`` unless asked for."""
        out: dict[str, Any] = {}
        for section in dataclasses.fields(self):
            part = getattr(self, section.name)
            for f in dataclasses.fields(part):
                value = getattr(part, f.name)
                out[f.name] = "***" if f.metadata["secret"] and value and not with_secrets else value
        return out


SECTIONS: dict[str, type] = typing.get_type_hints(EngineConfig)


def _converted(name: str, value: Any, hint: Any) -> Any:
    """``value`` (from Python, YAML or the command line) as the type ``hint`` says, or ConfigError."""
    if value is not None and typing.get_origin(hint) is tuple and isinstance(value, str | int | float):
        value = (value,)
    if isinstance(value, str) and _plain_type(hint) is bool:
        value = TEXT_TO_BOOL.get(value.lower(), value)
    try:
        return msgspec.convert(value, hint, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else None
        allowed = f"; choose from {', '.join(map(str, choices))}" if choices else ""
        raise ConfigError(name, f"{value!r} is not usable: {error}{allowed}") from None


def _plain_type(hint: Any) -> Any:
    """``int`` for ``int | None``, ``str`` for ``tuple[str, ...]``, the hint itself otherwise."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0]
    return hint


def add_flags(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Add every field of EngineConfig to ``parser`` as a flag, grouped by section, plus ``--config``."""
    parser.add_argument("--config", metavar="FILE.yaml", help="YAML file of flag names and values; the command line wins.")
    for section_name, section_type in SECTIONS.items():
        if section_name in leave_out:
            continue
        group = parser.add_argument_group(section_type.__doc__ or section_name)
        hints = typing.get_type_hints(section_type)
        for f in dataclasses.fields(section_type):
            _add_flag(group, f, hints[f.name])


def _add_flag(group: Any, f: dataclasses.Field[Any], hint: Any) -> None:
    names = ["--" + f.name.replace("_", "-")]
    text = f.metadata["help"].replace("%", "%%")
    if f.default not in (None, (), ""):
        text += f" Default: {str(f.default).lower() if isinstance(f.default, bool) else f.default}."
    kind: dict[str, Any]
    if hint is bool:
        kind = {"action": argparse.BooleanOptionalAction}
    elif typing.get_origin(hint) is tuple:
        kind = {"nargs": "+", "action": "extend", "metavar": f.metadata["metavar"]}
    elif typing.get_origin(hint) is Literal:
        kind = {"metavar": "{" + ",".join(map(str, typing.get_args(hint))) + "}"}
    else:
        kind = {"metavar": f.metadata["metavar"] or _plain_type(hint).__name__.upper()}
    group.add_argument(*names, dest=f.name, default=argparse.SUPPRESS, help=text, **kind)


def parse_args(argv: Sequence[str] | None = None, *, prog: str = "fastengine.entrypoints.api_server") -> EngineConfig:
    """EngineConfig from a command line; on a bad value prints the field's name and exits with code 2."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {prog}",
        usage=f"python -m {prog} --model PATH [options]",
        description="Serve a language model over an OpenAI-compatible HTTP API.",
        allow_abbrev=False,
    )
    add_flags(parser)
    values = vars(parser.parse_args(argv))
    try:
        return config_from_values(values)
    except ConfigError as error:
        parser.error(str(error))


def config_from_values(values: dict[str, Any]) -> EngineConfig:
    """Merge ``--config`` (if among ``values``) under the other values and build the configuration."""
    values = dict(values)
    path = values.pop("config", None)
    from_file = _read_yaml(path) if path else {}
    _check_file(from_file)
    merged = {**from_file, **values}
    merged.setdefault("model", os.environ.get("FASTENGINE_MODEL_DIR", ""))
    return EngineConfig.from_flags(**merged)


def _check_file(values: dict[str, Any]) -> None:
    """Raise ConfigError for a name or value that can't be used, also where the command line overrides it."""
    hints = {name: hint for section in SECTIONS.values() for name, hint in typing.get_type_hints(section).items()}
    for name, value in values.items():
        if name == "config":
            raise ConfigError("config", "a configuration file can't name another one")
        if name not in hints:
            raise ConfigError(name, "no such setting")
        _converted(name, value, hints[name])


def _read_yaml(path: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError("config", f"{path} is not UTF-8: byte {error.start} can't be read") from None
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError("config", f"can't read {path}: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(k, str) for k in content):
        raise ConfigError("config", f"{path} must map flag names to values")
    return {key.replace("-", "_"): value for key, value in content.items()}
