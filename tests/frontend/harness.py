"""A real HTTP server over a fake engine, inside the test's process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from fastengine.config import EngineConfig
from fastengine.entrypoints.api_app import create_app
from fastengine.frontend.engine_client import EngineClient
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.http_metrics import HttpMetrics
from fastengine.frontend.http_server import HttpServer
from fastengine.frontend.load_board import LoadBoard
from fastengine.frontend.request_manager import RequestManager
from fastengine.frontend.text_service import ModelText, TextService
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.model_files.spec import ModelSpec
from fastengine.text.chat_template import ChatTemplate
from fastengine.text.token_pieces import TokenPieces
from fastengine.text.tokenizer import Tokenizer, unknown_token_id
from tests.frontend.fake_engine import FakeEngine

BOS, EOS, VOCAB_SIZE = 256, 257, 258
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
MAX_MODEL_LEN = 4096


class ByteTokenizer(Tokenizer):
    """One token per byte, and two special ones."""

    def __init__(self) -> None:
        self.vocab_size = VOCAB_SIZE
        self.bos_token_id = BOS
        self.eos_token_ids = (EOS,)
        self.special_ids = frozenset({BOS, EOS})
        self.special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        self.chat_templates = {"default": TEMPLATE}
        self.add_bos = False
        self.pieces = TokenPieces([*(bytes([i]) for i in range(256)), b"<s>", b"</s>"])
        self.batches: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.batches.append(1)
        return self._ids(text)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        self.batches.append(len(texts))
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.pieces.decode(token_ids, self.special_ids if skip_special_tokens else ())

    def token_text(self, token_id: int) -> str:
        if not 0 <= token_id < VOCAB_SIZE:
            raise unknown_token_id(token_id, VOCAB_SIZE)
        return repr(self.pieces.bytes_of[token_id])

    def token_id(self, token: str) -> int | None:
        return None


def model_text() -> ModelText:
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_hidden_layers=1,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        bos_token_id=BOS,
        eos_token_ids=(EOS,),
    )
    tokenizer = ByteTokenizer()
    return ModelText(spec, tokenizer, ChatTemplate(TEMPLATE, tokenizer.special_tokens), MAX_MODEL_LEN)


class ApiServer:
    """One API process's parts, serving on a random port of 127.0.0.1 in a thread."""

    def __init__(
        self,
        root: Path,
        *,
        engine: bool = True,
        load: Callable[[], ModelText] = model_text,
        index: int = 0,
        runtime: RuntimeDir | None = None,
        send_buffer_bytes: int | None = None,
        **flags: Any,
    ):
        """``send_buffer_bytes``: the kernel's, of each connection."""
        self.config = EngineConfig.from_flags(model="/models/tiny", served_model_name=("tiny",), **flags)
        self._owns_runtime = runtime is None
        self.runtime = runtime or RuntimeDir.create(root)
        self.engine = FakeEngine(self.runtime) if engine else None
        client = EngineClient(self.runtime, index)
        server = self.config.server
        board = LoadBoard(self.runtime, index)
        manager = RequestManager(client, default_timeout_s=server.request_timeout, reject_while_paused=server.reject_while_paused, board=board)
        self.front = FrontEnd(self.config, client, manager, TextService(load, client.prepare_grammar), HttpMetrics(self.runtime, index), board)
        # As in an API process, which inherits its socket: a new one knows no protocol, and asyncio would not turn Nagle's algorithm off.
        listener = socket.socket(fileno=socket.create_server(("127.0.0.1", 0)).detach())
        if send_buffer_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(listener)), daemon=True)
        self._thread.start()
        assert self._started.wait(10)
        self.http = httpx.Client(base_url=self.url, timeout=20)

    async def _serve(self, listener: socket.socket) -> None:
        self.loop = asyncio.get_running_loop()
        self.server = HttpServer(
            create_app(self.front),
            self.config.server,
            begin_shutdown=self.front.begin_shutdown,
            end_requests=self.front.end_requests,
            on_refused=self.front.http_metrics.count_refused,
        )
        self.front.start()
        self._started.set()
        await self.server.serve([listener])
        self.front.close()

    def wait_ready(self) -> ApiServer:
        deadline = time.monotonic() + 10
        while self.http.get("/health").status_code != 200:
            assert time.monotonic() < deadline
        return self

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """The result of ``function`` called on the server's event loop."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(5)

    @property
    def sdk(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=20)

    def stop(self) -> None:
        self.http.close()
        self.server.force_exit = True  # no need to wait for connections that tests left open
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(10)
        if self.engine is not None:
            self.engine.stop()
        if self._owns_runtime:
            self.runtime.remove()


def say(text: str) -> Callable[[Any], Iterable[int]]:
    """A script that answers ``text`` and then ends the sequence."""
    return lambda request: [*text.encode(), EOS]
