"""A broken `model` gets a 4xx that names the field, on every route that takes one."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import post, worker  # noqa: F401 (a fixture)
from tests.server.test_field_sweep import BODIES

BROKEN: Final = (5, None, [], {}, "", "m" * 1_000_000, True)
BODY: Final = {
    **{name: value for body in BODIES.values() for name, value in body.items()},
    **{"tokens": [5], "query": "x", "documents": ["y"], "text_1": "x", "text_2": "y"},
}


async def test_a_broken_model_is_named_on_every_route(worker: ScriptedWorker) -> None:  # noqa: F811
    """The routes are those of the app, so a new one is found."""
    async with gateway(worker, max_body_bytes=4 << 20) as target:
        paths = [route.path for route in target.public.routes if "POST" in route.methods]
        assert len(paths) > 10
        paths.remove("/v1/responses/compact")  # refused, whatever it names
        for path in paths:
            plain = {"messages": BODY["messages"]} if path == "/tokenize" else dict(BODY)
            for model in BROKEN:
                status, _, raw = await post(target.url, {**plain, "model": model}, path)
                what = path, str(model)[:20], status, raw[:200]
                if model in (None, "") and path in ("/tokenize", "/detokenize"):
                    continue  # the only model
                assert 400 <= status < 500, what
                error: dict[str, Any] = json.loads(raw)["error"]
                assert "model" in error["message"], what
            plain.pop("model", None)
            assert (await post(target.url, plain, path))[0] < 500
