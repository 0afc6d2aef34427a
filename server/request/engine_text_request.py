"""The record of a request for the text of an engine's own API."""

from __future__ import annotations

from msgspec import Raw, Struct

from worker.wire import EngineCall


class EngineTextRequest(Struct, frozen=True, eq=False, kw_only=True):
    """A client's request for the engine's own text, and what it asked for of the answer."""

    call: EngineCall
    is_read: bool = False
    """The gateway reads the chat's events, and writes those of another API."""
    head: dict[str, Raw]
    """Fields of each event that have the gateway's values: id, created, model."""
    shows_usage: bool
    """The client has asked for the usage at a stream's end."""
    has_usage: bool
    """The engine is asked for it."""
    shows_ids: bool
    num_tokens: int = 0
    """The estimated length of a prompt that the gateway has no ids of."""
    is_resumable: bool
    """The answer has one choice, and its sampling does not depend on the output so far."""
