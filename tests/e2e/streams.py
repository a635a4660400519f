"""One request of many prompts, streamed: the token ids of each, as they come."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx

from tests.server import Server


def prompts(count: int) -> list[list[int]]:
    return [[3 + (i * 37 + j * 11) % 250 for j in range(4 + i % 13)] for i in range(count)]


def stream_all(server: Server, count: int, max_tokens: int, on_chunk: Callable[[list[list[int]]], None] = lambda tokens: None) -> list[list[int]]:
    """Greedy tokens of ``count`` prompts that run at the same time. ``on_chunk`` sees what has come after every chunk.

    Fails the test unless every sequence ends with ``length``.
    """
    body = {"model": "default", "prompt": prompts(count), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    tokens: list[list[int]] = [[] for _ in range(count)]
    reasons: dict[int, str] = {}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=110) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                tokens[choice["index"]] += choice.get("completion_token_ids") or []
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
            on_chunk(tokens)
    assert reasons == dict.fromkeys(range(count), "length")
    return tokens
