"""Requests at a scripted engine in any order of tokens, ends, failures and aborts: every promise of the wire holds."""

from __future__ import annotations

import asyncio
from collections import Counter
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.worker.adapter.rig import Call, Rig, ScriptedApi, check_order, finishes, make_request
from worker.adapter import requests as requests_module
from worker.adapter.api import EngineLostError, EngineRefusedError
from worker.adapter.prefill_line import PrefillLine
from worker.adapter.requests import ActiveRequest
from worker.contracts.engine import RequestKey
from worker.wire import End, Failed, Started, Tokens

TURNS = 12
"""Turns of the event loop, after which all that is due has happened."""
ERRORS = (EngineLostError("broken"), EngineRefusedError(429, "full"), EngineRefusedError(400, "no"), None)


class EngineMachine(RuleBasedStateMachine):
    """With `settles` False, the next rule comes in the same turn of the loop: everything crosses everything."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self._patch = patch.object(requests_module, "SUSPECT_NOTICE_S", 0)
        self._patch.start()
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda loop, context: self.trouble.append(context))
        self.trouble: list[object] = []
        self.api = ScriptedApi()
        self.rig = Rig(self.api)
        self.rig.engine._account.line = PrefillLine(0.001)
        self.loop.run_until_complete(self.rig.engine.catch_up())
        self.requests: dict[RequestKey, int] = {}

    def turn(self, is_settled: bool = True) -> None:
        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        if is_settled:
            self.loop.run_until_complete(turns())

    def pick(self, number: int) -> Call | None:
        calls = self.api.open_calls
        return calls[number % len(calls)] if calls else None

    @rule(
        target=keys, n=st.integers(1, 3), gateway=st.sampled_from("gh"), is_suspect=st.booleans(), settles=st.booleans()
    )
    def submit(self, n: int, gateway: str, is_suspect: bool, settles: bool) -> RequestKey:
        async def submit() -> RequestKey:
            return self.rig.submit(make_request(n=n, gateway=gateway, is_suspect=is_suspect))

        key = self.loop.run_until_complete(submit())
        self.requests[key] = n
        self.turn(settles)
        return key

    @rule(number=st.integers(0, 9), choice=st.integers(0, 2), settles=st.booleans())
    def token(self, number: int, choice: int, settles: bool) -> None:
        if call := self.pick(number):
            call.token(choice=choice % len(call.request.choices))
            self.turn(settles)

    @rule(number=st.integers(0, 9), has_usage=st.booleans(), settles=st.booleans())
    def end(self, number: int, has_usage: bool, settles: bool) -> None:
        if call := self.pick(number):
            call.end("stop", 16 if has_usage else None)
            self.turn(settles)

    @rule(number=st.integers(0, 9), error=st.sampled_from(ERRORS), settles=st.booleans())
    def fail(self, number: int, error: Exception | None, settles: bool) -> None:
        if call := self.pick(number):
            call.say(error)
            self.turn(settles)

    @rule(key=consumes(keys), settles=st.booleans())
    def abort(self, key: RequestKey, settles: bool) -> None:
        self.rig.engine.abort(key)
        self.turn(settles)

    @rule()
    def fail_all(self) -> None:
        self.rig.engine.fail_all(Failed("draining", "the worker stops", retryable=True)).result()
        self.turn()

    @invariant()
    def order_holds(self) -> None:
        for key, frames in self.rig.frames.items():
            check_order(frames)
            if frames and isinstance(frames[-1], End):
                choices = [frame.choice for frame in finishes(frames)]
                assert sorted(choices) == list(range(self.requests[key]))
        assert self.trouble == []

    @rule()
    def settle(self) -> None:
        self.turn()
        assert self.rig.engine._account.num_open_choices == sum(
            len(call.request.choices) for call in self.api.open_calls
        )
        self.rig.engine._publish()
        active = self.rig.engine._requests.active.values()
        waiting = [each.request.gateway_id for each in active if not has_tokens(each)]
        assert set(self.rig.load.queued_prefill_s) <= set(waiting)

    def teardown(self) -> None:
        """End every choice: each request has its last frame, and the account is empty."""
        try:
            self.turn()
            while self.api.open_calls:
                for call in self.api.open_calls:
                    call.end()
                self.turn()
            assert not self.rig.engine._requests.active
            for key in self.requests:
                frames = self.rig.frames[key]
                kinds = Counter(type(frame) for frame in frames)
                assert kinds[End] + kinds[Failed] == 1
                assert kinds[Started] == 1 or not kinds[Tokens]
            self.rig.engine._publish()
            assert self.rig.load.queued_prefill_s == {}
            assert self.rig.load.num_running == self.rig.load.num_waiting == 0
            assert self.trouble == []
        finally:
            self.loop.run_until_complete(self.rig.engine.close())
            self.loop.close()
            self._patch.stop()


def has_tokens(active: ActiveRequest) -> bool:
    return active.first_token_s is not None


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=50, stateful_step_count=25)
