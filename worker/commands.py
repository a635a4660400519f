"""What a worker does beside steps: one handler per command, named as in WorkerCommand.

A handler takes the command's ``args`` and returns the reply's ``result``; transfers of KV blocks and compilations of
grammars are answered later, while steps and other commands go on. What a handler raises becomes the reply's ``error``: WeightsError, ModelFileError and ValueError with code 400, MemoryAsleep with 409 and
OSError with 500, and the worker goes on. Anything else is a defect and ends the rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastengine.protocol.requests import GrammarSpec
from fastengine.protocol.steps import WorkerCommand, WorkerReply
from fastengine.worker.block_files import BlockFiles, BlockTransfers
from fastengine.worker.loader.mapped_file import Moved
from fastengine.worker.memory import rss_bytes
from fastengine.worker.model_host import ModelHost
from fastengine.worker.profiling import OutputDirError, StepProfiler
from fastengine.worker.sleeping import KV_CACHE, WEIGHT, MemoryAsleep, Sleeper
from fastengine.worker.weight_updates import WeightUpdates

Args = dict[str, Any]
Result = dict[str, Any]
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class CommandHandlers:
    """The handlers and what they keep between commands."""

    def __init__(self, host: ModelHost, reply_later: Callable[[WorkerReply], None], moved: Moved = lambda: None):
        """``reply_later`` is called by another thread, with replies that :meth:`handle` did not give.

        ``moved`` is called whenever a command that may take long has got on, by any thread.
        """
        self._host = host
        self._reply_later = reply_later
        self._moved = moved
        self._transfers: BlockTransfers | None = None
        self._updates = WeightUpdates(host, moved)
        self._sleeper = Sleeper(host, moved)
        self._profiler = StepProfiler(host.tp.rank, gpu=host.device == "gpu")
        self.stopping = False
        self._handlers: dict[str, Callable[[Args], Result]] = {
            "init_cache": self.init_cache,
            "load_weights": self.load_weights,
            "prepare_weights": self.prepare_weights,
            "commit_weights": self.commit_weights,
            "discard_weights": self.discard_weights,
            "update_tensors": self.update_tensors,
            "checksum": self.checksum,
            "sleep": self.sleep,
            "wakeup": self.wakeup,
            "profile": self.profile,
            "log_level": self.log_level,
            "ping": self.ping,
            "shutdown": self.shutdown,
        }
        self._transfer_handlers: dict[str, Callable[[BlockTransfers, int, Args], None]] = {
            "store_blocks": self.store_blocks,
            "load_blocks": self.load_blocks,
        }

    def handle(self, command: WorkerCommand) -> WorkerReply | None:
        """The reply to ``command``, None if it comes later; raises only what ends the rank."""
        rank = self._host.tp.rank

        def failed(error: Exception, code: int, param: str = "") -> WorkerReply:
            message = str(error) or type(error).__name__
            return WorkerReply(command_id=command.command_id, rank=rank, error=message, error_code=code, error_param=param)

        handler = self._handlers.get(command.name)
        transfer = self._transfer_handlers.get(command.name)
        try:
            if transfer is not None:
                transfer(self._ready_transfers(), command.command_id, command.args)
                return None
            if command.name == "compile_grammar":
                self.compile_grammar(command.command_id, command.args)
                return None
            if handler is None:
                raise ValueError(f"no such command: {command.name}")
            return WorkerReply(command_id=command.command_id, rank=rank, result=handler(command.args))
        except MemoryAsleep as error:
            return failed(error, 409)
        except OutputDirError as error:
            return failed(error, 400, "output_dir")
        except ValueError as error:
            return failed(error, 400)
        except OSError as error:
            return failed(error, 500)

    def require_awake(self) -> None:
        """Raises MemoryAsleep unless a step can run."""
        self._sleeper.require_awake(WEIGHT, KV_CACHE)

    def init_cache(self, args: Args) -> Result:
        """``{num_blocks, num_host_blocks?, storage_dir?}``: take the KV memory and empty the batch. Result: ``{bytes}``.

        ``storage_dir``: where each rank makes a directory for the blocks it keeps in files.
        """
        self._sleeper.require_awake(KV_CACHE)
        num_blocks, num_host_blocks = int(args["num_blocks"]), int(args.get("num_host_blocks", 0))
        if num_blocks < 1 or num_host_blocks < 0:
            raise ValueError(f"num_blocks must be at least 1 and num_host_blocks not negative, got {num_blocks} and {num_host_blocks}")
        self._end_transfers()
        self._host.init_cache(num_blocks, num_host_blocks)
        cache = self._host.cache
        assert cache is not None
        if args.get("storage_dir"):
            rank = self._host.tp.rank
            files = BlockFiles(Path(args["storage_dir"]) / f"rank-{rank}")
            self._transfers = BlockTransfers(files, cache.host_block, rank, self._reply_later)
        return {"bytes": cache.nbytes}

    def store_blocks(self, transfers: BlockTransfers, command_id: int, args: Args) -> None:
        """``{remove, keys, blocks}``: remove files, then write host blocks to the files of their keys. Result: ``{failed: [place, ...]}``."""
        transfers.store(command_id, args["remove"], args["keys"], args["blocks"])

    def load_blocks(self, transfers: BlockTransfers, command_id: int, args: Args) -> None:
        """``{keys, blocks}``: read each key's file into its host block. Result: ``{failed: [place, ...]}``."""
        transfers.load(command_id, args["keys"], args["blocks"])

    def compile_grammar(self, command_id: int, args: Args) -> None:
        """``{kind, source}``: compile a grammar, for sequences that start later. Answered when it is done, with 400 if it can't be."""

        def done(error: str | None) -> None:
            self._reply_later(WorkerReply(command_id=command_id, rank=self._host.tp.rank, error=error or "", error_code=400))

        self._host.compile_grammar(GrammarSpec(args["kind"], args["source"]), done)

    def prepare_weights(self, args: Args) -> Result:
        """``{source?, path?, format?, verify_checksum?, must_be_whole?}``: check new weights, touching nothing.

        ``source`` checkpoint (default): a model's files, ``path`` absent or None meaning the served one;
        tensors: a safetensors file with some of the model's tensors under their Hugging Face names.
        ``must_be_whole`` refuses a file that lacks any. Result: ``{source, is_whole}``. A refusal by one rank is one by all.
        """
        self._sleeper.require_awake(WEIGHT)
        source, path, checksum = args.get("source", "checkpoint"), args.get("path"), args.get("verify_checksum")
        if source == "checkpoint":
            return {"source": self._updates.prepare(path, args.get("format") or "auto", checksum), "is_whole": True}
        if source != "tensors" or not path or checksum is not None:
            raise ValueError(f"source {source!r} with path {path!r}: tensors need a path and take no checksum; checkpoint is the other source")
        prepared = self._updates.prepare_tensors(path, must_be_whole=bool(args.get("must_be_whole")))
        return {"source": prepared, "is_whole": self._updates.is_whole}

    def commit_weights(self, args: Args) -> Result:
        """``{}``: copy what was prepared into place. Result: ``{num_tensors, load_s}``."""
        self._sleeper.require_awake(WEIGHT)
        return self._commit()

    def discard_weights(self, args: Args) -> Result:
        """``{}``: forget what was prepared, if anything."""
        self._updates.discard()
        return {}

    def load_weights(self, args: Args) -> Result:
        """``{model_path?, format?, verify_checksum?}``: a model's files, both phases at once: all ranks or none."""
        prepared = {"path": args.get("model_path"), "format": args.get("format"), "verify_checksum": args.get("verify_checksum")}
        return {**self.prepare_weights(prepared), **self._commit()}

    def update_tensors(self, args: Args) -> Result:
        """``{path}``: single tensors, both phases at once: all ranks or none."""
        return {**self.prepare_weights({"source": "tensors", "path": args.get("path")}), **self._commit()}

    def checksum(self, args: Args) -> Result:
        """``{}``: the weights' hash, the same on every rank and for any number of ranks. Result: ``{checksum}``."""
        self._sleeper.require_awake(WEIGHT)
        return {"checksum": self._updates.checksum()}

    def sleep(self, args: Args) -> Result:
        """``{tags?}`` of weight and kv_cache (default both): give memory back. Result: ``{rss_bytes, released_bytes, asleep}``."""
        self._finish_transfers()
        return self._sleeper.sleep(args.get("tags") or (WEIGHT, KV_CACHE))

    def wakeup(self, args: Args) -> Result:
        """``{tags?}``: take it again, weights bit for bit, KV empty. Result: ``{rss_bytes, asleep}``."""
        self._finish_transfers()
        return self._sleeper.wakeup(args.get("tags") or (WEIGHT, KV_CACHE))

    def profile(self, args: Args) -> Result:
        """``{action: start|stop, output_dir}``: a profile of the steps between. Result: ``{output_dir}``, then ``{trace_file}``, absolute paths."""
        if args.get("action") == "start":
            return {"output_dir": str(self._profiler.start(args.get("output_dir")))}
        if args.get("action") == "stop":
            return {"trace_file": str(self._profiler.stop())}
        raise ValueError(f"action must be start or stop, got {args.get('action')!r}")

    def log_level(self, args: Args) -> Result:
        """``{level}``: DEBUG, INFO, WARNING or ERROR."""
        level = args.get("level")
        if level not in LOG_LEVELS:
            raise ValueError(f"level must be one of {', '.join(LOG_LEVELS)}, got {level!r}")
        logging.getLogger("fastengine").setLevel(level)
        return {"level": level}

    def ping(self, args: Args) -> Result:
        """``{}``: proof that the loop turns. Result: ``{pid, rss_bytes}``."""
        return {"pid": os.getpid(), "rss_bytes": rss_bytes()}

    def shutdown(self, args: Args) -> Result:
        """``{}``: leave the loop after this reply."""
        self._end_transfers()
        self.stopping = True
        return {}

    def _ready_transfers(self) -> BlockTransfers:
        self._sleeper.require_awake(KV_CACHE)
        if self._transfers is None:
            raise ValueError("no KV blocks are kept in files: init_cache had no storage_dir")
        return self._transfers

    def _finish_transfers(self) -> None:
        if self._transfers is not None:
            self._transfers.wait(self._moved)

    def _end_transfers(self) -> None:
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None

    def _commit(self) -> Result:
        try:
            return self._updates.commit()
        except OSError as error:
            raise RuntimeError(f"weights are half replaced: {error}") from error
