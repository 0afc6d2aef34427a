"""What schemathesis loads: a check of its answers, and bodies that reach further than the model's name."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

FOUR_KEYS = {"message", "type", "param", "code"}


@schemathesis.check
def errors_have_four_keys(ctx: Any, response: Any, case: Any) -> None:
    assert response.headers.get("x-request-id"), "every answer has an id"
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == FOUR_KEYS, response.text
        assert isinstance(error["message"], str), response.text


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Half of the specification's bodies name models that nobody serves."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = os.environ["HEADSTART_MODEL"]
    return body
