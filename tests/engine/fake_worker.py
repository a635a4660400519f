"""FakeWorker: applies plans exactly as the protocol says, over a simulated KV memory that notices every mistake.

Its "KV" of a position is a hash of all tokens up to it and of the weights; its "model" samples a token that
is a function of that hash alone. A block that was reused too early, shared wrongly or computed by other
weights reads back as a different hash, and the worker raises.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fastengine.protocol.outputs import INVALID_GRAMMAR, TopLogprobs
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import MAX_RUN_STEPS, RowError, SlotLogprobs, StepPlan, StepResult, WorkerCommand, WorkerReply
from fastengine.protocol.tokens import pack_token_ids, unpack_token_ids

VOCAB = 64
EOS = 2
STEP_US = 1000  # what it says a step took


def kv_hashes(tokens: list[int], weights: int) -> list[int]:
    """The KV of each position of ``tokens``."""
    hashes, state = [], weights
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        hashes.append(state)
    return hashes


def next_token(tokens: list[int], weights: int) -> int:
    """What the model samples after ``tokens``. EOS comes about once in 40."""
    value = kv_hashes(tokens, weights)[-1] * 2654435761 % 2**32 >> 8
    return EOS if value % 40 == 0 else 3 + value % (VOCAB - 3)


def reference_output(prompt: list[int], sampling: SamplingParams, max_total: int, weights: int = 1) -> tuple[list[int], str]:
    """All output tokens of a request, and how it ends, by the plainest means."""
    tokens = list(prompt)
    most = min(sampling.max_tokens or max_total, max_total - len(prompt))
    while True:
        token = next_token(tokens, weights)
        tokens.append(token)
        num_output = len(tokens) - len(prompt)
        stops = (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
        if stops and num_output >= sampling.min_tokens:
            return tokens[len(prompt) :], "stop"
        if num_output == most:
            return tokens[len(prompt) :], "length"


@dataclass
class FakeSlot:
    tokens: list[int]
    num_prompt: int
    blocks: list[int]
    sampling: SamplingParams
    request_id: str
    failed: bool = False


@dataclass
class FakeWorker:
    num_blocks: int
    block_size: int
    num_slots: int
    max_batched_tokens: int
    num_host_blocks: int = 0
    max_swaps: int = 0
    num_disk_blocks: int = 0
    weights: int = 1
    check_weights: bool = True  # off while requests go on over KV of older weights
    prepared: int | None = None
    asleep: set[str] = field(default_factory=set)
    poison: set[str] = field(default_factory=set)  # request ids whose step kills the worker
    failing: set[str] = field(default_factory=set)  # request ids that yield a RowError
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)  # command name -> error
    last_batch: list[str] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    step_swaps: list[int] = field(default_factory=list)
    num_copies: int = 0
    last_step: int = -1
    log_level: str | None = None
    disk: dict[bytes, np.ndarray] = field(default_factory=dict)  # outlives workers
    disk_is_broken: bool = False
    run_pieces: list[int] = field(default_factory=lambda: [MAX_RUN_STEPS])  # steps of a run that are answered at once
    last_cut_step_id: int = -1

    def __post_init__(self) -> None:
        self.kv = np.full((self.num_blocks, self.block_size), -1, dtype=np.int64)
        self.host_kv = np.full((self.num_host_blocks, self.block_size), -1, dtype=np.int64)
        self.slots: dict[int, FakeSlot] = {}

    # -- steps ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> Iterator[StepResult]:
        """The plan's results: of a run one for each of ``run_pieces`` steps, in turn, unless a row is unusual."""
        assert not self.asleep, "a step while asleep"
        assert plan.step_id > self.last_step, "steps out of order"
        assert 1 <= plan.num_steps <= MAX_RUN_STEPS
        assert plan.num_steps == 1 or not (plan.started or plan.chunk_slots), "a run of more than decodes"
        self.last_step = plan.step_id + plan.num_steps - 1
        self.apply(plan)
        usual: list[StepResult] = []
        step_id = plan.step_id
        while step_id <= self.last_step and not (plan.num_steps > 1 and self.last_cut_step_id >= step_id):
            one = self.step(step_id, plan)
            step_id += 1
            if one.slots != plan.decodes or one.errors or one.logprobs:
                yield from joined(usual)
                usual = []
                yield one
                continue
            usual.append(one)
            if len(usual) == self.run_pieces[0]:
                self.run_pieces = [*self.run_pieces[1:], self.run_pieces[0]]
                yield from joined(usual)
                usual = []
        if step_id <= self.last_step:
            last = next(joined(usual), StepResult(step_id=step_id, num_steps=0))
            usual = []
            yield msgspec.structs.replace(last, num_cut=self.last_step + 1 - step_id)
        yield from joined(usual)

    def apply(self, plan: StepPlan) -> None:
        self.swap(plan)
        for slot in ints(plan.released):
            self.slots.pop(slot)
        for started in plan.started:
            assert started.slot not in self.slots, f"slot {started.slot} is taken"
            assert 0 <= started.slot < self.num_slots
            row = FakeSlot(ints(started.token_ids), started.num_prompt, ints(started.block_ids), started.sampling, started.request_id)
            self.slots[started.slot] = row
            assert started.num_computed < len(row.tokens), "nothing is left to compute"
            self.verify(row, started.num_computed)
        for slot, block in zip(ints(plan.grown_slots), ints(plan.grown_blocks), strict=True):
            self.slots[slot].blocks.append(block)

    def step(self, step_id: int, plan: StepPlan) -> StepResult:
        rows = [(slot, len(self.slots[slot].tokens) - 1, 1) for slot in ints(plan.decodes) if not self.slots[slot].failed]
        rows += list(zip(ints(plan.chunk_slots), ints(plan.chunk_starts), ints(plan.chunk_lengths), strict=True))
        assert len({slot for slot, _, _ in rows}) == len(rows), "a slot twice in one step"
        num_tokens = sum(length for _, _, length in rows)
        assert num_tokens <= self.max_batched_tokens, f"{num_tokens} tokens in one step"
        assert plan.decodes or num_tokens or plan.swap_in or plan.swap_out, "an empty step"
        self.step_tokens.append(num_tokens)
        self.last_batch = [self.slots[slot].request_id for slot, _, _ in rows]
        if self.poison & set(self.last_batch):
            raise WorkerDied(self.last_batch)
        return self.forward(step_id, rows)

    def swap(self, plan: StepPlan) -> None:
        out, back = np.reshape(ints(plan.swap_out), (-1, 2)).astype(int), np.reshape(ints(plan.swap_in), (-1, 2)).astype(int)
        self.step_swaps.append(max(len(out), len(back)))
        assert self.step_swaps[-1] <= self.max_swaps, "too many copies in one step"
        for pairs in (out, back):
            targets = pairs[:, 1].tolist()
            assert len(set(targets)) == len(targets), "two copies into one block"
        for device, host in out.tolist():
            assert (self.kv[device] >= 0).all(), f"block {device} is saved and holds nothing whole"
            self.host_kv[host] = self.kv[device]
        for host, device in back.tolist():
            assert (self.host_kv[host] >= 0).all(), f"host block {host} is brought back and holds nothing"
            self.kv[device] = self.host_kv[host]
        copies = np.reshape(ints(plan.copies), (-1, 2)).astype(int)
        targets = copies[:, 1].tolist()
        assert len(set(targets)) == len(targets), "two copies into one block"
        assert not set(targets) & set(copies[:, 0].tolist()), "a block is copied and copied into"
        for source, target in copies.tolist():
            self.kv[target] = self.kv[source]
            self.num_copies += 1

    def forward(self, step_id: int, rows: list[tuple[int, int, int]]) -> StepResult:
        # As in a real forward pass, all rows write before any row reads.
        for slot, start, length in rows:
            self.write(self.slots[slot], start, length)
        slots, tokens, errors, logprobs, prompt_logprobs = [], [], [], [], []
        for slot, start, length in rows:
            row = self.slots[slot]
            self.verify(row, start + length)
            if row.request_id in self.failing:
                errors.append(RowError(slot, 400, "the grammar has no way on", INVALID_GRAMMAR))
                row.failed = True
                continue
            if row.sampling.prompt_logprobs is not None:
                known = [fake_logprobs(row.tokens[p + 1]) for p in range(start, start + length) if p + 1 < row.num_prompt]
                prompt_logprobs.append(SlotLogprobs(slot, known))
            if start + length < len(row.tokens):
                continue
            token = next_token(row.tokens, self.weights)
            row.tokens.append(token)
            slots.append(slot)
            tokens.append(token)
            if row.sampling.logprobs is not None:
                logprobs.append(SlotLogprobs(slot, [fake_logprobs(token)]))
        return StepResult(
            step_id=step_id,
            slots=pack_token_ids(slots),
            token_ids=pack_token_ids(tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
            forward_us=STEP_US,
        )

    def write(self, row: FakeSlot, start: int, length: int) -> None:
        hashes = kv_hashes(row.tokens[: start + length], self.weights)
        for position in range(start, start + length):
            self.kv[row.blocks[position // self.block_size], position % self.block_size] = hashes[position]

    def verify(self, row: FakeSlot, num_tokens: int) -> None:
        if not self.check_weights:
            return
        hashes = kv_hashes(row.tokens[:num_tokens], self.weights)
        for position, expected in enumerate(hashes):
            found = self.kv[row.blocks[position // self.block_size], position % self.block_size]
            assert found == expected, f"{row.request_id}: the KV of position {position} is not its own"

    # -- commands -------------------------------------------------------------------------------

    def command(self, command: WorkerCommand) -> dict[str, object]:
        """The command's result. Raises CommandFailed."""
        if command.name in self.refuse:
            raise CommandFailed(*self.refuse[command.name])
        if command.name == "prepare_weights":
            path, whole = command.args["path"], command.args["source"] == "checkpoint" or "whole" in command.args["path"]
            if command.args["must_be_whole"] and not whole:
                raise CommandFailed(400, f"{path}: missing tensors")
            self.prepared = self.weights + 1 if path is None else zlib.crc32(path.encode())
            return {"is_whole": whole}
        if command.name == "commit_weights":
            assert self.prepared is not None, "commit without prepare"
            self.weights, self.prepared = self.prepared, None
        elif command.name == "discard_weights":
            self.prepared = None
        elif command.name == "sleep":
            self.asleep |= set(command.args["tags"])
            if "kv_cache" in self.asleep:
                self.kv[:] = -1
                self.host_kv[:] = -1
        elif command.name == "wakeup":
            self.asleep -= set(command.args["tags"])
        elif command.name == "checksum":
            return {"checksum": f"{self.weights:08x}"}
        elif command.name in ("store_blocks", "load_blocks"):
            return {"failed": self.transfer(command.name, **command.args)}
        elif command.name == "log_level":
            self.log_level = command.args["level"]
        else:
            assert command.name in ("profile", "compile_grammar"), command.name
        return {}

    def transfer(self, name: str, keys: list[bytes], blocks: list[int], remove: list[bytes] | None = None) -> list[int]:
        failed = []
        for key in remove or ():
            self.disk.pop(key, None)
        assert len(self.disk) + (len(keys) if name == "store_blocks" else 0) <= self.num_disk_blocks, "the disk is too small"
        for i, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if self.disk_is_broken:
                failed.append(i)
            elif name == "store_blocks":
                assert (self.host_kv[block] >= 0).all(), f"host block {block} is stored and holds nothing"
                self.disk[key] = self.host_kv[block].copy()
            elif key in self.disk:
                self.host_kv[block] = self.disk[key]
            else:
                failed.append(i)
        return failed

    def reply(self, command: WorkerCommand, rank: int = 0) -> WorkerReply:
        try:
            return WorkerReply(command_id=command.command_id, rank=rank, result=self.command(command))
        except CommandFailed as failure:
            return WorkerReply(command_id=command.command_id, rank=rank, error=failure.message, error_code=failure.code)


def joined(results: list[StepResult]) -> Iterator[StepResult]:
    """The results of steps that sampled the same slots as one, if there are any."""
    if results:
        token_ids = b"".join(one.token_ids for one in results)
        forward_us = sum(one.forward_us for one in results)
        first = results[0]
        yield msgspec.structs.replace(first, token_ids=token_ids, forward_us=forward_us, num_steps=len(results)) if len(results) > 1 else first


class WorkerDied(Exception):
    pass


class CommandFailed(Exception):
    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code, self.message = code, message


def fake_logprobs(token: int) -> TopLogprobs:
    return TopLogprobs(-float(token), 1)


def ints(packed: bytes) -> list[int]:
    return unpack_token_ids(packed).tolist()
