"""vLLM on a folder of weights: run by cpu_peers.py in vLLM's own environment, where fastengine is not installed."""

import sys
import time

import numpy as np
from cpu_peer_cases import report
from vllm import LLM, SamplingParams


def main() -> None:
    dtype, model = sys.argv[1:3]
    _, prefill, prompt, output, *batches = map(int, sys.argv[3:])  # its threads are set by VLLM_CPU_OMP_THREADS_BIND
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=max(prefill, prompt + output) + 16,
        max_num_seqs=max(batches),
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    rng = np.random.default_rng(0)

    def seconds(batch: int, length: int, new_tokens: int) -> float:
        prompts = [{"prompt_token_ids": ids.tolist()} for ids in rng.integers(100, 40000, (batch, length))]
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        elapsed = time.perf_counter() - started
        if any(len(answer.outputs[0].token_ids) != new_tokens for answer in answers):
            raise RuntimeError("an answer ended early")
        return elapsed

    report(seconds, prefill, prompt, output, batches)


if __name__ == "__main__":
    main()
