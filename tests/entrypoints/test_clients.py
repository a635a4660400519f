"""Client libraries against the server: what they send must be understood, what they read must be there.

Without FASTENGINE_CHECK_URL the server stands over a fake engine; scripts/check_clients.sh sets it to a real
one's. Libraries that are not installed are skipped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.frontend.harness import say

ASK = [{"role": "user", "content": "Count from 1 to 20."}]


@dataclass(frozen=True)
class Target:
    url: str
    model: str


@pytest.fixture(scope="module")
def target(shared_servers: Any) -> Target:
    given = os.environ.get("FASTENGINE_CHECK_URL")
    if given is not None:
        url = given.rstrip("/")
        return Target(url, openai.OpenAI(base_url=url + "/v1", api_key="none").models.list().data[0].id)
    server = shared_servers()
    server.engine.script = say("1. 1, 2. 2")
    return Target(server.url, "tiny")


def test_openai(target: Target) -> None:
    client = openai.OpenAI(base_url=target.url + "/v1", api_key="none")
    whole = client.chat.completions.create(model=target.model, messages=ASK, max_tokens=12, temperature=0).choices[0].message.content
    stream = client.chat.completions.create(model=target.model, messages=ASK, max_tokens=12, temperature=0, stream=True)
    assert whole
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    response = client.responses.create(model=target.model, input=ASK[0]["content"], max_output_tokens=12, temperature=0)
    assert response.output_text == whole
    assert client.responses.retrieve(response.id).output_text == whole


def test_anthropic(target: Target) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=target.url, api_key="none")
    greedy = {"extra_body": {"temperature": 0}}
    whole = client.messages.create(model=target.model, messages=ASK, max_tokens=12, **greedy)
    with client.messages.stream(model=target.model, messages=ASK, max_tokens=12, **greedy) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text != ""


def test_langchain(target: Target) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(base_url=target.url + "/v1", api_key="none", model=target.model, temperature=0, max_tokens=12)
    whole = chat.invoke("Count from 1 to 20.")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream("Count from 1 to 20.")) == whole.content


def test_litellm(target: Target) -> None:
    litellm = pytest.importorskip("litellm")
    common: dict[str, Any] = {"api_key": "none", "messages": ASK, "max_tokens": 12, "temperature": 0}
    whole = litellm.completion(model=f"openai/{target.model}", api_base=target.url + "/v1", **common)
    assert whole.choices[0].message.content
    stream = litellm.completion(model=f"openai/{target.model}", api_base=target.url + "/v1", stream=True, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
    reply = litellm.completion(model=f"anthropic/{target.model}", api_base=target.url, **common)
    assert reply.choices[0].message.content == whole.choices[0].message.content
