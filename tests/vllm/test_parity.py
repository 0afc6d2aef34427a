"""Bodies from the engine's own schema: behind adapter and gateway they have the answers of the engine by itself.

Then workers are lost and clients leave in the middle of each kind of answer.
"""

from __future__ import annotations

import json
import random
import re
import select
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any, Final

import httpx
import pytest

from server.schema.field_table import IGNORED, SENT_FIELDS, SENT_XARGS
from server.schema.fields import RequestFields
from tests.vllm import horizon
from tests.vllm.bodies import FUNCTION, Bodies
from tests.vllm.comparable import comparable, error_of, same
from tests.vllm.engines import MODEL, Engine
from tests.vllm.fleet import LONG_S, Adapter, VllmFleet, running
from tests.waiting import wait_until

SEED: Final = 1
PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
NUM_BODIES: Final = 75
"""The number for each path."""
NUM_CHATS: Final = 100
ABORT_S: Final = 1.0
NUM_TOKENS: Final = 3000
NUM_BEFORE_KILL: Final = 6
"""The number of events."""
LOST: Final = "headstart_workers_lost_total"
RESUMED: Final = "headstart_resumed_total"
HI: Final = [{"role": "user", "content": "Hi"}]
LONG: Final = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
PLAIN: Final = {"prompt": "Once"} | LONG
REASONING: Final = {"messages": HI} | LONG
"""Without the mark of its end, every token is reasoning."""
CALL: Final = REASONING | {
    "tools": [{"type": "function", "function": FUNCTION}],
    "structured_outputs": {"choice": [horizon.calls([("get_weather", {"city": "Rome " * 100})])]},
}
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "plain": ("/v1/completions", PLAIN),
    "reasoning": (PATHS[0], REASONING),
    "call": (PATHS[0], CALL),
    "n 2": (PATHS[0], REASONING | {"n": 2, "temperature": 1.0, "seed": 1}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": NUM_TOKENS, "temperature": 0}),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
    ),
}
REFUSED: Final = ("kv_transfer_params", "ec_transfer_params", "use_beam_search")
"""Fields of vLLM's page that are refused."""
WRONG_TYPE: Final = re.compile(r"(\w+): Expected ")
CITIES: Final = ("Rome", "São Paulo", "東京", "Oslo", "a\nb", "🙂", "<x>", '"quoted"')
THOUGHTS: Final = ("", "I look it up.", "Zuerst prüfe ich es.\nDann …", "a < b", "考える")


def is_refused(path: str, body: Mapping[str, Any]) -> bool:
    """Return whether the gateway refuses a body that an engine may take."""
    if body.get("truncate_prompt_tokens") == 0:
        return True  # by /render, in other words than those of the API
    prompts = body.get("prompt")
    xargs = body.get("vllm_xargs")
    if isinstance(xargs, dict) and xargs.keys() - SENT_XARGS:
        return True
    known = SENT_FIELDS[path] | {*RequestFields.__struct_fields__, *IGNORED}
    if any(value for name, value in body.items() if name not in known):
        return True
    has_several = isinstance(prompts, list) and len(prompts) > 1 and not isinstance(prompts[0], int)
    return has_several or any(body.get(name) for name in REFUSED)


def without_cached(value: Any) -> Any:
    """Return an answer without what an engine has computed before."""
    if isinstance(value, dict):
        return {name: without_cached(item) for name, item in value.items() if "cache" not in str(name)}
    return [without_cached(item) for item in value] if isinstance(value, (list, tuple)) else value


