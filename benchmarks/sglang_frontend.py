"""SGLang's detokenizer over replayed token ids, for bench_frontend.py; needs SGLang to be importable.

    python sglang_frontend.py TOKENIZER_DIR TOKEN_IDS.json     print the parts' times as JSON

Its CUDA kernels, which the import chain asks for and nothing here calls, are stood in for. Left out, in its favour:
the pickles on the sockets between scheduler, detokenizer and tokenizer manager.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import sys
import time
import types
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import MagicMock


class _Standing(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] == "sgl_kernel" else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Standing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
from sglang.srt.managers.detokenizer_manager import DetokenizerManager, LimitedCapacityDict  # noqa: E402
from sglang.srt.managers.io_struct import BatchTokenIDOut  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402


def batch(names: list[str], token_ids: list[list[int]], read_offsets: list[int], done: bool) -> BatchTokenIDOut:
    """A step's message; what this release has beyond it is None."""
    count = len(names)
    given: dict[str, Any] = {
        "rids": names,
        "finished_reasons": [{"type": "length", "length": 1} if done else None] * count,
        "decoded_texts": [""] * count,
        "decode_ids": token_ids,
        "read_offsets": read_offsets,
        "output_ids": None,
        "skip_special_tokens": [True] * count,
        "spaces_between_special_tokens": [True] * count,
        "no_stop_trim": [False] * count,
    }
    return BatchTokenIDOut(**{field.name: given.get(field.name) for field in dataclasses.fields(BatchTokenIDOut)})


def cpu_us(times: int, work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return (time.process_time() - started) / times * 1e6


def parts(tokenizer: Any, token_ids: list[int], streams: int, tokens: int) -> dict[str, float]:
    manager = object.__new__(DetokenizerManager)  # its constructor opens sockets to a scheduler
    manager.tokenizer, manager.decode_status, manager.is_tool_call_parser_gpt_oss = tokenizer, LimitedCapacityDict(capacity=1 << 16), False
    names = [str(i) for i in range(streams)]
    prompt = token_ids[:5]
    texts = [""] * streams

    def detokenize() -> None:
        for step in range(tokens):
            new = [[token_ids[(i + step) % len(token_ids)]] for i in range(streams)]
            ids = [[*prompt, *row] for row in new] if step == 0 else new
            out = manager.handle_batch_token_id_out(batch(names, ids, [len(prompt)] * streams, step == tokens - 1))
            for i, text in enumerate(out.output_strs):
                texts[i] += text

    found = {"detokenize": cpu_us(streams * tokens, detokenize)}
    assert tokenizer.decode(token_ids[:tokens]).strip() in texts[0], "this release is driven wrongly"
    return found


def main() -> None:
    directory, ids_file = sys.argv[1:]
    with open(ids_file) as file:
        token_ids = json.load(file)
    print(json.dumps(parts(AutoTokenizer.from_pretrained(directory), token_ids, 32, 128)))


if __name__ == "__main__":
    main()
