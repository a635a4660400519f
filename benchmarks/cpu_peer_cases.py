"""What each peer of cpu_peers.py is timed on. Its scripts import it from beside them, in environments without fastengine."""

import json
from collections.abc import Callable, Sequence

REPEATS = 2


def report(seconds: Callable[[int, int, int], float], prefill: int, prompt: int, output: int, batches: Sequence[int]) -> None:
    """Print tokens/s as one line of JSON. ``seconds(batch, prompt tokens, new tokens)`` takes one measurement; the best of two counts."""
    seconds(1, prefill, 2)
    found = {"prefill": prefill / min(seconds(1, prefill, 1) for _ in range(REPEATS))}
    for batch in batches:
        found[f"answers {batch}"] = batch * output / min(seconds(batch, prompt, output) for _ in range(REPEATS))
    print(json.dumps(found))
