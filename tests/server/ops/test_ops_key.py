"""With an ops key, each route that changes something or shows a tenant's data needs it, on every address."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from server.ops.app import OpsApi, ops_app

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


async def ok(request: Request) -> Response:
    return Response()


class EveryRoute(OpsApi):
    """Answers each route with 200."""

    feed = metrics = workers = index = prefixes = decisions = explain = compare = drain = staticmethod(ok)  # type: ignore[assignment]
    overview: Any = SimpleNamespace(api=SimpleNamespace(live=ok, ready=ok))

    def __init__(self) -> None:
        pass

    async def act(self, request: Request, action: str) -> Response:
        return Response()


@pytest.mark.parametrize("has_tenants", [False, True])
@pytest.mark.parametrize("is_local", [True, False])
async def test_only_reading_needs_no_key(is_local: bool, has_tenants: bool) -> None:
    api = EveryRoute()
    app = ops_app(api, ok, b"key", local=is_local, has_tenants=has_tenants)  # type: ignore[arg-type]
    open_to_all, closed = set(), set()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ops") as http:
        for path in {route.path.format(worker_id="w", name="chat.js", id="req_1") for route in api.routes()}:
            for method in METHODS:
                for query in ("", "?tenant=alice"):
                    status = (await http.request(method, path + query)).status_code
                    if status != 405:
                        (closed if status == 401 else open_to_all).add((method, path + query))
                    with_key = await http.request(method, path + query, headers={"authorization": "Bearer key"})
                    assert with_key.status_code != 401
    asked = {(method, path) for method, path in open_to_all if method not in ("GET", "HEAD")}
    assert asked == (set() if has_tenants else {("POST", "/route/explain"), ("POST", "/prefixes/compare")})
    assert not any(path.endswith("tenant=alice") for _, path in open_to_all)
    assert {path for method, path in closed if method == "POST"} > {"/drain", "/workers/w/purge", "/workers/w/drain"}
