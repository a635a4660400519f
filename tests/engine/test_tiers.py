"""Long random runs over device, host and files at once: every token right, every book balanced, every way taken."""

from __future__ import annotations

import random
from collections import Counter

from fastengine.protocol.control import FlushCache, Pause, Resume, UpdateWeights
from tests.engine.driver import Driver, Received
from tests.engine.fake_worker import ints, next_token

CONVERSATIONS = 7
EVENTS = ["talk"] * 14 + ["turn"] * 14 + ["publish", "answer", "transfer"] * 4 + ["abort", "retract", "disk"] * 2 + ["crash", "flush", "update"]


class Run:
    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.driver = Driver(
            num_blocks=self.random.choice([10, 14, 24]),
            num_host_blocks=self.random.choice([6, 16, 30]),
            num_disk_blocks=self.random.choice([0, 8, 90]),
            max_swaps=self.random.choice([1, 3, None]),
            overlap=self.random.random() < 0.5,
            max_num_seqs=4,
            run_steps=(1, 4)[seed % 2],
        )
        self.received: list[Received] = []
        self.checked: Counter[int] = Counter()

    def happen(self, event: str) -> None:
        driver = self.driver
        if event == "talk":
            base = self.random.randrange(CONVERSATIONS)
            prompt = [3 + (base * 11 + i * i) % 60 for i in range(self.random.randrange(20, 72))]
            self.received.append(driver.add(prompt, max_tokens=self.random.randrange(1, 8), ignore_eos=True))
        elif event == "turn":
            for _ in range(self.random.randrange(1, 12)):
                driver.turn()
        elif event == "publish":
            driver.publish()
        elif event == "answer":
            driver.answer()
        elif event == "transfer":
            driver.finish_transfers(1)
        elif event == "abort" and self.received:
            driver.abort(self.random.choice(self.received))
        elif event == "retract":
            driver.control(Pause(mode="retract"))
            driver.call(Resume())
        elif event == "disk":
            driver.worker.disk_is_broken = self.random.random() < 0.3
        elif event == "crash":
            driver.crash()
            driver.publish()
        elif event == "flush":
            driver.control(FlushCache())
        elif event == "update":
            driver.call(Pause(mode="in_place"))
            self.check_tokens()
            driver.call(UpdateWeights(model_path=f"/models/{self.random.random()}"))
            driver.call(Resume())

    def check_tokens(self) -> None:
        self.driver.deliver()
        for one in self.received:
            prompt, handle = ints(one.request.prompt_token_ids), one.request.handle
            for at in range(self.checked[handle], len(one.tokens)):
                assert one.tokens[at] == next_token(prompt + one.tokens[:at], self.driver.worker.weights)
            self.checked[handle] = len(one.tokens)


def test_random_lives_over_three_tiers() -> None:
    total: Counter[str] = Counter()
    for seed in range(25):
        run = Run(seed)
        for _ in range(60):
            run.happen(run.random.choice(EVENTS))
            run.check_tokens()
        run.driver.run()
        run.check_tokens()
        run.driver.assert_idle()
        for one in run.received:
            assert one.gone or one.finish_reason == "length" or one.error is not None
        total.update(run.driver.core.metrics.counters)
    moved = ("swapped_out_blocks", "swapped_in_blocks", "stored_blocks", "loaded_blocks")
    for name in (*moved, "storage_failures", "num_preemptions", "prefix_cache_copied_hits"):
        assert total[name] > 20, f"{name} has hardly happened"
