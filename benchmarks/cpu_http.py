"""The same model over HTTP: fastengine's server and the peers' own, loaded in turn by one client."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import bench_serving

from benchmarks.cpu_peers import PEERS, PeerUnavailable, peer_server
from benchmarks.local_server import local_server, process_tree


def measure_http(model: str, threads: int, peers: list[str], rounds: int, streams: list[int], requests: list[str]) -> None:
    """Print a table of tokens per second, time to first token and between tokens, and what each server holds in memory.

    ``requests``: flags of bench_serving.py that say what is sent.
    """
    with contextlib.ExitStack() as servers:
        own = servers.enter_context(local_server(model, ["--cpu-threads", str(threads)]))
        urls = ["--url", f"fastengine={own.url}"]
        pids = {"fastengine": [process.pid for process in own.processes()]}
        for name in peers:
            try:
                PEERS[name].install()
                url, pid = servers.enter_context(peer_server(PEERS[name], model, threads, max(streams)))
            except PeerUnavailable as reason:
                print(f"{name}: not measured over HTTP: {reason}")
                continue
            urls += ["--url", f"{name}={url}"]
            pids[name] = [process.pid for process in process_tree(pid)]
        idle = {name: memory_mib(own_pids) for name, own_pids in pids.items()}
        load = ["--requests-per-stream", "2", "--output-tokens", "64", "--ignore-eos", "--rounds", str(rounds)]
        args = bench_serving.parse_args([*urls, "--concurrency", *map(str, streams), *load, *requests])
        cells = bench_serving.event_loop_run(bench_serving.run(args, lambda line: print(line, file=sys.stderr, flush=True)))
        print(bench_serving.markdown(cells))
        for name, own_pids in pids.items():
            print(f"{name}: {idle[name]} MiB before the load, {memory_mib(own_pids)} after it")


def memory_mib(pids: list[int]) -> int:
    """Resident memory of processes, a page that several share counted once (their proportional set sizes)."""
    total_kib = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total_kib += int(line.split()[1])
    return total_kib >> 10
