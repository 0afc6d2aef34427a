"""Answers of an engine's own APIs, which write the text: bodies out, events in.

The gateway decides on the prompt's ids and the salt. Everything else in a body is the client's.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from worker.adapter.api import EngineLostError, EnginePart, EngineRefusedError, Take
from worker.adapter.http import AnswerTooLongError, EngineServer, refusal_of
from worker.common.capabilities import CHAT
from worker.wire import EngineCall, GenerateRequest

COMPLETIONS: Final = "/v1/completions"
LENGTHS: Final = {CHAT: ("max_completion_tokens", "max_tokens"), COMPLETIONS: ("max_tokens",)}
_decode_part: Final = msgspec.json.Decoder(EnginePart).decode
decode_body: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


async def answer(server: EngineServer, call: EngineCall, body: object, take: Take) -> None:
    """Post the engine's `body` of a call, and hand each event of the answer, or all of it, to `take`."""
    if call.streams:
        await server.events(call.path, body, lambda data: take(data, part_of(data)))
        return
    try:
        whole = await server.content("POST", call.path, body, None)
    except AnswerTooLongError as error:
        raise EngineRefusedError(400, f"{error}: ask for less at a time") from error
    take(whole, part_of(whole))


def part_of(data: bytes) -> EnginePart:
    """Read what the worker itself needs of an event. Raises EngineLostError, EngineRefusedError for an error."""
    try:
        part = _decode_part(data)
    except msgspec.MsgspecError as mismatch:
        raise EngineLostError(f"an event of another form: {mismatch}") from mismatch
    # An answer is aborted because the engine pauses, sleeps or stops.
    is_aborted = "abort" in [choice.finish_reason for choice in part.choices]
    error = "it was aborted" if is_aborted else part.error
    if error is not None:
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            raise refusal_of(code, error)
        raise EngineLostError(f"the engine failed the request: {refusal_of(500, error).message:.1000}")
    return part


def shorten(body: dict[str, Any], request: GenerateRequest, path: str) -> None:
    """Ask for the rest of an answer of which the request brings the first tokens."""
    if num_done := len(request.choices[0].output_ids):
        for name in LENGTHS[path]:
            body.pop(name, None)
        body[LENGTHS[path][0]] = request.sampling.max_tokens - num_done
        if "min_tokens" in body:
            body["min_tokens"] = max(0, msgspec.json.decode(body["min_tokens"]) - num_done)