class Pair:
    """An engine by itself, and the same engine behind adapter and gateway. Both begin with an empty cache."""

    def __init__(self, fleet: VllmFleet, client: httpx.Client) -> None:
        self._fleet = fleet
        self._client = client
        self.parts: list[str] = []
        """The fields of the latest whole answer to a chat."""

    def _ask(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        for engine in self._fleet.engines:
            engine.request("/reset_prefix_cache", {})
        return self._client.post(url, json={"model": MODEL} | body, headers=headers)

    def difference(self, path: str, body: Mapping[str, Any]) -> str:
        """Return what differs, or an empty text."""
        by_itself = self._ask(self._fleet.engines[0].url + path, body, {})
        behind = self._ask(self._fleet.gateway.url + path, body, self._fleet.headers("red"))
        if is_refused(path, body):
            return "" if behind.status_code == 400 else f"{path} {body}\nis not refused: {behind.text}"
        if by_itself.status_code == 200 and behind.status_code == 400 and by_itself.text.startswith('data: {"error"'):
            # The engine finds the error after its 200, and the gateway before its own.
            error = json.loads(by_itself.text.splitlines()[0].removeprefix("data: "))
            by_itself = httpx.Response(error["error"]["code"], json=error)
        if 200 in (by_itself.status_code, behind.status_code):
            want, got = comparable(by_itself), comparable(behind)
            if isinstance(body.get("n"), int) and body["n"] > 1:  # its choices find each other's blocks at chance
                want, got = without_cached(want), without_cached(got)
            if "messages" in body and "choices" in want[1]:
                self.parts = [name for name, part in want[1]["choices"][0]["message"].items() if part]
        else:
            want, got = error_of(by_itself), error_of(behind)
            if (wrong_type := WRONG_TYPE.match(got[1])) and want[0] == got[0] and wrong_type[1] in (want[2] or ""):
                want = got  # the gateway reads this field too, and refuses it in its own words
        return "" if same(want, got) else f"{path} {json.dumps(body, ensure_ascii=False)}\n{want}\n{got}"


@pytest.fixture(scope="module")
def pair(horizon_fleet: VllmFleet) -> Iterator[Pair]:
    with httpx.Client(timeout=LONG_S) as client:
        yield Pair(horizon_fleet, client)


@pytest.mark.parametrize("path", PATHS[:2])
def test_bodies_of_the_schema(horizon_fleet: VllmFleet, pair: Pair, path: str) -> None:
    """Streamed or not, every field is equal but ids and times; errors have the engine's status, text and field."""
    openapi = horizon_fleet.engines[0].request("/openapi.json")
    bodies = [
        each | {"stream": stream} for each in Bodies(openapi, SEED).of(path, NUM_BODIES) for stream in (False, True)
    ]
    differences = [found for body in bodies if (found := pair.difference(path, body))]
    print(*differences, sep="\n")
    print(f"{path}: {len(bodies)} answers, {sum(is_refused(path, body) for body in bodies)} refused on purpose")
    assert not differences


def chats() -> Iterator[dict[str, Any]]:
    """Yield chats whose answers have reasoning, calls, both or several calls."""
    chance = random.Random(SEED)
    for number in range(NUM_CHATS):
        cities = chance.sample(CITIES, chance.choice((1, 1, 2)))
        thought = chance.choice(THOUGHTS)
        answer = horizon.THINK.format(thought) if thought else ""
        if chance.random() < 0.3:
            answer += f"The weather in {cities[0]} is fine."
        if chance.random() < 0.7:
            answer += horizon.calls([("get_weather", {"city": city}) for city in cities])
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"{number}: weather in {cities[0]}?"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "structured_outputs": {"choice": [answer or "Yes."]},
            "temperature": 0,
            "max_tokens": chance.choice((200, 200, 200, 20)),
        }
        if chance.random() < 0.2:
            body |= {"n": 2, "temperature": 1.0, "seed": number}
        if chance.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 2}
        if chance.random() < 0.2:
            body |= {"include_reasoning": False}
        if chance.random() < 0.2:
            body |= {"return_token_ids": True}
        if chance.random() < 0.1:
            body |= {"parallel_tool_calls": False}
        yield body


def test_calls_and_reasoning(pair: Pair) -> None:
    kinds: Counter[str] = Counter()
    differences = []
    for chat in chats():
        options = {"stream": True, "stream_options": {"include_usage": True}}
        differences += [pair.difference(PATHS[0], chat | {"stream": False}), pair.difference(PATHS[0], chat | options)]
        kinds.update(pair.parts)
    differences = [each for each in differences if each]
    print(*differences, sep="\n")
    print(f"answers with {dict(kinds)}")
    assert not differences
    assert min(kinds[name] for name in ("reasoning", "content", "tool_calls")) >= NUM_CHATS // 10


