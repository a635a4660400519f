"""Argmax, sampling, penalties, bitmask, log-probabilities."""

from __future__ import annotations

import numpy as np

from .workload import Bench, Workload, WrongResult, require_close, require_equal


def argmax(bench: Bench, rows: int, vocab: int) -> Workload:
    logits, ids = bench.memory.random((rows, vocab), "float32"), bench.memory.poisoned((rows,), "int32")

    def launch() -> None:
        bench.call("argmax", logits=logits, token_ids=ids, num_rows=rows, vocab_size=vocab)

    def check() -> None:
        require_equal("token_ids", ids.stored, logits.stored.argmax(axis=1))

    return Workload(launch, check, logits.num_bytes)


def uniform(seed: int, position: int) -> float:
    """Philox4x32-10 (Salmon et al., SC 2011) with the seed as key and (position, 0, 0, 0) as counter, in [0, 1)."""
    word, counter, key = 0xFFFFFFFF, [position, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(second >> 32) ^ counter[1] ^ key[0], second & word, (first >> 32) ^ counter[3] ^ key[1], first & word]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return float(((counter[1] << 32 | counter[0]) >> 11) * 2.0**-53)


def sample(bench: Bench, rows: int, vocab: int) -> Workload:
    memory, rng = bench.memory, bench.rng
    logits, ids = memory.random((rows, vocab), "float32", 3.0), memory.poisoned((rows,), "int32")
    temperature, top_k = rng.uniform(0.5, 1.5, rows).astype(np.float32), rng.integers(0, min(vocab, 200), rows)
    top_p, min_p = rng.uniform(0.5, 1.0, rows).astype(np.float32), rng.choice([0.0, 0.01], rows).astype(np.float32)
    seeds, positions = rng.integers(0, 2**62, rows), rng.integers(0, 1000, rows)
    fields = {
        "temperature": memory.filled(temperature),
        "top_k": memory.filled(top_k, "int32"),
        "top_p": memory.filled(top_p),
        "min_p": memory.filled(min_p),
    }
    fields |= {"seeds": memory.upload(seeds, "int64"), "positions": memory.filled(positions, "int32")}

    def launch() -> None:
        bench.call("sample", logits=logits, token_ids=ids, num_rows=rows, vocab_size=vocab, **fields)

    def bounds(row: int, token: int, values: np.ndarray) -> tuple[float, float, float]:
        """Mass before and through ``token``, in order of id, and the row's random number; shares of what is kept."""
        scaled = (values - values.max()) / float(temperature[row])
        weights, order = np.exp(scaled), np.argsort(-scaled, kind="stable")
        if 0 < top_k[row] < vocab:
            order = order[: top_k[row]]
        if top_p[row] < 1.0:
            mass = np.cumsum(weights[order])
            order = order[: int(np.searchsorted(mass, float(top_p[row]) * mass[-1])) + 1]
        order = order[weights[order] >= float(min_p[row])]
        kept = np.zeros(vocab)
        kept[order] = weights[order]
        mass = np.cumsum(kept) / kept.sum()
        return float(mass[token] - kept[token] / kept.sum()), float(mass[token]), uniform(int(seeds[row]), int(positions[row]))

    def check() -> None:
        chosen, values = ids.stored, logits.values
        for row in range(rows):
            if not 0 <= chosen[row] < vocab:
                raise WrongResult(f"token_ids: {chosen[row]} at {row}")
            begin, end, u = bounds(row, int(chosen[row]), values[row])
            # A filter's border may fall on the other side of a token when sums are rounded otherwise.
            if not begin - 1e-3 <= u <= end + 1e-3:
                raise WrongResult(f"token_ids: {chosen[row]} at {row} has [{begin:.6f}, {end:.6f}), drawn {u:.6f}")

    return Workload(launch, check, logits.num_bytes)


