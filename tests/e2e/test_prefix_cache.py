"""What the prefix cache saves changes no bit of an answer, also where it is a part of a block."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server import Server, running_server

FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "32", "--num-gpu-blocks-override", "200", "--check-invariants")
TEMPLATE_TOKENS = 24  # of the template's own system message and the header of the user's
QUESTIONS = ["Name three colours of the rainbow.", "Why is the sky blue?", "What do bees make?", "Tell me about the moon."]


@pytest.fixture(scope="module")
def without_cache(default_model: Path) -> Iterator[Server]:
    with running_server(default_model, *FLAGS, "--no-enable-prefix-caching") as server:
        yield server


@pytest.fixture
def with_cache(default_server: Server) -> Server:
    """Each test has a salt of its own, so that it finds nothing of the others."""
    return default_server


def hits(server: Server) -> tuple[float, float]:
    """Tokens found in the cache so far, and those of them that were in parts of blocks."""
    return server.metric("prefix_cache_hits_total"), server.metric("prefix_cache_copied_hits_total")


def chat(server: Server, messages: list[dict[str, str]], **changes: Any) -> tuple[dict[str, Any], int]:
    """The choice, and how many tokens of the prompt were cached."""
    fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}
    reply = httpx.post(server.url + "/v1/chat/completions", json={"model": "default", "messages": messages, **fields, **changes}, timeout=100)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0], (reply.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def conversation(server: Server, question: str, salt: str) -> tuple[list[dict[str, Any]], list[int], list[int]]:
    """The answers of three turns; of each the cached tokens, and those that the turn before had computed."""
    messages = [{"role": "user", "content": question}]
    answers, cached, known = [], [], [0]
    for _ in range(3):
        answer, num_cached = chat(server, messages, cache_salt=salt)
        messages += [{"role": "assistant", "content": answer["message"]["content"]}, {"role": "user", "content": "Go on."}]
        answers.append(answer)
        cached.append(num_cached)
        known.append(len(answer["message"]["prompt_token_ids"]) + len(answer["message"]["completion_token_ids"]) - 1)
    return answers, cached, known[:-1]


def test_chats_share_their_templates_own_tokens(with_cache: Server, without_cache: Server) -> None:
    before = hits(with_cache)
    for i, question in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question}]
        answer, num_cached = chat(with_cache, messages, cache_salt="template")
        expected, not_cached = chat(without_cache, messages)
        assert answer == expected
        assert not_cached == 0
        # Who begins with the same word shares that, too.
        assert num_cached == 0 if i == 0 else TEMPLATE_TOKENS <= num_cached <= TEMPLATE_TOKENS + 2
    found, copied = (after - earlier for after, earlier in zip(hits(with_cache), before, strict=True))
    assert found == copied >= 3 * TEMPLATE_TOKENS
    assert hits(without_cache) == (0, 0)


def test_a_conversation_goes_on_in_the_middle_of_a_block(with_cache: Server, without_cache: Server) -> None:
    expected, _, _ = conversation(without_cache, QUESTIONS[0], "")
    answers, cached, known = conversation(with_cache, QUESTIONS[0], "conversation")
    assert answers == expected
    assert cached == known


def test_samples_of_one_prompt_compute_it_once(with_cache: Server, without_cache: Server) -> None:
    messages = [{"role": "user", "content": QUESTIONS[1]}]
    fields: dict[str, Any] = {"model": "default", "messages": messages, "n": 4, "seed": 3, "temperature": 1.0, "max_tokens": 8}
    fields["cache_salt"] = "samples"
    before, _ = hits(with_cache)
    replies = [httpx.post(server.url + "/v1/chat/completions", json=fields, timeout=100).json() for server in (with_cache, without_cache)]
    assert replies[0]["choices"] == replies[1]["choices"]
    num_prompt = replies[0]["usage"]["prompt_tokens"]
    assert num_prompt < 64
    assert hits(with_cache)[0] - before == 3 * (num_prompt - 1)


def test_32_mixed_chats_answer_alike_together_and_alone(with_cache: Server, without_cache: Server) -> None:
    bodies: list[dict[str, Any]] = []
    for i in range(32):
        system = [{"role": "system", "content": "You are a pirate. " * (1 + i % 3)}] if i % 2 else []
        messages = [*system, {"role": "user", "content": QUESTIONS[i % 4] + " Please." * (i % 5 * 4)}]
        ways = {"temperature": 0.9, "seed": i, "top_p": 0.9} if i % 3 == 0 else {}
        bodies.append({"messages": messages, "max_tokens": 4 + i % 7, "cache_salt": "mixed", **ways})
    _, before = hits(with_cache)
    with ThreadPoolExecutor(32) as pool:
        together = [answer for answer, _ in pool.map(lambda body: chat(with_cache, **body), bodies)]
    assert hits(with_cache)[1] > before
    again = [chat(with_cache, **body)[0] for body in bodies[:8]]
    alone = [chat(without_cache, **body)[0] for body in bodies]
    assert together == alone
    assert again == alone[:8]
