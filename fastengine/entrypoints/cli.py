"""``fastengine``: serve a model, steer a running server, or replay recorded requests."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fastengine.entrypoints.ctl import COMMANDS, control
from fastengine.entrypoints.replay import replay
from fastengine.version import __version__

DEFAULT_URL = "http://127.0.0.1:8188"


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=os.environ.get("FASTENGINE_URL", DEFAULT_URL), help="the server (default: %(default)s, or FASTENGINE_URL)")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] == "serve":  # all its flags are the server's own
        from fastengine.entrypoints.api_server import main as serve

        return serve(argv[1:])
    parser = argparse.ArgumentParser(prog="fastengine", description="Serve language models with PaddlePaddle, and steer running servers.")
    parser.add_argument("--version", action="version", version=f"fastengine {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="start a server; the same as python -m fastengine.entrypoints.api_server (see 'fastengine serve --help')")
    ctl = commands.add_parser("ctl", help="send a control command to a running server")
    _add_url(ctl)
    ctl.add_argument("--key", default=os.environ.get("FASTENGINE_CONTROL_API_KEY"), help="control API key (default: FASTENGINE_CONTROL_API_KEY)")
    ctl.add_argument("--timeout", type=float, default=660.0, help="seconds to wait for the answer (default: %(default)s)")
    names = ctl.add_subparsers(dest="name", required=True)
    for name, (_, _, text) in COMMANDS.items():
        sub = names.add_parser(name, help=text)
        sub.add_argument("arguments", nargs="*", metavar="key=value", help=text)
    again = commands.add_parser("replay", help="send the requests of a --dump-requests file or a crash report again")
    again.add_argument("file", metavar="FILE", help="JSON lines as written to --crash-dump-dir")
    _add_url(again)
    again.add_argument("--key", default=os.environ.get("FASTENGINE_API_KEY"), help="API key (default: FASTENGINE_API_KEY)")
    again.add_argument("--concurrency", type=int, default=8, help="most requests at a time (default: %(default)s)")
    again.add_argument("--keep-timing", action="store_true", help="send each request when it arrived, relative to the first")
    again.add_argument("--timeout", type=float, default=600.0, help="seconds one request may take (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.command == "replay":
        return replay(args.file, args.url, args.key, concurrency=args.concurrency, keep_timing=args.keep_timing, timeout_s=args.timeout)
    return control(args.url, args.name, args.arguments, args.key, args.timeout)


if __name__ == "__main__":
    sys.exit(main())
