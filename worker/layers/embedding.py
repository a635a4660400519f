"""Token embedding and LM head, split over the vocabulary; one and the same storage when tied."""

from __future__ import annotations

from collections.abc import Iterator

import paddle

from fastengine.worker.layers.linear import Place
from fastengine.worker.layers.weights import ALL, WeightPiece
from fastengine.worker.memory import Storage
from fastengine.worker.parallel import TensorParallel


class VocabParallelTable:
    """This rank's rows of a ``[vocab, hidden]`` table.

    The vocabulary is padded to a multiple of the ranks: rank r holds rows ``[r * share, (r + 1) * share)``.
    """

    def __init__(self, vocab_size: int, hidden_size: int, place: Place, tp: TensorParallel):
        self.vocab_size = vocab_size
        self.share = -(-vocab_size // tp.size)
        self.start = tp.rank * self.share
        self.tp = tp
        self.weight: Storage = place.storage(self.share, hidden_size)

    def pieces(self, name: str) -> Iterator[WeightPiece]:
        stop = min(self.start + self.share, self.vocab_size)
        rows = slice(self.start, stop)
        yield WeightPiece(name, (self.vocab_size, self.weight.shape[1]), self.weight, (slice(0, stop - self.start), ALL), rows=rows)


class VocabParallelEmbedding(VocabParallelTable):
    """``token_ids int32[T] -> [T, hidden]``."""

    def __call__(self, token_ids: paddle.Tensor) -> paddle.Tensor:
        if self.tp.size == 1:
            return paddle.nn.functional.embedding(token_ids, self.weight.tensor)
        local = token_ids - self.start
        here = paddle.logical_and(local >= 0, local < self.share)
        rows = paddle.nn.functional.embedding(paddle.where(here, local, paddle.zeros_like(local)), self.weight.tensor)
        return self.tp.all_reduce(rows * here.astype(rows.dtype).unsqueeze(-1))


class LMHead:
    """``[R, hidden] -> float32 logits [R, vocab]``, whole on every rank.

    ``table`` is the embedding itself when the model ties them: then it brings no weights of its own.
    """

    def __init__(self, table: VocabParallelTable, tied: bool):
        self.table = table
        self.tied = tied

    def __call__(self, hidden: paddle.Tensor) -> paddle.Tensor:
        table = self.table
        logits = table.tp.all_gather_last(paddle.matmul(hidden, table.weight.tensor, transpose_y=True))
        if table.share * table.tp.size != table.vocab_size:
            logits = logits[:, : table.vocab_size]
        return logits if logits.dtype == paddle.float32 else logits.astype("float32")

    def pieces(self, prefix: str) -> Iterator[WeightPiece]:
        if not self.tied:
            yield from self.table.pieces(f"{prefix}.weight")
