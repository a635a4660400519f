"""One running instance: its runtime directory and its engine process. Shared by the server and by LLM."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from fastengine.config import CPU_TOKEN_BUDGET, ConfigError, EngineConfig
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.model_files.architectures import ARCHITECTURES
from fastengine.model_files.gguf_header import read_gguf
from fastengine.model_files.load import ModelFileError, load_spec, weight_files
from fastengine.model_files.safetensors_header import read_safetensors_header
from fastengine.model_files.spec import ModelSpec
from fastengine.protocol.outputs import EngineStatus

logger = logging.getLogger(__name__)

# What the engine may take beyond the drain time to end its workers.
STOP_MARGIN_S = 10.0
GPU_PACKAGE, CPU_PACKAGE = "paddlepaddle-gpu", "paddlepaddle"


def check_config(config: EngineConfig) -> None:
    """Refuse, before anything is started, what can be known to fail. Raises ConfigError naming the flag."""
    path = config.model.model
    if not path:
        raise ConfigError("model", "is required: a directory in Hugging Face layout or a GGUF file (or set FASTENGINE_MODEL_DIR)")
    if not Path(path).exists():
        raise ConfigError("model", f"{path} does not exist")
    try:
        spec = load_spec(path)
    except ModelFileError as error:
        raise ConfigError("model", str(error)) from None
    check_model(config, spec)
    check_device(config)
    longest = config.model.max_model_len
    if longest is not None and longest > spec.max_position_embeddings:
        raise ConfigError("max_model_len", f"{longest} exceeds the model's own {spec.max_position_embeddings} positions")
    if config.observability.crash_dump_dir is not None:
        check_writable(config.observability.crash_dump_dir)
    ranks = config.parallel.tensor_parallel_size
    if spec.num_attention_heads % ranks:
        raise ConfigError("tensor_parallel_size", f"{ranks} ranks can't share {spec.num_attention_heads} attention heads evenly")


def check_model(config: EngineConfig, spec: ModelSpec) -> None:
    """Refuse an architecture that can't be built and weight files that can't be loaded. Raises ConfigError."""
    if config.model.load_format == "null":
        return
    if spec.architecture not in ARCHITECTURES:
        raise ConfigError("model", f"architecture {spec.architecture} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}")
    if config.model.load_format == "dummy":
        return
    try:
        for file in weight_files(config.model.model):
            if file.suffix == ".safetensors":
                read_safetensors_header(file)
            else:
                read_gguf(file)
    except ModelFileError as error:
        raise ConfigError("model", str(error)) from None


def check_device(config: EngineConfig) -> None:
    """Refuse what the installed Paddle can't do, as its package's name tells. Raises ConfigError."""
    if config.model.device == "gpu" and paddle_package() == CPU_PACKAGE:
        raise ConfigError("device", f"the installed Paddle is built without CUDA; install {GPU_PACKAGE} or use --device cpu")
    if runs_on_cpu(config) and config.model.dtype not in ("auto", "float32"):
        raise ConfigError("dtype", f"Paddle has no {config.model.dtype} matrix product on a CPU; use float32")
    if runs_on_cpu(config) and config.scheduler.max_capture_batch_size is not None:
        raise ConfigError("max_capture_batch_size", "there are no CUDA graphs on a CPU")
    if runs_on_gpu(config) and config.model.dtype == "float32":
        raise ConfigError("dtype", "the CUDA operators compute in bfloat16 or float16")


def runs_on_cpu(config: EngineConfig) -> bool:
    return config.model.device == "cpu" or (config.model.device == "auto" and paddle_package() == CPU_PACKAGE)


def runs_on_gpu(config: EngineConfig) -> bool:
    return config.model.device == "gpu" or (config.model.device == "auto" and paddle_package() == GPU_PACKAGE)


def with_device_defaults(config: EngineConfig) -> EngineConfig:
    """``config`` with what depends on the device filled in, so that every process and ``/config-info`` say the same."""
    scheduler = config.scheduler
    budget = scheduler.max_num_batched_tokens
    if budget is None:
        budget = max(CPU_TOKEN_BUDGET, scheduler.max_num_seqs) if runs_on_cpu(config) else scheduler.token_budget
    return dataclasses.replace(config, scheduler=dataclasses.replace(scheduler, max_num_batched_tokens=budget))


def paddle_package() -> str | None:
    """The installed Paddle's package, from its metadata: importing it takes a second and hundreds of megabytes."""
    for name in (GPU_PACKAGE, CPU_PACKAGE):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return None


