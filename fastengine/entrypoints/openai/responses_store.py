"""Stored responses: files in the instance's runtime directory, which all of its API processes share.

The directory is in memory (tmpfs) and goes with the instance. A record is written whole and renamed into
place, so a reader sees all of it or none; past the bounds the oldest records are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path

import msgspec

from fastengine.entrypoints.openai.request_types import ChatMessage
from fastengine.entrypoints.openai.responses_types import Item, ResponseObject
from fastengine.frontend.errors import ApiError, bad_request
from fastengine.ipc.runtime_dir import RuntimeDir

_ID = re.compile(r"resp_[0-9a-f]{32}")


class StoredResponse(msgspec.Struct, kw_only=True):
    """``history`` is the conversation up to and with the response, without instructions; ``owner`` and ``client_index`` are the
    process that works on it."""

    response: ResponseObject
    input_items: list[Item]
    history: list[ChatMessage]
    owner: int
    client_index: int


class ResponseStore:
    """``max_responses`` 0: nothing is stored. All file work is done in threads."""

    def __init__(self, runtime_dir: RuntimeDir, *, max_responses: int, max_bytes: int):
        self._path = runtime_dir.file("responses")
        self._max_responses = max_responses
        self._max_bytes = max_bytes

    @property
    def enabled(self) -> bool:
        return self._max_responses > 0

    async def put(self, record: StoredResponse) -> None:
        """Write or replace. A record larger than the whole store is not kept. Raises ApiError 500 if the file system refuses."""
        data = msgspec.msgpack.encode(record)
        try:
            await asyncio.to_thread(self._write, record.response.id, data)
        except OSError as error:
            raise ApiError(500, f"the response could not be stored: {error.strerror}") from error

    async def get(self, response_id: str) -> StoredResponse:
        """Raises ApiError 404."""
        data = await asyncio.to_thread(self._read, response_id)
        if data is None:
            raise _missing(response_id)
        return msgspec.msgpack.decode(data, type=StoredResponse)

    async def delete(self, response_id: str) -> None:
        """Raises ApiError 404."""
        if not await asyncio.to_thread(self._delete, response_id):
            raise _missing(response_id)

    def _file(self, response_id: str) -> Path | None:
        return self._path / response_id if _ID.fullmatch(response_id) else None

    def _write(self, response_id: str, data: bytes) -> None:
        file = self._file(response_id)
        assert file is not None
        self._path.mkdir(mode=0o700, exist_ok=True)
        staging = file.with_name(f".{response_id}.{os.getpid()}")
        staging.write_bytes(data)
        staging.rename(file)
        self._evict()

    def _evict(self) -> None:
        records = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                # Another process may be removing it at this moment.
                with contextlib.suppress(FileNotFoundError):
                    if not entry.name.startswith("."):
                        status = entry.stat()
                        records.append((status.st_mtime_ns, status.st_size, entry.path))
        num_bytes = sum(size for _, size, _ in records)
        records.sort()
        for position, (_, size, path) in enumerate(records):
            if len(records) - position <= self._max_responses and num_bytes <= self._max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            num_bytes -= size

    def _read(self, response_id: str) -> bytes | None:
        file = self._file(response_id)
        try:
            return None if file is None else file.read_bytes()
        except FileNotFoundError:
            return None

    def _delete(self, response_id: str) -> bool:
        file = self._file(response_id)
        try:
            if file is not None:
                file.unlink()
                return True
        except FileNotFoundError:
            pass  # as if it had never been
        return False


def _missing(response_id: str) -> ApiError:
    return ApiError(404, f"there is no stored response {response_id[:64]!r}", param="response_id", code="response_not_found")


def check_storable(store: ResponseStore, param: str) -> None:
    """Raise ApiError 400 when ``param`` asks for what only a store can do and there is none."""
    if not store.enabled:
        raise bad_request(param, "the server keeps no responses (--max-stored-responses 0)")
