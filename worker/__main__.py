"""What paddle.distributed.launch starts, once per rank: ``worker/__main__.py --runtime-dir DIR --generation N``.

Paddle is imported only after the process has told its parent who it is and has chosen its threads:
Paddle's math library reads the environment when it is loaded.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from pathlib import Path

# Started as a script, Python puts this file's folder first on the path, where its modules would be found
# a second time under other names.
if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]

from fastengine.config import EngineConfig
from fastengine.ipc.process import die_with_parent, preempt_as_usual
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.ipc.worker_link import WorkerEnd
from fastengine.worker.failure import FAILURE_EXIT_CODE, report_failure

CONFIG_FILE = "config.json"


def cpu_threads(config: EngineConfig, num_ranks: int) -> int:
    """Threads of one rank: as configured, or its share of the processors this process may use."""
    return config.parallel.cpu_threads or max(1, len(os.sched_getaffinity(0)) // num_ranks)


def set_thread_environment(num_threads: int) -> None:
    """One OpenMP pool of ``num_threads``; the launcher's OMP_NUM_THREADS=1 is meant for training."""
    os.environ["MKL_NUM_THREADS"] = str(num_threads)
    # Left at 1: everything but the math library would only compete with the operators' own threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Milliseconds its threads spin for the next product: through a step, but not on into what follows.
    os.environ["KMP_BLOCKTIME"] = "1"


def main() -> int:
    parser = argparse.ArgumentParser(prog="fastengine.worker")
    parser.add_argument("--runtime-dir", required=True)
    parser.add_argument("--generation", required=True, type=int)
    args = parser.parse_args()
    die_with_parent(os.getppid())
    preempt_as_usual()  # which the engine, its parent's parent, does not
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the supervisor decides
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # "where are you?", answered on stderr
    rank, num_ranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    runtime_dir = RuntimeDir.join(args.runtime_dir)
    config = EngineConfig.from_json(runtime_dir.file(CONFIG_FILE).read_bytes())
    num_threads = cpu_threads(config, num_ranks)
    set_thread_environment(num_threads)
    link = WorkerEnd(runtime_dir.path, args.generation, rank, num_ranks)
    link.signals.set("pid", rank, os.getpid())

    try:
        from fastengine.worker.worker import run_worker
    except Exception as error:  # noqa: BLE001 - a broken installation: the engine shall hear of it, too
        report_failure(link, rank, error, phase="start")
        return FAILURE_EXIT_CODE
    return run_worker(config, link, rank=rank, num_ranks=num_ranks, num_threads=num_threads)


if __name__ == "__main__":
    sys.exit(main())
