"""OutputCollector: what clients are owed, gathered into one message per API process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastengine.engine.slots import ClientColumn
from fastengine.protocol.outputs import OutputBatch, TokenOutput
from fastengine.protocol.tokens import HANDLE_DTYPE, pack_token_ids, unpack_columns


class _Pending:
    """What one step or run (or the events between two) yielded: no handle occurs twice in it."""

    __slots__ = ("details", "plain")

    def __init__(self) -> None:
        self.plain: dict[int, tuple[bytes, bytes, int]] = {}  # client -> (int64 handles [n], int32 token ids [N, n], N)
        self.details: dict[int, list[TokenOutput]] = {}


class OutputCollector:
    """Collects tokens of steps and single events; :meth:`take` empties it."""

    def __init__(self) -> None:
        self._step_id = -1
        self._pending = [_Pending()]

    def begin_step(self, step_id: int) -> None:
        self._step_id = step_id
        self._separate()

    def add_columns(self, columns: list[ClientColumn], token_ids: npt.NDArray[np.int32]) -> None:
        """One plain token (int32[n]) for each row of ``columns``, or N (int32[N, n]); once per step or run."""
        plain = self._pending[-1].plain
        num_steps = len(token_ids) if token_ids.ndim == 2 else 1
        for column in columns:
            chosen = token_ids if column.rows is None else token_ids[..., column.rows]
            plain[column.client_index] = (column.handles, chosen.tobytes(), num_steps)

    def add_detail(self, client_index: int, output: TokenOutput) -> None:
        """More than a plain token for one sequence; at most once per step and sequence."""
        self._pending[-1].details.setdefault(client_index, []).append(output)

    def add_event(self, client_index: int, output: TokenOutput) -> None:
        """Something that happened between two steps, for example an abort."""
        if self._pending[-1].plain or self._pending[-1].details:
            self._separate()
        self.add_detail(client_index, output)

    def drop_client(self, client_index: int) -> None:
        for pending in self._pending:
            pending.plain.pop(client_index, None)
            pending.details.pop(client_index, None)

    def take(self) -> dict[int, OutputBatch]:
        """client index -> everything since the last call, each handle once."""
        taken, self._pending = self._pending, [_Pending()]
        if len(taken) > 1:
            clients = {client for pending in taken for client in (*pending.plain, *pending.details)}
            return {client: self._merged(client, taken) for client in sorted(clients)}
        only = taken[0]
        details = only.details
        batches = {
            client: OutputBatch(self._step_id, handles, token_ids, details.pop(client, []), num_steps)
            for client, (handles, token_ids, num_steps) in only.plain.items()
        }
        for client, outputs in details.items():
            batches[client] = OutputBatch(self._step_id, b"", b"", outputs)
        return batches

    def _separate(self) -> None:
        last = self._pending[-1]
        if last.plain or last.details:
            self._pending.append(_Pending())

    def _merged(self, client: int, taken: list[_Pending]) -> OutputBatch:
        # Without numpy: seldom many rows, and most often one, whose last tokens come together.
        mixed = {output.handle for pending in taken for output in pending.details.get(client, ())}
        plain: dict[int, int] = {}
        for pending in taken:
            if client not in pending.plain:
                continue
            for handle, token_ids in unpack_columns(*pending.plain[client]):
                if len(token_ids) > 1 or handle in plain:
                    mixed.add(handle)  # whoever gained more than one token stands in the details
                plain[handle] = token_ids[0]
        for handle in mixed:
            plain.pop(handle, None)
        merged: dict[int, TokenOutput] = {}
        for pending in taken:
            pieces = list(pending.details.get(client, ()))
            if client in pending.plain:
                pairs = unpack_columns(*pending.plain[client])
                pieces += [TokenOutput(handle=handle, token_ids=token_ids) for handle, token_ids in pairs if handle in mixed]
            for piece in pieces:
                merged[piece.handle] = _joined(merged[piece.handle], piece) if piece.handle in merged else piece
        handles = np.array(list(plain), HANDLE_DTYPE).tobytes() if plain else b""
        return OutputBatch(self._step_id, handles, pack_token_ids(list(plain.values())), list(merged.values()))


def _joined(first: TokenOutput, then: TokenOutput) -> TokenOutput:
    """Two outputs of one sequence as one. What the first output says once stays, what the last says counts."""
    logprobs = [*(first.logprobs or ()), *(then.logprobs or ())]
    return TokenOutput(
        handle=first.handle,
        token_ids=first.token_ids + then.token_ids,
        finish_reason=then.finish_reason,
        stop_token_id=then.stop_token_id,
        logprobs=logprobs or None,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        num_prompt_tokens=first.num_prompt_tokens,
        num_output_tokens=then.num_output_tokens,
        weight_version=then.weight_version,
        error=then.error,
        embedding=first.embedding,
    )
