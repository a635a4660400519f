"""From the command to the first token: what a person who starts the server waits.

``python benchmarks/bench_start.py --model FILE.gguf`` starts the server several times and asks it for a
streamed answer until one begins. The packed weights of the first start are kept in a directory of the
benchmark's own, so the first row packs them and the others find them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.local_server import STOP_TIMEOUT_S, free_port
from fastengine.ipc.process import tied_to_parent

RETRY_S = 0.01
BODY = json.dumps({"messages": [{"role": "user", "content": "Count from 1 to 20."}], "max_tokens": 4, "temperature": 0, "stream": True})


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds from starting the server to its first token.")
    parser.add_argument("--model", required=True, help="GGUF file or model directory.")
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="Longest a start may take.")
    parser.add_argument("flags", nargs="*", help="Further flags for the server, after --.")
    args = parser.parse_args()
    seconds = []
    with tempfile.TemporaryDirectory() as packed:
        for number in range(args.starts):
            seconds.append(seconds_to_first_token([*args.flags, "--model", args.model, "--packed-cache-dir", packed], args.timeout))
            print(f"start {number + 1}: first token after {seconds[-1]:.2f} s", flush=True)
    if len(seconds) > 1:
        print(f"median from the second on {statistics.median(seconds[1:]):.2f} s")
    return 0


def seconds_to_first_token(flags: list[str], timeout_s: float) -> float:
    """Start a server, wait for a token, end it. Raises RuntimeError when the server ends or is too slow."""
    port = free_port()
    started = time.perf_counter()
    command = [sys.executable, "-m", "fastengine.entrypoints.api_server", "--port", str(port), *flags]
    process = subprocess.Popen(tied_to_parent(command), stdout=subprocess.DEVNULL)
    try:
        while time.perf_counter() - started < timeout_s:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with code {process.returncode}")
            if _streams_a_token(port, timeout_s):
                return time.perf_counter() - started
            time.sleep(RETRY_S)  # nothing else tells that a port has begun to answer
        raise RuntimeError(f"no token within {timeout_s:g} s")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _streams_a_token(port: int, timeout_s: float) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            return False
        while line := reply.readline():
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return True
        return False
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
