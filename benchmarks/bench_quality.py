"""What fewer bits cost: perplexity over fixed texts, against the float32 model of the same file.

``python benchmarks/bench_quality.py --model FILE.gguf`` prints, for English, Chinese and code, the
perplexity of each way to compute and its distance to float32, from the prompt log-probabilities that the
worker itself gives. The rule: what is the default must stay within one percent on every text.

The texts in ``data/`` are fixed, about 100 KB together: this project's own prose and code as they once
were, the United States' Declaration of Independence and Constitution, and poems of the Tang dynasty, all
in the public domain. With ``--json`` a run goes on where an earlier one ended, so that each way and each
text can be measured by a command of its own: ``--ways none:float32 --texts english`` first, and so on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import paddle

from fastengine.config import EngineConfig
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import StartedSequence, StepPlan
from fastengine.protocol.tokens import pack_token_ids
from fastengine.text.load import load_tokenizer
from fastengine.worker.model_host import ModelHost
from fastengine.worker.parallel import TensorParallel

DATA = Path(__file__).resolve().parent / "data"
TEXTS = ("english", "chinese", "code")
REFERENCE = "none:float32"
WAYS = ("wint4:float32", "wint4:bfloat16", "wint4:int8", "wint8:int8")
WINDOW = 512
BLOCK_SIZE = 64
LARGEST_LOSS = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description="Perplexity of each quantization against float32.")
    parser.add_argument("--model", required=True, help="Model directory or GGUF file.")
    parser.add_argument("--ways", nargs="+", default=[REFERENCE, *WAYS], metavar="QUANTIZATION:KV", help="quantization:kv_cache_dtype, in turn.")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--max-tokens", type=int, metavar="N", help="Only the first N tokens of each text.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="Read earlier figures from this file, and write all of them to it.")
    args = parser.parse_args()
    paddle.set_grad_enabled(False)
    figures = earlier_figures(args)
    if REFERENCE not in {*figures, *args.ways}:
        parser.error(f"nothing to compare with: {REFERENCE} must be among --ways or in the --json file")
    for way in args.ways:
        missing = [text for text in args.texts if text not in figures.setdefault(way, {})]
        if missing:
            figures[way] |= perplexities(args, *way.split(":"), missing)
            save(args, figures)
        show(way, figures)
    return 0


def measured(args: argparse.Namespace) -> dict[str, object]:
    """What figures of several runs must have in common."""
    return {"model": args.model, "max_tokens": args.max_tokens, "bytes": {text: (DATA / f"{text}.txt").stat().st_size for text in TEXTS}}


def earlier_figures(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """way -> text -> perplexity in the ``--json`` file. Raises SystemExit when it is of something else."""
    if args.json is None or not args.json.exists():
        return {}
    earlier = json.loads(args.json.read_text())
    if earlier["measured"] != measured(args):
        raise SystemExit(f"{args.json} holds figures of {earlier['measured']}, not of {measured(args)}")
    return earlier["perplexity"]


def save(args: argparse.Namespace, figures: dict[str, dict[str, float]]) -> None:
    if args.json is not None:
        args.json.write_text(json.dumps({"measured": measured(args), "perplexity": figures}, indent=1))


def show(name: str, figures: dict[str, dict[str, float]]) -> None:
    reference = figures.get(REFERENCE, {})
    changes = {text: value / reference[text] - 1 for text, value in figures[name].items() if text in reference}
    cells = [f"{text} {figures[name][text]:9.4f} ({change:+.2%})" for text, change in changes.items()]
    print(f"{name:16} {'  '.join(cells)}  {'ok' if max(changes.values(), default=0.0) <= LARGEST_LOSS else 'too much for a default'}", flush=True)


def perplexities(args: argparse.Namespace, quantization: str, kv: str, texts: list[str]) -> dict[str, float]:
    config = EngineConfig.from_flags(
        model=args.model,
        quantization=quantization,
        kv_cache_dtype=kv,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        max_model_len=WINDOW,
        cpu_threads=args.threads,
    )
    host = ModelHost(config, TensorParallel(), args.threads)
    host.load(lambda share: None)
    host.init_cache(WINDOW // BLOCK_SIZE, 0)
    tokenizer = load_tokenizer(config.model, host.spec)
    found = {}
    for text in texts:
        token_ids = tokenizer.encode((DATA / f"{text}.txt").read_text(encoding="utf-8"))[: args.max_tokens]
        logprobs = [value for part in windows(token_ids) for value in prompt_logprobs(host, part)]
        found[text] = math.exp(-sum(logprobs) / len(logprobs))
    return found


def windows(token_ids: list[int]) -> Iterator[list[int]]:
    """Pieces of at most WINDOW - 1 tokens; what a step samples after them still fits."""
    for start in range(0, len(token_ids) - 1, WINDOW - 1):
        yield token_ids[start : start + WINDOW - 1]


def prompt_logprobs(host: ModelHost, token_ids: list[int]) -> list[float]:
    """The log-probability of every token but the first, in one step."""
    length = len(token_ids)
    sequence = StartedSequence(
        slot=0,
        token_ids=pack_token_ids(token_ids),
        num_prompt=length,
        num_computed=0,
        block_ids=pack_token_ids(range(-(-length // BLOCK_SIZE))),
        sampling=SamplingParams(temperature=0.0, prompt_logprobs=0),
        seed=0,
        request_id="text",
    )
    numbers = {"chunk_slots": [0], "chunk_starts": [0], "chunk_lengths": [length], "released": [0]}
    result = host.step(StepPlan(step_id=0, started=[sequence], **{name: pack_token_ids(values) for name, values in numbers.items()}))
    if result.errors:
        raise RuntimeError(result.errors[0].message)
    return [entry.logprob for part in result.prompt_logprobs for entry in part.tokens]


if __name__ == "__main__":
    sys.exit(main())