def post(fleet: VllmFleet, kind: str, stream: bool = False) -> httpx.Response:
    path, body = KINDS[kind]
    body = {"model": MODEL, "stream": stream} | body
    return httpx.post(fleet.gateway.url + path, json=body, headers=fleet.headers("red"), timeout=LONG_S)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_lost_in_a_stream(horizon_fleet: VllmFleet, kind: str) -> None:
    """Plain text goes on, and the whole is equal to an undisturbed answer. Other kinds end with an explicit error."""
    fleet, (path, body) = horizon_fleet, KINDS[kind]
    num_before = 1 if kind == "call" else NUM_BEFORE_KILL  # a call is one event, when it is whole
    undisturbed = post(fleet, kind, stream=True)
    url, headers = fleet.gateway.url, fleet.headers("red")
    before = fleet.gateway.metrics()
    lines: list[str] = []
    adapter = None
    with httpx.stream(
        "POST", url + path, json={"model": MODEL, "stream": True} | body, headers=headers, timeout=LONG_S
    ) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if adapter is None and sum(each.startswith("data: ") for each in lines) == num_before:
                adapter = fleet.adapter_of(answer)
                adapter.kill()
    assert adapter is not None
    after = fleet.gateway.metrics()
    adapter.start()
    fleet.wait_ready()
    num_lost, num_resumed = (int(after[name] - before[name]) for name in (LOST, RESUMED))
    assert num_lost == 1, "the stream was over before the kill"
    assert num_resumed == (kind == "plain")
    lost = httpx.Response(200, headers=answer.headers, text="\n".join(lines))
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if kind == "plain":
        assert comparable(lost) == comparable(undisturbed)
        return
    last = json.loads(data[-1])
    print(kind, lines[-4:])
    assert last["type" if path == "/v1/responses" else "error"]
    named = {"/v1/messages": "event: error", "/v1/responses": "event: error"}.get(path)
    assert named is None or named in lines
    assert "worker" in json.dumps(last), last


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_lost_before_the_answer(horizon_fleet: VllmFleet, kind: str) -> None:
    """An unstreamed answer begins again at another worker, and is equal to an undisturbed one."""
    fleet = horizon_fleet
    undisturbed = post(fleet, kind)
    fleet.wait_idle()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, fleet, kind)
        adapter = wait_until(
            lambda: next((each for each in fleet.adapters if each.num_requests()), asked.done()),
            what="an engine has the request",
        )
        assert not asked.done(), asked.result().text
        adapter.kill()
        lost = asked.result()
    adapter.start()
    fleet.wait_ready()
    assert fleet.adapter_of(lost) is not adapter
    assert without_cached(comparable(lost)) == without_cached(comparable(undisturbed))


def generated(engine: Engine) -> int:
    return int(engine.metrics()[f"vllm:generation_tokens_total{{0,{MODEL}}}"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_leaves(horizon_fleet: VllmFleet, kind: str, stream: bool) -> None:
    """The engine ends all choices within a second, long before their last token."""
    fleet, (path, body) = horizon_fleet, KINDS[kind]
    fleet.wait_idle()
    before = sum(map(generated, fleet.engines))
    connection = HTTPConnection("127.0.0.1", fleet.gateway.port, timeout=LONG_S)
    headers = fleet.headers("red") | {"content-type": "application/json"}
    connection.request("POST", path, json.dumps({"model": MODEL, "stream": stream} | body), headers)

    def is_answered() -> bool:
        return not stream and bool(select.select([connection.sock], [], [], 0)[0])

    wait_until(lambda: any(map(Adapter.num_requests, fleet.adapters)) or is_answered(), what="an engine generates")
    assert not is_answered(), connection.getresponse().read()
    connection.close()
    watch = fleet.stopwatch()
    watch.wait_until(lambda: not any(map(Adapter.num_requests, fleet.adapters)), ABORT_S, "left by the adapter")
    watch.wait_until(lambda: not any(map(running, fleet.engines)), ABORT_S, "aborted")
    num_generated = sum(map(generated, fleet.engines)) - before
    print(f"{kind}: {num_generated} tokens of {NUM_TOKENS}")
    assert num_generated < NUM_TOKENS * body.get("n", 1)
