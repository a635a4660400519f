"""Other engines on the same file: each in an environment of its own, driven by a small script of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = Path.home() / ".cache" / "fastengine" / "peers"


@dataclass(frozen=True)
class Peer:
    """``script`` takes model, threads, prefill length, prompt and output lengths and batch sizes, and prints one line of JSON: case -> tokens/s."""

    packages: tuple[str, ...]
    script: str


PEERS = {"openvino": Peer(("openvino-genai==2026.4.1.0", "numpy"), "cpu_peer_openvino.py")}


def install_peer(name: str) -> Path:
    """The Python of ``name``'s environment, made on first use."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"installing {name} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEERS[name].packages], check=True)
        (folder / "installed").touch()
    return python


def run_peer(name: str, python: Path, model: str, threads: int, prefill: int, prompt: int, output: int, batches: list[int]) -> dict[str, float]:
    """Tokens per second of ``prefill`` and of ``answers N`` for each batch size."""
    command = [str(python), str(HERE / PEERS[name].script), model, *map(str, (threads, prefill, prompt, output, *batches))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{name} failed:\n{result.stderr[-2000:]}")
    return {key: float(value) for key, value in json.loads(result.stdout.strip().splitlines()[-1]).items()}
