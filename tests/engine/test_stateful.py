"""Random lives of many requests at once, against what each must receive.

The fake worker raises when any KV it reads is not the sequence's own; the engine checks its books after
every event; each token is compared with what the model samples after the tokens before it.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastengine.protocol.control import AbortRequests, FlushCache, IsPaused, Pause, Resume, Sleep, UpdateWeights, Wakeup
from tests.engine.driver import Driver, Received
from tests.engine.fake_worker import EOS, ints, next_token

MODES = st.sampled_from(["abort", "drain", "retract", "in_place"])


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 24),
        overlap=st.booleans(),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        num_seqs=st.integers(1, 6),
        budget=st.sampled_from([6, 16, 64]),
        threshold=st.sampled_from([0, 5]),
        num_host_blocks=st.sampled_from([0, 5, 12, 60]),
        max_swaps=st.sampled_from([1, 2, 8]),
        num_disk_blocks=st.sampled_from([0, 3, 60]),
        run_steps=st.sampled_from([1, 2, 3, 5, 16]),
        run_pieces=st.sampled_from([[16], [1], [2, 1, 3], [16, 2]]),
    )
    def start(
        self,
        num_blocks: int,
        overlap: bool,
        caching: bool,
        policy: str,
        num_seqs: int,
        budget: int,
        threshold: int,
        run_steps: int,
        run_pieces: list[int],
        **host: int,
    ) -> None:
        self.driver = Driver(
            num_blocks=num_blocks,
            overlap=overlap,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            max_model_len=80,
            max_num_partial_prefills=2,
            run_steps=run_steps,
            **(host if host["num_host_blocks"] else {}),
        )
        self.driver.worker.run_pieces = run_pieces
        turn = self.driver.turn

        def checked_turn() -> bool:
            # At once: a later turn of the same rule may bring new weights, by which these tokens would be wrong.
            moved = turn()
            self.tokens_are_right()
            return moved

        self.driver.turn = checked_turn  # type: ignore[method-assign]
        self.received: list[Received] = []
        self.checked: dict[int, int] = {}  # handle -> tokens that were compared
        self.pending: list[str] = []  # control commands not answered yet

    # -- arrivals and departures ----------------------------------------------------------------

    @rule(
        base=st.integers(0, 2),
        length=st.integers(1, 40),
        branch=st.integers(0, 60),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        client=st.integers(0, 1),
        priority=st.integers(0, 2),
        count=st.integers(1, 3),
        ignore_eos=st.booleans(),
        stops=st.lists(st.integers(0, 63), max_size=3),
        min_tokens=st.integers(0, 4),
        logprobs=st.booleans(),
        prompt_logprobs=st.booleans(),
    )
    def arrive(
        self, base: int, length: int, branch: int, client: int, count: int, stops: list[int], logprobs: bool, prompt_logprobs: bool, **fields: Any
    ) -> None:
        # Few different prompts, so that prefixes are shared: whole, or up to where one branches off.
        prompt = [3 + (base * 5 + i * i + (i >= branch) * branch) % 60 for i in range(length)]
        fields["logprobs"] = 0 if logprobs else None
        fields["prompt_logprobs"] = 0 if prompt_logprobs else None
        self.received += [self.driver.add(prompt, client=client, stop_token_ids=tuple(stops), **fields) for _ in range(count)]

    @rule(bases=st.lists(st.integers(0, 4), min_size=2, max_size=6), length=st.integers(24, 60))
    def converse(self, bases: list[int], length: int) -> None:
        # Long prompts that come again after others: what the host keeps is brought back.
        for base in bases:
            prompt = [3 + (base * 11 + i * i) % 60 for i in range(length)]
            self.received.append(self.driver.add(prompt, max_tokens=2, ignore_eos=True))
            for _ in range(6):
                self.driver.turn()

    @rule(data=st.data(), count=st.integers(1, 3))
    def go_on(self, data: st.DataObject, count: int) -> None:
        # The next turn of a conversation, also of one that still runs.
        spoken = [one for one in self.received if one.tokens]
        if spoken:
            one = data.draw(st.sampled_from(spoken))
            history = (ints(one.request.prompt_token_ids) + one.tokens + [7, 8, 9])[:60]
            self.received += [self.driver.add(history, max_tokens=4, ignore_eos=True) for _ in range(count)]

    @rule(data=st.data())
    def disconnect_one(self, data: st.DataObject) -> None:
        if self.received:
            self.driver.abort(data.draw(st.sampled_from(self.received)))

    @rule(data=st.data())
    def abort_by_id(self, data: st.DataObject) -> None:
        if self.received:
            one = data.draw(st.sampled_from(self.received))
            self.command(AbortRequests(req_ids=(one.request.request_id,)))

    @rule(client=st.integers(0, 1))
    def client_dies(self, client: int) -> None:
        self.driver.deliver()
        self.driver.core.client_gone(client)
        for one in self.received:
            if one.request.client_index == client and one.finish_reason is None:
                one.gone = True

    # -- the loop -------------------------------------------------------------------------------

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.driver.turn()

    @rule()
    def publish_only(self) -> None:
        self.driver.publish()

    @rule()
    def answer_only(self) -> None:
        self.driver.answer()
        self.driver.deliver()

    @rule(count=st.integers(1, 3))
    def finish_transfers(self, count: int) -> None:
        self.driver.finish_transfers(count)

    @rule(broken=st.booleans())
    def break_the_disk(self, broken: bool) -> None:
        self.driver.worker.disk_is_broken = broken

    @rule()
    def crash(self) -> None:
        self.driver.crash()
        self.driver.publish()  # restarted workers are restored before anything else

    # -- operators ------------------------------------------------------------------------------

    def command(self, command: Any) -> None:
        self.pending.append(self.driver.control(command))

    @rule(mode=MODES)
    def pause(self, mode: Any) -> None:
        self.command(Pause(mode=mode))

    @rule()
    def resume(self) -> None:
        self.command(Resume())

    @rule()
    def flush(self) -> None:
        self.command(FlushCache())

    @rule()
    def update(self) -> None:
        self.command(UpdateWeights(model_path=f"/models/{len(self.pending)}"))

    @rule(tags=st.sampled_from([("weight",), ("kv_cache",), ("weight", "kv_cache")]))
    def sleep(self, tags: Any) -> None:
        self.command(Sleep(tags=tags))

    @rule(tags=st.sampled_from([("weight",), ("kv_cache",), ("weight", "kv_cache")]))
    def wakeup(self, tags: Any) -> None:
        self.command(Wakeup(tags=tags))

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    @precondition(lambda self: hasattr(self, "driver"))
    def tokens_are_right(self) -> None:
        self.driver.deliver()
        weights = self.driver.worker.weights
        for one in self.received:
            handle = one.request.handle
            prompt = ints(one.request.prompt_token_ids)
            for at in range(self.checked.get(handle, 0), len(one.tokens)):
                assert one.tokens[at] == next_token(prompt + one.tokens[:at], weights)
            self.checked[handle] = len(one.tokens)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.call(Wakeup())
        driver.call(Resume())
        driver.run()
        self.tokens_are_right()
        assert driver.call(IsPaused()).result == {"is_paused": False}
        for request_id in self.pending:
            assert request_id in driver.responses, "a command was never answered"
        for one in self.received:
            if not one.gone:
                self.assert_ended_rightly(one)
        driver.assert_idle()

    def assert_ended_rightly(self, one: Received) -> None:
        sampling, num_output = one.request.sampling, len(one.tokens)
        assert one.finish_reason is not None, "a request was forgotten"
        stop = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        counts = [at + 1 for at, token in enumerate(one.tokens) if token in stop and at + 1 >= sampling.min_tokens]
        if one.finish_reason == "stop":
            assert counts == [num_output]
            assert one.stop_token_id == one.tokens[-1]
            return
        assert not counts, "it went on after a stop token"
        if one.finish_reason == "length":
            prompt = len(one.request.prompt_token_ids) // 4
            most = min(80, self.driver.num_blocks * 8 + 1) - prompt
            assert num_output == min(sampling.max_tokens or most, 80 - prompt)
        elif one.finish_reason == "error":
            assert one.error is not None
            assert one.error.code in (400, 500)
            assert one.error.code == 400 or "crashed twice" in one.error.message
        if sampling.logprobs is not None:
            assert [item.logprob for item in one.logprobs] == [-float(token) for token in one.tokens]
        if sampling.prompt_logprobs is not None and one.tokens:
            assert one.prompt_logprobs is not None
            assert len(one.prompt_logprobs) == len(one.request.prompt_token_ids) // 4


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
