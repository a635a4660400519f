"""New weights in place of the old: on all ranks or on none.

In two phases::

    prepare   open the checkpoint, compare names, shapes, element types and (if asked) the checksum
              with nothing touched and no tensor kept: whatever is wrong is found here
    commit    copy tensor by tensor into the live storage: no second copy of the weights

Between the two all ranks agree. What can still fail in a commit (the disk, the machine) ends the rank,
and the engine starts its workers again.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastengine.model_files.errors import ModelFileError
from fastengine.model_files.spec import ModelSpec
from fastengine.worker.loader.checkpoint import Checkpoint
from fastengine.worker.loader.errors import WeightsError
from fastengine.worker.loader.mapped_file import Moved
from fastengine.worker.loader.safetensors import SafetensorsCheckpoint
from fastengine.worker.loader.weights import model_spec, open_checkpoint
from fastengine.worker.model_host import ModelHost

# What must be equal for weights to mean the same: the rest (context length, special tokens) is the engine's.
IDENTITY = (
    "architecture",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_interleaved",
    "partial_rotary_factor",
    "qk_norm",
)


class WeightUpdates:
    """Prepares and commits updates of ``host``'s weights. Holds at most one prepared checkpoint."""

    def __init__(self, host: ModelHost, moved: Moved):
        self._host = host
        self._moved = moved
        self._prepared: Checkpoint | None = None

    def prepare(self, path: str | None, file_format: str, verify_checksum: str | None) -> str:
        """Open and check a model's files (None: those served); returns the source's name.

        Raises WeightsError or ModelFileError on every rank if any rank has reason to.
        """
        self.discard()
        path = path or self._host.config.model.model
        self._prepared = self._agreed(lambda: self._checked_model(path, file_format), verify_checksum)
        return self._prepared.source

    def prepare_tensors(self, path: str, *, must_be_whole: bool = False) -> str:
        """Open and check a safetensors file that holds some of the model's tensors, or all of them."""
        self.discard()
        self._prepared = self._agreed(lambda: self._checked_tensors(path, must_be_whole), None)
        return self._prepared.source

    @property
    def is_whole(self) -> bool:
        """Whether what was prepared replaces every tensor."""
        return self._prepared is not None and self._host.weights.expected_shapes().keys() <= self._prepared.shapes().keys()

    def commit(self) -> dict[str, Any]:
        """Copy what was prepared into the live weights. Raises WeightsError if nothing was."""
        if self._prepared is None:
            raise WeightsError("commit_weights without prepare_weights before it")
        started = time.monotonic()
        num_tensors = len(self._prepared.shapes())
        try:
            self._host.weights.fill(self._prepared, lambda share: self._moved())
        finally:
            self.discard()
        return {"num_tensors": num_tensors, "load_s": round(time.monotonic() - started, 4)}

    def discard(self) -> None:
        """Forget what was prepared, if anything."""
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None

    def checksum(self) -> str:
        """The hash of the live weights over all ranks: 16 hex digits (see ModelWeights.checksum)."""
        return f"{self._host.tp.sum_uint64(self._host.weights.checksum(self._moved)):016x}"

    def _agreed(self, open_checked: Callable[[], Checkpoint], verify_checksum: str | None) -> Checkpoint:
        checkpoint: Checkpoint | None = None
        problem = ""
        try:
            checkpoint = open_checked()
        except (WeightsError, ModelFileError, OSError) as error:
            problem = str(error)
        if not self._host.tp.all_succeeded(checkpoint is not None):
            raise WeightsError(problem or "another rank can't use these weights")
        assert checkpoint is not None
        if verify_checksum is not None:
            found = f"{self._host.tp.sum_uint64(self._host.weights.checksum_of(checkpoint)):016x}"
            if found != verify_checksum.lower():
                raise WeightsError(f"{checkpoint.source}: the checksum is {found}, expected {verify_checksum}")
        return checkpoint

    def _checked_model(self, path: str, file_format: str) -> Checkpoint:
        self._require_weights()
        difference = spec_difference(self._host.spec, model_spec(path))
        if difference:
            raise WeightsError(f"{path} is another model than the one served: {difference}")
        checkpoint = open_checkpoint(path, file_format, self._moved)
        self._host.weights.check(checkpoint)
        return checkpoint

    def _checked_tensors(self, path: str, must_be_whole: bool) -> Checkpoint:
        self._require_weights()
        file = Path(path)
        if not file.is_file():
            raise WeightsError(f"{path} does not exist or is no file")
        checkpoint = SafetensorsCheckpoint([file], self._moved)
        self._host.weights.check(checkpoint, partial=not must_be_whole)
        return checkpoint

    def _require_weights(self) -> None:
        if self._host.is_null:
            raise WeightsError("the null model has no weights to replace")


def spec_difference(served: ModelSpec, offered: ModelSpec) -> str:
    """The first setting that makes ``offered`` another model, or nothing. Numbers may differ in the last float32 digit."""
    ours, theirs = dataclasses.asdict(served), dataclasses.asdict(offered)
    for name in IDENTITY:
        a, b = ours[name], theirs[name]
        same = math.isclose(a, b, rel_tol=1e-6) if isinstance(a, float) and isinstance(b, float) else a == b
        if not same:
            return f"{name} is {b!r}, served is {a!r}"
    return ""
