"""The worker's log: lines of text, or one JSON object a line. Never prompts; requests by their id."""

from __future__ import annotations

import logging
import os
import stat
import sys
from typing import Final, Literal

from worker.wire import GenerateRequest

LogFormat = Literal["text", "json"]
LOG_FORMATS: Final = ("text", "json")
STDERR: Final = 2
TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str, kind: LogFormat) -> None:
    """The root logger's one handler, on stderr. A disk that is full, or a pipe that nobody reads, costs lines only."""
    logging.raiseExceptions = False
    if stat.S_ISFIFO(os.fstat(STDERR).st_mode):
        os.set_blocking(STDERR, False)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(TEXT) if kind == "text" else json_formatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def json_formatter() -> logging.Formatter:
    """time, level, logger and message; what a record carries as `extra`; exc_info with the traceback."""
    from pythonjsonlogger.json import JsonFormatter

    names = {"levelname": "level", "name": "logger"}
    return JsonFormatter("%(levelname)s %(name)s %(message)s", rename_fields=names, timestamp="time")


def about(request: GenerateRequest) -> dict[str, str]:
    """The `extra` of a line that speaks of one request."""
    fields = {"request_id": request.request_id}
    if request.traceparent:
        fields["trace_id"] = request.traceparent.split("-")[1]
    return fields
