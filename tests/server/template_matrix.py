"""Every shape of a conversation, and every pair of shapes, over all templates and APIs.

python -m tests.server.template_matrix
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any, Final

import httpx
import jinja2

from server.errors import InvalidRequestError
from server.event_loop import run_now
from server.text.template_input import template_messages, template_tools, with_tools
from server.text.template_sandbox import TemplateEnvironment
from tests.server.api.engine_worker import EngineWorker
from tests.server.conftest import bundle_of, trained_tokenizer
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import script_of
from tests.server.text.conversations import BODIES, Call, Step, read
from tests.server.text.template_families import FAMILIES
from tests.waiting import HANG_S, until
from worker.wire import End, EngineText, Failed, Finished, Frame, GenerateRequest, Rendered, Started, Tokens

SYSTEM: Final = Step("system", "Be short.")
USER: Final = Step("user", "Weather?")
SAID: Final = Step("assistant", "Well.")


def _call(number: int) -> Step:
    return Step("assistant", calls=(Call(f"call{number:05d}"),))


def _result(number: int) -> Step:
    return Step("tool", "Rain", result_of=f"call{number:05d}")


SHAPES: Final[dict[str, list[Step]]] = {
    "usual": [USER, _call(1), _result(1), SAID],
    "late system": [USER, SAID, SYSTEM],
    "two systems": [],
    "developer": [USER, SAID, Step("developer", "Sandbox.")],
    "two users": [USER, USER, SAID],
    "two assistants": [USER, SAID, SAID],
    "assistant first": [],
    "text before a result": [USER, _call(2), USER, _result(2), SAID],
    "result without call": [USER, SAID, USER, _result(3), SAID],
    "call without result": [USER, _call(4), USER, SAID],
    "empty content": [USER, Step("assistant", "")],
    "no system": [],
}
PAIRS: Final = [(name,) for name in SHAPES] + list(itertools.combinations(SHAPES, 2))


def answer(request: GenerateRequest) -> AsyncIterator[Frame]:
    """Answer a chat as an engine does, in one event if it streams."""
    assert request.call is not None
    text = (
        b'{"id": "e", "usage": {"prompt_tokens": 9, "completion_tokens": 2}, "choices":'
        b' [{"index": 0, "finish_reason": "stop", "%b": {"role": "assistant", "content": "x"}}]}'
    )
    event = EngineText(text % (b"delta" if request.call.streams else b"message"))
    return script_of(Started(0), Tokens(0, (1, 2)), event, Finished(0, "stop"), End(0.0, 0.0, 0.0))(request)


def steps_of(shapes: Collection[str]) -> list[Step]:
    steps = [] if "no system" in shapes else [SYSTEM]
    steps += [SYSTEM] if "two systems" in shapes else []
    steps += [SAID] if "assistant first" in shapes else []
    return [*steps, *itertools.chain.from_iterable(SHAPES[name] for name in shapes), USER]


@dataclass(eq=False)
class TemplateEngine(EngineWorker):
    """An adapter whose engine renders by a template of its own, and refuses what that refuses."""

    template: str = ""

    def render(self, path: str, body: dict[str, Any]) -> Rendered | Failed:
        try:
            given = run_now(read(path, json.dumps({"model": "tiny", **body}).encode()).__await__())
        except InvalidRequestError as error:  # a value that the API of the engine refuses
            return Failed("invalid_request", error.message, retryable=False)
        messages: Any = run_now(template_messages(given, knows_developer=True))
        tools = template_tools(given.tools)
        if "tools" not in self.template:
            messages = with_tools(messages, [])
        variables = {"messages": messages, "tools": tools, "bos_token": "<s>", "eos_token": "</s>"}
        try:
            text = TemplateEnvironment().from_string(self.template).render(**variables, add_generation_prompt=True)
        except (jinja2.TemplateError, AttributeError, TypeError) as error:
            return Failed("invalid_request", str(error), retryable=False)
        assert self.tokenizer is not None
        return Rendered((tuple(self.tokenizer.encode(text).ids),), (100,))


async def refusals(
    family: str, shapes: Collection[Collection[str]], *, by_engine: bool, streams: Collection[bool] = (False, True)
) -> tuple[int, Counter[str]]:
    """Return the number of requests, and the sentences of those that were refused."""
    tokenizer = trained_tokenizer()
    bundle = bundle_of(tokenizer, chat_template=FAMILIES[family], max_model_len=1 << 14)
    engine = {"template": FAMILIES[family], "tokenizer": tokenizer, "apis": tuple(BODIES) if by_engine else ()}
    worker = TemplateEngine(bundle, reply=[50, 51], behave=answer if by_engine else None, **engine)
    found, num_requests = Counter[str](), 0
    async with (
        gateway(worker, tool_parser="hermes") as running,
        httpx.AsyncClient(base_url=running.url, timeout=HANG_S, trust_env=False) as client,
    ):
        if by_engine:
            await until(lambda: all(model.facts.engine_paths for _, model in running.models.names()))
        for names, path, stream in itertools.product(shapes, BODIES, streams):
            body = BODIES[path](steps_of(names), has_tools=True) | {"stream": stream}
            response = await client.post(path, json=body)
            num_requests += 1
            if response.status_code != 200:
                message = response.json()["error"]["message"]
                found[f"{path} {'+'.join(names)}: {response.status_code} {message}"] += 1
    return num_requests, found


async def main() -> None:
    for family, by_engine in itertools.product(FAMILIES, (False, True)):
        num_requests, found = await refusals(family, PAIRS, by_engine=by_engine)
        by = "engine" if by_engine else "gateway"
        print(f"{family:20} by the {by:8} {num_requests - sum(found.values()):5} of {num_requests} are 200", flush=True)
        for line, count in found.most_common(8):
            print(f"    {count} x {line}")


if __name__ == "__main__":
    asyncio.run(main())
