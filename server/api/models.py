"""GET /v1/models and /v1/models/{id}, the routes that OpenAI's and Anthropic's APIs share.

The headers show which API the client speaks. Sources: OpenAI's specification, and https://platform.claude.com/docs/en/api/models.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from server.api.formatting import json_response
from server.auth.identity import identity_of
from server.errors import is_for_anthropic
from server.models.registry import Models
from server.models.served_model import ServedModel
from server.schema.decoding import invalid

OWNED_BY: Final = "headstart"
UNKNOWN: Final = "unknown"
"""The format of tool calls that come as content."""
PAGE_SIZE: Final = 20  # the default of Anthropic's API
MAX_PAGE_SIZE: Final = 1000  # the limit of Anthropic's API


class ModelsApi:
    def __init__(self, models: Models) -> None:
        self._models = models

    async def list(self, request: Request) -> Response:
        """List the models that the key may use: all for OpenAI's clients, a page for Anthropic's. Raises ApiError."""
        named = self._models.names(identity_of(request.scope))
        if is_for_anthropic(request.scope):
            return json_response(_page(named, request))
        return json_response({"object": "list", "data": [_card(*each) for each in named]})

    async def get(self, request: Request) -> Response:
        """Return one model. Raises ApiError."""
        name = request.path_params["model"]
        card = _anthropic_card if is_for_anthropic(request.scope) else _card
        return json_response(card(name, self._models.allowed(name, identity_of(request.scope))))


def _card(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": OWNED_BY,
        "root": model.adapter or model.name,
        "parent": model.name if model.adapter else None,
        "max_model_len": model.max_model_len,
        "tool_parser": UNKNOWN if model.tool_format is None else model.tool_format.name,
        "reasoning_parser": None if model.thoughts is None else model.thoughts.name,
        "default_sampling_params": model.bundle.sampling_defaults.shown(),
    }


def _anthropic_card(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def _page(named: Sequence[tuple[str, ServedModel]], request: Request) -> dict[str, Any]:
    """Return the page that the query's `limit`, `after_id` and `before_id` ask for. Raises InvalidRequestError."""
    query, names = request.query_params, [name for name, _ in named]
    text = query.get("limit", str(PAGE_SIZE))
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) <= 4 else 0
    if not 1 <= limit <= MAX_PAGE_SIZE:
        raise invalid("limit", f"is a number from 1 to {MAX_PAGE_SIZE}")
    places = {field: names.index(query[field]) for field in ("after_id", "before_id") if query.get(field) in names}
    for field in ("after_id", "before_id"):
        if field in query and field not in places:
            raise invalid(field, "is the id of no model here")
    between = named[places.get("after_id", -1) + 1 : places.get("before_id", len(named))]
    page = between[-limit:] if "before_id" in places else between[:limit]
    data = [_anthropic_card(*each) for each in page]
    ids = [card["id"] for card in data] or [None]
    return {"data": data, "has_more": len(page) < len(between), "first_id": ids[0], "last_id": ids[-1]}
