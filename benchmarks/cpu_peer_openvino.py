"""OpenVINO GenAI on a GGUF file: run by bench_cpu.py in OpenVINO's own environment, where fastengine is not installed."""

import sys
import time

import numpy as np
import openvino as ov
import openvino_genai
from cpu_peer_cases import report


def main() -> None:
    model = sys.argv[1]
    threads, prefill, prompt, output, *batches = map(int, sys.argv[2:])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 4096
    scheduler.max_num_seqs = max(batches)
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)
    rng = np.random.default_rng(0)

    def seconds(batch: int, length: int, new_tokens: int) -> float:
        ids = rng.integers(100, 40000, (batch, length))
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        started = time.perf_counter()
        pipeline.generate(inputs, config)
        return time.perf_counter() - started

    report(seconds, prefill, prompt, output, batches)


if __name__ == "__main__":
    main()
