"""Templates and tokenization off the event loop.

A single thread takes all prompts that wait as one batch: while it works, the next batch gathers. A
lone request so goes at once, and a crowd shares the tokenizer's parallel ``encode_batch``. Long texts,
which take much of a second each, have a thread of their own, so that they delay only one another. Templates
that requests bring are rendered in :mod:`fastengine.frontend.template_renders`, grammars compiled in
:mod:`fastengine.frontend.grammar_checks`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from fastengine.config import ModelConfig
from fastengine.frontend.errors import ApiError, bad_request
from fastengine.frontend.grammar_checks import GrammarChecks, Prepare
from fastengine.frontend.template_renders import TemplateRenders
from fastengine.model_files.load import load_spec
from fastengine.model_files.spec import ModelSpec
from fastengine.protocol.requests import GrammarSpec
from fastengine.text.chat_template import ChatTemplate, load_chat_template
from fastengine.text.load import load_tokenizer
from fastengine.text.output_parser import OutputFormat
from fastengine.text.plugins import load_parsers
from fastengine.text.template_children import TemplateChildren
from fastengine.text.tokenizer import Tokenizer, TokenizerError

MAX_WAITING_PROMPTS = 8192
# Characters past which a text counts as long: the worst ones (one endless word) take a microsecond each.
LONG_TEXT = 32 << 10
MAX_WAITING_LONG_TEXTS = 64
# How special tokens are added: a rendered template gets exactly one BOS, a text those of the tokenizer, or none.
PromptKind = Literal["chat", "special", "plain"]


@dataclass(frozen=True)
class ModelText:
    """What the text side knows of the served model. ``max_model_len`` counts prompt and output tokens.

    ``tool_template`` is used instead of ``chat_template`` when there are tools, if the model has one. Without
    ``has_logits`` (``--load-format null``) there are tokens and nothing else: no probabilities, no hidden states.
    """

    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    tool_template: ChatTemplate | None = None
    output_format: OutputFormat = OutputFormat()  # noqa: RUF009 - frozen
    has_logits: bool = True


@dataclass(frozen=True)
class EncodedPrompt:
    text: str
    token_ids: list[int]


@dataclass
class _Job:
    source: str | Callable[[], str]
    kind: PromptKind
    result: asyncio.Future[EncodedPrompt]
    param: str  # the request's field it came from
    must_fit: bool


@dataclass(frozen=True)
class _LongText:
    """What a template yielded: to be encoded in the long texts' thread."""

    text: str


def load_model_text(config: ModelConfig) -> ModelText:
    """Read all of the configured model that has to do with text.

    Raises ModelFileError, TokenizerError, ChatTemplateError, or ParserError for an unknown parser or an unusable plug-in.
    """
    spec = load_spec(config.model)
    output_format = OutputFormat.from_names(
        load_parsers(config.tool_parser_plugin), tool_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser
    )
    tokenizer = load_tokenizer(config, spec)
    return ModelText(
        spec=spec,
        tokenizer=tokenizer,
        chat_template=load_chat_template(config, tokenizer),
        max_model_len=config.max_model_len or spec.max_position_embeddings,
        tool_template=load_chat_template(config, tokenizer, for_tools=True),
        output_format=output_format,
        has_logits=config.load_format != "null",
    )


