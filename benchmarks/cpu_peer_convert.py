"""A GGUF file as a folder of float32 weights: run by cpu_peers.py in the environment of a peer that reads no such file."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    read = AutoModelForCausalLM.from_pretrained(**where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32)
    # A model read from a GGUF file refuses to be saved, dequantized or not: its weights go into one that was not.
    config = type(read.config)(**{key: value for key, value in read.config.to_dict().items() if key != "quantization_config"})
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)


if __name__ == "__main__":
    main()
