"""``python -m fastengine.engine.launch_ranks PARENT_PID <paddle.distributed.launch arguments>``.

Runs ``paddle.distributed.launch`` in this process, after tying it to the engine's life.
"""

from __future__ import annotations

import runpy
import sys

from fastengine.ipc.process import die_with_parent


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    sys.argv = ["paddle.distributed.launch", *sys.argv[2:]]
    runpy.run_module("paddle.distributed.launch", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