class TextService:
    """Loads the model's text side in the background and turns prompts into token ids.

    ``load`` runs once in a thread; until it is done :attr:`model` is None and :meth:`ready` waits.
    """

    def __init__(self, load: Callable[[], ModelText], prepare_grammar: Prepare | None = None):
        self._load = load
        self.grammars = GrammarChecks(prepare_grammar)
        self.model: ModelText | None = None
        self._waiting: list[_Job] = []
        self._busy = False
        self._encoder = ThreadPoolExecutor(1, "encode")
        self._long_encoder = ThreadPoolExecutor(1, "encode-long")
        self._num_long = 0
        self._renders = TemplateRenders()
        self.template_children = TemplateChildren()

    def start(self) -> asyncio.Task[ModelText]:
        """Begin loading; the task ends with the loader's exception if it fails."""
        self._loading = asyncio.create_task(self._run_load())
        return self._loading

    async def _run_load(self) -> ModelText:
        loop = asyncio.get_running_loop()
        self.model = model = await loop.run_in_executor(self._encoder, self._load)
        # Requests bring templates for chats alone.
        if model.chat_template is not None:
            await loop.run_in_executor(self._long_encoder, self.template_children.prepare)
        return model

    async def ready(self) -> ModelText:
        if self.model is not None:
            return self.model
        return await asyncio.shield(self._loading)

    def close(self) -> None:
        self._encoder.shutdown(wait=False, cancel_futures=True)
        self._long_encoder.shutdown(wait=False, cancel_futures=True)
        self._renders.close()
        self.template_children.close()
        self.grammars.close()

    async def check_grammar(self, param: str, spec: GrammarSpec) -> None:
        """See :meth:`GrammarChecks.check`; the model's text side must be :meth:`ready`."""
        assert self.model is not None
        await self.grammars.check(param, spec, self.model.tokenizer)

    async def render(self, source: str, render: Callable[[], str]) -> str:
        """Run the template ``source`` of the user's own. Raises ApiError 429 when it would have to wait too long."""
        return await self._renders.render(source, render)

    async def encode(self, source: str | Callable[[], str], kind: PromptKind, *, param: str, must_fit: bool = True) -> EncodedPrompt:
        """The token ids of a text, or of the text that calling ``source`` (a template) yields.

        Raises what ``source`` raises, and ApiError: 400 naming ``param``, the field it came from, for a text that is
        none or (``must_fit``) can't fit the model's context, found before it is tokenized; 429 when too many wait.
        """
        job = _Job(source, kind, asyncio.get_running_loop().create_future(), param, must_fit)
        try:
            return await self._encoded(job)
        except TokenizerError as error:
            raise bad_request(param, str(error)) from None

    async def _encoded(self, job: _Job) -> EncodedPrompt:
        source = job.source
        if isinstance(source, str) and len(source) > LONG_TEXT:
            self._encode_long(job, source)
            return await job.result
        if len(self._waiting) >= MAX_WAITING_PROMPTS:
            raise ApiError(429, f"{MAX_WAITING_PROMPTS} prompts are waiting for the tokenizer", retry_after_s=1.0)
        self._waiting.append(job)
        if not self._busy:
            self._busy = True
            self._start_batch()
        return await job.result

    def _encode_long(self, job: _Job, text: str) -> None:
        """Settles ``job.result``, at once with an error where the text is too long or too many wait."""
        if self._num_long >= MAX_WAITING_LONG_TEXTS:
            job.result.set_exception(ApiError(429, f"{MAX_WAITING_LONG_TEXTS} long prompts are waiting for the tokenizer", retry_after_s=1.0))
            return
        self._num_long += 1
        done = asyncio.get_running_loop().run_in_executor(self._long_encoder, self._encode_text, job, text)
        done.add_done_callback(lambda future: self._finish_long(job, future))

    def _finish_long(self, job: _Job, done: asyncio.Future[EncodedPrompt]) -> None:
        self._num_long -= 1
        if job.result.done():
            done.cancelled() or done.exception()  # its request was cancelled meanwhile
        elif done.cancelled():
            job.result.cancel()
        else:
            error = done.exception()
            if error is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(done.result())

    def _encode_text(self, job: _Job, text: str) -> EncodedPrompt:
        assert self.model is not None
        if job.result.cancelled():
            return EncodedPrompt(text, [])  # nobody waits for it
        if job.must_fit:
            check_can_fit(job.param, text, self.model)
        ((_, outcome),) = self._encode_texts([(0, text)], job.kind)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _start_batch(self) -> None:
        batch, self._waiting = [job for job in self._waiting if not job.result.done()], []
        if not batch:
            self._busy = False
            return
        done = asyncio.get_running_loop().run_in_executor(self._encoder, self._encode_batch, batch)
        done.add_done_callback(lambda future: self._finish_batch(batch, future))

    def _finish_batch(self, batch: list[_Job], done: asyncio.Future[list[EncodedPrompt | _LongText | Exception]]) -> None:
        if done.cancelled():
            for job in batch:
                job.result.cancel()
            return
        for job, outcome in zip(batch, done.result(), strict=True):
            if job.result.done():
                continue  # its request was cancelled meanwhile
            if isinstance(outcome, Exception):
                job.result.set_exception(outcome)
            elif isinstance(outcome, _LongText):
                self._encode_long(job, outcome.text)
            else:
                job.result.set_result(outcome)
        self._start_batch()

    def _encode_batch(self, batch: list[_Job]) -> list[EncodedPrompt | _LongText | Exception]:
        """One outcome per job, in their order: a text that fails fails alone."""
        outcomes: list[EncodedPrompt | _LongText | Exception] = []
        texts: dict[PromptKind, list[tuple[int, str]]] = {}
        for row, job in enumerate(batch):
            try:
                text = job.source if isinstance(job.source, str) else job.source()
            except Exception as error:  # noqa: BLE001 - handed to the request it belongs to
                outcomes.append(error)
                continue
            if len(text) > LONG_TEXT:
                outcomes.append(_LongText(text))
            else:
                outcomes.append(EncodedPrompt(text, []))
                texts.setdefault(job.kind, []).append((row, text))
        for kind, rows in texts.items():
            for row, outcome in self._encode_texts(rows, kind):
                outcomes[row] = outcome
        return outcomes

    def _encode_texts(self, rows: list[tuple[int, str]], kind: PromptKind) -> Iterator[tuple[int, EncodedPrompt | Exception]]:
        assert self.model is not None
        tokenizer = self.model.tokenizer
        texts = [text for _, text in rows]
        try:
            if len(texts) == 1:
                encoded = [tokenizer.encode(texts[0], add_special_tokens=kind == "special")]
            else:
                encoded = tokenizer.encode_batch(texts, add_special_tokens=kind == "special")
            if kind == "chat":
                encoded = [tokenizer.with_one_bos(token_ids) for token_ids in encoded]
        except Exception as error:  # noqa: BLE001 - handed to the requests it belongs to
            yield from ((row, error) for row, _ in rows)
            return
        for (row, text), token_ids in zip(rows, encoded, strict=True):
            yield row, EncodedPrompt(text, token_ids)


def check_can_fit(param: str, text: str, model: ModelText) -> None:
    """Raise ApiError 400 for a text of more tokens than the model's context holds, if its length alone says so."""
    fewest = model.tokenizer.fewest_tokens(text)
    if fewest > model.max_model_len:
        message = f"the prompt has {len(text)} characters, at least {fewest} tokens; the model's context has {model.max_model_len}"
        raise bad_request(param, message, code="context_length_exceeded")
