"""onnxruntime-genai on a folder that its model builder made: run by cpu_peers.py in its own environment, where fastengine is not installed."""

import json
import sys
import time

import numpy as np
import onnxruntime_genai
from cpu_peer_cases import report


def main() -> None:
    folder = sys.argv[1]
    threads, prefill, prompt, output, *batches = map(int, sys.argv[2:])
    config = onnxruntime_genai.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = onnxruntime_genai.Model(config)
    rng = np.random.default_rng(0)

    def seconds(batch: int, length: int, new_tokens: int) -> float:
        ids = rng.integers(100, 40000, (batch, length), dtype=np.int32)
        started = time.perf_counter()
        params = onnxruntime_genai.GeneratorParams(model)
        total = length + new_tokens
        params.set_search_options(batch_size=batch, max_length=total, min_length=total, do_sample=False)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(ids)
        for _ in range(new_tokens):
            generator.generate_next_token()
        elapsed = time.perf_counter() - started
        if len(generator.get_sequence(0)) != total:
            raise RuntimeError(f"an answer ended after {len(generator.get_sequence(0)) - length} tokens")
        return elapsed

    report(seconds, prefill, prompt, output, batches)


if __name__ == "__main__":
    main()