def check_text(config: EngineConfig) -> None:
    """Refuse a tokenizer, chat template or parser that can't be used. Raises ConfigError.

    They are loaded by a child that is forked for it, so that their memory goes with it: the caller must be a
    process without other threads.
    """
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_fd)
        try:
            os.write(write_fd, _problem_with_text(config).encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        problem = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    if problem:
        flag, _, message = problem.partition("\n")
        raise ConfigError(flag, " ".join(message.split()))


def _problem_with_text(config: EngineConfig) -> str:
    """The flag to blame, a line's end, and what is wrong; empty if nothing is."""
    from fastengine.frontend.text_service import load_model_text
    from fastengine.text.chat_template import ChatTemplateError
    from fastengine.text.plugins import ParserError
    from fastengine.text.tokenizer import TokenizerError

    model = config.model
    try:
        load_model_text(model)
    except ChatTemplateError as error:
        return f"{'chat_template' if model.chat_template else 'model'}\n{error}"
    except TokenizerError as error:
        return f"{'tokenizer' if model.tokenizer else 'model'}\n{error}"
    except ParserError as error:
        return f"{_parser_flag(str(error))}\n{error}"
    except (ValueError, OSError) as error:
        return f"model\n{error}"
    return ""


def _parser_flag(message: str) -> str:
    if "plug-in" in message:
        return "tool_parser_plugin"
    return "reasoning_parser" if "reasoning" in message else "tool_call_parser"


def warn_of_few_blocks(config: EngineConfig) -> None:
    """Say so when ``--num-gpu-blocks-override`` can't hold one sequence of the longest length: such requests are refused."""
    num_blocks, block_size = config.cache.num_gpu_blocks_override, config.cache.block_size
    if num_blocks is None:
        return
    longest = config.model.max_model_len or load_spec(config.model.model).max_position_embeddings
    if num_blocks * block_size + 1 < longest:
        logger.warning(
            "--num-gpu-blocks-override %d: the blocks hold %d tokens, less than the model's context of %d: longer requests are refused",
            num_blocks,
            num_blocks * block_size,
            longest,
        )


def check_writable(directory: str) -> None:
    """Make ``--crash-dump-dir`` if need be. Raises ConfigError."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("crash_dump_dir", f"{directory} can't be made: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError("crash_dump_dir", f"{directory} is not writable")


class EngineProcess:
    """Handle on the engine process: starting it, its statuses, ending it."""

    def __init__(self, runtime: RuntimeDir):
        """Start it. Must be called by a thread that lives as long as the engine shall."""
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "fastengine.engine", "--runtime-dir", str(runtime.path)]
        command += ["--status-fd", str(write_fd), "--parent-pid", str(os.getpid())]
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[write_fd], start_new_session=True)
        finally:
            os.close(write_fd)
        self.status_fd = read_fd
        self._unparsed = b""
        self.last_status = EngineStatus(state="starting")

    def read_statuses(self) -> list[EngineStatus]:
        """Statuses that have come; call it when ``status_fd`` is readable. Empty at the engine's end."""
        data = os.read(self.status_fd, 65536)
        *lines, self._unparsed = (self._unparsed + data).split(b"\n")
        statuses = [msgspec.json.decode(line, type=EngineStatus) for line in lines]
        if statuses:
            self.last_status = statuses[-1]
        return statuses

    def terminate(self) -> None:
        """Have it finish what runs, within ``--shutdown-timeout``, and end."""
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Have it end: nobody waits for an answer any more."""
        self.process.send_signal(signal.SIGUSR2)

    def wait(self, timeout_s: float) -> int:
        """Its exit code; it is killed when it takes longer than ``timeout_s``."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        os.close(self.status_fd)


def create_runtime(config: EngineConfig) -> RuntimeDir:
    """The instance's directory with the configuration every process loads."""
    runtime = RuntimeDir.create()
    file = runtime.file("config.json")
    file.touch(mode=0o600)
    file.write_bytes(config.to_json())
    return runtime
