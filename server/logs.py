"""The gateway's log: lines of text, or one JSON object a line with the ids of request and trace. Never prompts."""

from __future__ import annotations

import logging
import os
import stat
import sys
from typing import Final, Literal

from server.current import CURRENT

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
    if kind == "json":
        handler.addFilter(add_ids)
        handler.setFormatter(json_formatter())
    else:
        handler.setFormatter(logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def json_formatter() -> logging.Formatter:
    """time, level, logger and message; what a record carries as `extra`; exc_info with the traceback."""
    from pythonjsonlogger.json import JsonFormatter

    names = {"levelname": "level", "name": "logger"}
    return JsonFormatter("%(levelname)s %(name)s %(message)s", rename_fields=names, timestamp="time")


def add_ids(record: logging.LogRecord) -> bool:
    """Who the line is about, when it is written in the course of a request."""
    request = CURRENT.get()
    if request is not None:
        record.request_id = request.request_id
        if request.trace is not None:
            record.trace_id = request.trace.trace_id
    return True
