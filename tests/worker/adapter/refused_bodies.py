"""Large requests to an adapter, for every route and every reason to refuse one, of gateways that wait or leave."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from tests.refusals import Body, Case
from tests.worker.adapter.rig import make_request
from worker.adapter.text import CHAT
from worker.http.streams import MAX_BODY_BYTES
from worker.wire import EngineCall, GenerateRequest, pack, pack_request

ENGINE_OPTIONS = ("--refuses-text",)
"""Options of the fake engine behind the adapter."""


def adapter_cases() -> list[Case]:
    """Return one of each. An accepted request asks for one token."""

    def post(route: str, reason: str, status: int, body: Body, **fields: str) -> Case:
        return Case(route, reason, (status,) if status else (), body, **fields)  # type: ignore[arg-type]

    request, garbage = make_request(range(100, 140), max_tokens=1), partial(_garbage)
    asking = partial(_asking, request)
    wrong_epoch = partial(_tagged, replace(request, epoch="another"))
    return [
        *(post(path, "garbage", 400, garbage) for path in ("/generate", "/render", "/abort", "/blocks", "/adopt")),
        post("/generate", "too long", 400, partial(_long, request)),
        post("/generate", "wrong epoch", 409, wrong_epoch),
        post("/generate", "no such adapter", 503, partial(_tagged, replace(request, adapter="none"))),
        post("/generate", "too large", 413, _too_large),
        post("/generate", "the engine refuses", 200, asking),
        post("/generate", "accepted", 200, partial(_tagged, request)),
        post("/generate", "gateway leaves in the body", 0, wrong_epoch, leaves="in the body"),
        post("/render", "no API of the engine", 503, partial(_call, "/v1/none")),
        post("/render", "the engine refuses", 400, partial(_call, CHAT)),
        post("/render", "gateway leaves in the body", 0, partial(_call, CHAT), leaves="in the body"),
        post("/unknown", "unknown", 404, garbage),
        post("/state", "POST", 405, garbage),
        Case("/drain", "GET", (405,), garbage, "GET"),
    ]


def _garbage(num_bytes: int) -> bytes:
    return b"\xc1" * num_bytes


def _too_large(num_bytes: int) -> bytes:
    """A body beyond the bound, whatever the size of the others."""
    return _garbage(MAX_BODY_BYTES + 1)


def _tagged(request: GenerateRequest, num_bytes: int) -> bytes:
    """A request whose size is in a field that nothing bounds."""
    return pack_request(replace(request, tenant="x" * num_bytes))


def _long(request: GenerateRequest, num_bytes: int) -> bytes:
    return pack_request(replace(request, prompt_ids=[20_000] * (num_bytes // 3)))


def _engine_call(path: str, num_bytes: int) -> EngineCall:
    return EngineCall(path, b'{"messages": [{"role": "user", "content": "%b"}]}' % (b"x" * num_bytes))


def _call(path: str, num_bytes: int) -> bytes:
    return pack(_engine_call(path, num_bytes))


def _asking(request: GenerateRequest, num_bytes: int) -> bytes:
    return pack_request(replace(request, call=_engine_call(CHAT, num_bytes)))
