"""``python -m fastengine.entrypoints.api_server``: serve a model over an OpenAI-compatible HTTP API."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fastengine.config import ConfigError, parse_args
from fastengine.entrypoints.instance import check_config, check_text, warn_of_few_blocks, with_device_defaults
from fastengine.entrypoints.supervisor import serve
from fastengine.observability.logs import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    config = parse_args(argv)
    setup_logging("server", config.observability.log_level)
    try:
        check_config(config)
        check_text(config)
        config = with_device_defaults(config)
        warn_of_few_blocks(config)
        return serve(config)
    except ConfigError as error:
        print(f"fastengine: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
