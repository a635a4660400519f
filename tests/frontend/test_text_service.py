"""Tokenizing off the loop: crowds share a batch, and failures stay with their request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from fastengine.frontend.errors import ApiError
from fastengine.frontend.text_service import LONG_TEXT, MAX_WAITING_LONG_TEXTS, TextService
from tests.frontend.harness import BOS, MAX_MODEL_LEN, ByteTokenizer, model_text


def with_service(test: Callable[[TextService, ByteTokenizer], Awaitable[None]]) -> None:
    async def run() -> None:
        service = TextService(model_text)
        service.start()
        tokenizer = (await service.ready()).tokenizer
        assert isinstance(tokenizer, ByteTokenizer)
        try:
            await asyncio.wait_for(test(service, tokenizer), 10)
        finally:
            service.close()

    asyncio.run(run())


def test_prompts_that_wait_are_encoded_as_one_batch():
    async def test(service, tokenizer):
        gate = threading.Event()

        def first() -> str:
            gate.wait(5)
            return "first"

        slow = asyncio.create_task(service.encode(first, "special", param="prompt"))
        await asyncio.sleep(0)
        others = [asyncio.create_task(service.encode(f"text {i}", "special", param="prompt")) for i in range(20)]
        await asyncio.sleep(0)
        assert not slow.done()
        gate.set()
        encoded = await asyncio.gather(slow, *others)
        assert [bytes(row.token_ids).decode() for row in encoded] == [row.text for row in encoded] == ["first", *(f"text {i}" for i in range(20))]
        assert tokenizer.batches == [1, 20]

    with_service(test)


def test_chat_prompts_are_encoded_as_one_batch_with_one_bos_each():
    async def test(service, tokenizer):
        tokenizer.add_bos = True
        gate = threading.Event()
        slow = asyncio.create_task(service.encode(lambda: gate.wait(5) and "", "plain", param="prompt"))
        await asyncio.sleep(0)
        others = [asyncio.create_task(service.encode(lambda i=i: f"chat {i}", "chat", param="prompt")) for i in range(3)]
        others.append(asyncio.create_task(service.encode("plain", "plain", param="prompt")))
        await asyncio.sleep(0)
        gate.set()
        await slow
        encoded = await asyncio.gather(*others)
        assert [row.token_ids for row in encoded] == [*([BOS, *f"chat {i}".encode()] for i in range(3)), list(b"plain")]
        assert sorted(tokenizer.batches) == [1, 1, 3]

    with_service(test)


def test_a_source_that_fails_fails_alone():
    async def test(service, tokenizer):
        def broken() -> str:
            raise ValueError("no")

        tasks = [
            service.encode("a", "chat", param="prompt"),
            service.encode(broken, "chat", param="prompt"),
            service.encode("b", "plain", param="prompt"),
        ]
        good, bad, other = await asyncio.gather(*tasks, return_exceptions=True)
        assert (good.token_ids, other.token_ids) == ([97], [98])
        assert isinstance(bad, ValueError)

    with_service(test)


def test_a_cancelled_request_does_not_hold_up_the_next():
    async def test(service, tokenizer):
        gate = threading.Event()
        held = asyncio.create_task(service.encode(lambda: str(gate.wait(5)), "plain", param="prompt"))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(service.encode("dropped", "plain", param="prompt"))
        await asyncio.sleep(0)
        held.cancel()
        waiting.cancel()
        gate.set()
        assert (await service.encode("next", "plain", param="prompt")).text == "next"
        assert len(tokenizer.batches) == 2  # the waiting one was never encoded

    with_service(test)


def test_a_loader_that_fails_fails_every_wait():
    async def test():
        def load():
            raise OSError("no tokenizer")

        service = TextService(load)
        loading = service.start()
        with pytest.raises(OSError, match="no tokenizer"):
            await service.ready()
        assert service.model is None
        assert isinstance(loading.exception(), OSError)
        service.close()

    asyncio.run(test())


def test_waiting_has_a_bound(monkeypatch):
    monkeypatch.setattr("fastengine.frontend.text_service.MAX_WAITING_PROMPTS", 2)

    async def test(service, tokenizer):
        gate = threading.Event()
        tasks = [asyncio.create_task(service.encode(lambda: str(gate.wait(5)), "plain", param="prompt")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as error:
            await service.encode("x", "plain", param="prompt")
        assert error.value.status == 429
        assert error.value.retry_after_s
        gate.set()
        await asyncio.gather(*tasks)
        assert (await service.encode("x", "plain", param="prompt")).text == "x"

    with_service(test)


def test_a_long_text_delays_no_short_one():
    """Sent as it is, or come out of a template: neither may stand in the short ones' way."""

    async def test(service, tokenizer):
        gate, texts = threading.Event(), []
        encode = tokenizer.encode

        def slow(text: str, *, add_special_tokens: bool = False) -> list[int]:
            texts.append(text)
            if len(text) > LONG_TEXT:
                assert gate.wait(5)
            return encode(text)

        tokenizer.encode = slow
        long = "x" * (LONG_TEXT + 1)
        waiting = [asyncio.create_task(service.encode(source, "plain", param="prompt", must_fit=False)) for source in (long, lambda: long)]
        for i in range(5):
            assert (await asyncio.wait_for(service.encode(f"short {i}", "plain", param="prompt"), 2)).text == f"short {i}"
        assert not any(task.done() for task in waiting)
        gate.set()
        assert [len(encoded.token_ids) for encoded in await asyncio.gather(*waiting)] == [len(long)] * 2
        assert texts.count(long) == 2

    with_service(test)


def test_a_text_that_can_not_fit_is_refused_before_it_is_tokenized():
    async def test(service, tokenizer):
        tokenizer.fewest_tokens = lambda text: len(text) // 8
        text = "x" * (9 * MAX_MODEL_LEN)
        for source in (text, lambda: text):
            with pytest.raises(ApiError, match=f"prompt: the prompt has {len(text)} characters, at least {len(text) // 8} tokens") as caught:
                await service.encode(source, "plain", param="prompt")
            assert (caught.value.status, caught.value.param, caught.value.code) == (400, "prompt", "context_length_exceeded")
        assert tokenizer.batches == []
        assert len((await service.encode(text, "plain", param="prompt", must_fit=False)).token_ids) == len(text)  # whoever only counts tokens may

    with_service(test)


def test_long_texts_that_wait_are_bounded():
    async def test(service, tokenizer):
        gate = threading.Event()
        tokenizer.encode = lambda text, *, add_special_tokens=False: gate.wait(5) and [1]
        long = "x" * (LONG_TEXT + 1)
        waiting = [asyncio.create_task(service.encode(long, "plain", param="prompt", must_fit=False)) for _ in range(MAX_WAITING_LONG_TEXTS)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="long prompts are waiting") as caught:
            await service.encode(long, "plain", param="prompt", must_fit=False)
        assert caught.value.status == 429
        gate.set()
        assert [encoded.token_ids for encoded in await asyncio.gather(*waiting)] == [[1]] * MAX_WAITING_LONG_TEXTS
        assert (await service.encode(long, "plain", param="prompt", must_fit=False)).token_ids == [1]

    with_service(test)