def log_softmax_gather(bench: Bench, rows: int, vocab: int, k: int) -> Workload:
    memory = bench.memory
    logits, chosen = memory.random((rows, vocab), "float32", 3.0), bench.rng.integers(0, vocab, rows)
    ids = memory.filled(chosen, "int32")
    logprobs, ranks, top_ids, top = (
        memory.poisoned((rows,)),
        memory.poisoned((rows,), "int32"),
        memory.poisoned((rows, k), "int32"),
        memory.poisoned((rows, k)),
    )

    def launch() -> None:
        outputs = {"logprobs": logprobs, "ranks": ranks, "top_ids": top_ids, "top_logprobs": top}
        bench.call("log_softmax_gather", logits=logits, token_ids=ids, **outputs, num_rows=rows, vocab_size=vocab, k=k)

    def check() -> None:
        values = logits.values
        expected = values - values.max(axis=1, keepdims=True)
        expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
        order = np.argsort(-values, axis=1, kind="stable")[:, :k]
        picked = np.take_along_axis(values, chosen[:, None], axis=1)
        require_close("logprobs", logprobs.values, expected[np.arange(rows), chosen], 1e-5, 1e-5)
        require_equal("ranks", ranks.stored, 1 + (values > picked).sum(axis=1))
        require_equal("top_ids", top_ids.stored, order)
        require_close("top_logprobs", top.values, np.take_along_axis(expected, order, axis=1), 1e-5, 1e-5)

    return Workload(launch, check, logits.num_bytes)


def apply_penalties(bench: Bench, rows: int, vocab: int, known: int) -> Workload:
    memory, rng = bench.memory, bench.rng
    before = memory.random((rows, vocab), "float32", 3.0)
    logits = memory.upload(before.stored, "float32")
    settings = [rng.uniform(0.8, 1.5, rows).astype(np.float32) for _ in range(3)]
    tokens, biased = rng.integers(0, vocab, (rows, known)), np.stack([rng.permutation(vocab)[:3] for _ in range(rows)])
    added = rng.normal(size=(rows, 3)).astype(np.float32)
    fields = {name: memory.filled(x) for name, x in zip(("repetition", "presence", "frequency"), settings, strict=True)}
    starts = np.arange(rows + 1)
    packed = {"token_ids": tokens.reshape(-1), "row_starts": starts * known, "output_starts": starts[:-1] * known + known // 2}
    packed |= {"bias_ids": biased.reshape(-1), "bias_starts": starts * 3}
    fields |= {name: memory.filled(x, "int32") for name, x in packed.items()} | {"bias_values": memory.filled(added.reshape(-1))}

    def launch() -> None:
        bench.call("apply_penalties", logits=logits, num_rows=rows, vocab_size=vocab, **fields)

    def check() -> None:
        expected = before.values
        for row, values in enumerate(expected):
            repetition, presence, frequency = (float(s[row]) for s in settings)
            seen = np.unique(tokens[row])
            values[seen] = np.where(values[seen] > 0, values[seen] / repetition, values[seen] * repetition)
            counts = np.bincount(tokens[row, known // 2 :], minlength=vocab)
            values -= frequency * counts + presence * (counts > 0)
            values[biased[row]] += added[row]
        require_close("logits", logits.values, expected, 1e-5, 1e-5)

    return Workload(launch, check, rows * known * 16)


def apply_bitmask(bench: Bench, rows: int, vocab: int) -> Workload:
    memory = bench.memory
    before = memory.random((rows, vocab), "float32")
    logits, masked = memory.upload(before.stored, "float32"), bench.rng.permutation(rows)[: (rows + 1) // 2]
    bits = bench.rng.integers(-(2**31), 2**31, (len(masked), -(-vocab // 32)))
    fields = {"mask": memory.filled(bits, "int32"), "rows": memory.filled(masked, "int32")}

    def launch() -> None:
        bench.call("apply_bitmask", logits=logits, num_masks=len(masked), vocab_size=vocab, **fields)

    def check() -> None:
        expected, token = before.values, np.arange(vocab)
        for row, words in zip(masked, bits, strict=True):
            expected[row, (words[token // 32] >> (token % 32) & 1) == 0] = -np.inf
        require_equal("logits", logits.values, expected)

    return Workload(launch, check, len(masked) * vocab * 4)
