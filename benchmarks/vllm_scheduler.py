"""vLLM's own scheduler under the load of bench_scheduler.py, which runs this file with a Python that has vLLM.

    VLLM_PYTHON vllm_scheduler.py --running 32 --context 128 --steps 400 --block-size 16

The last line printed is JSON: vLLM's version and the thread CPU microseconds of each step. Its constructors change
between releases, so each is called with those of our arguments that it has. The prefix cache is on, with vLLM's default
hash; statistics are gathered as in its server.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 50_000,
    "torch_dtype": "float32",
}


def fitting(call: Any, **arguments: Any) -> Any:
    """Call with those of ``arguments`` that this release's signature has."""
    # Not dataclasses.fields(): that leaves out what only the constructor takes.
    known = set(call.__dataclass_fields__ if dataclasses.is_dataclass(call) else inspect.signature(call).parameters)
    return call(**{name: value for name, value in arguments.items() if name in known})


def make_scheduler(running: int, context: int, max_len: int, block_size: int) -> Any:
    num_blocks = running * (max_len // block_size + 1) + 64
    with tempfile.TemporaryDirectory() as directory:
        config = {**MODEL_CONFIG, "max_position_embeddings": max_len}
        (Path(directory) / "config.json").write_text(json.dumps(config))
        model = fitting(ModelConfig, model=directory, tokenizer=directory, skip_tokenizer_init=True, dtype="float32", max_model_len=max_len, seed=0)
        cache = fitting(CacheConfig, block_size=block_size, enable_prefix_caching=True, swap_space=0)
        limits = fitting(
            SchedulerConfig,
            max_num_seqs=running,
            max_num_batched_tokens=max(running * context, max_len),
            max_model_len=max_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        )
        vllm_config = fitting(VllmConfig, model_config=model, cache_config=cache, scheduler_config=limits)
    cache.num_gpu_blocks = num_blocks
    spec = fitting(FullAttentionSpec, block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32, use_mla=False)
    blocks = fitting(KVCacheConfig, num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    manager = StructuredOutputManager(vllm_config)
    return fitting(
        Scheduler, vllm_config=vllm_config, kv_cache_config=blocks, structured_output_manager=manager, block_size=block_size, log_stats=True
    )


def measure(running: int, context: int, steps: int, block_size: int) -> list[float]:
    """Thread CPU microseconds of each schedule + update_from_output in steady decode."""
    scheduler = make_scheduler(running, context, context + 2 * steps + 64, block_size)
    hash_function = get_hash_fn_by_name(scheduler.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(block_size, hash_function)
    rng = np.random.default_rng(0)
    for i in range(running):
        prompt = rng.integers(10, 50_000, context - i % block_size).tolist()
        sampling = SamplingParams(max_tokens=2 * steps + 32, ignore_eos=True)
        scheduler.add_request(
            fitting(
                Request,
                request_id=f"r{i}",
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                eos_token_id=2,
                block_hasher=hasher,
            )
        )
    times = []
    for step in range(steps + block_size):
        start = time.thread_time_ns()
        plan = scheduler.schedule()
        spent = time.thread_time_ns() - start
        ids = list(plan.num_scheduled_tokens)
        result = fitting(
            ModelRunnerOutput,
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        start = time.thread_time_ns()
        scheduler.update_from_output(plan, result)
        if step >= block_size:
            times.append((spent + time.thread_time_ns() - start) / 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("running", "context", "steps", "block-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    times_us = measure(args.running, args.context, args.steps, args.block_size)
    print(json.dumps({"version": vllm.__version__, "times_us": times_us}))


if __name__ == "__main__":
    main()
