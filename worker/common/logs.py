"""Logs of a gateway or a worker: lines of text, or one JSON object a line. Never prompts; requests by their id."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Callable
from typing import Final, Literal

LogFormat = Literal["text", "json"]
LOG_FORMATS: Final = ("text", "json")


def configure_logging(level: str, kind: LogFormat, add_ids: Callable[[logging.LogRecord], bool] | None = None) -> None:
    """Give the root logger one handler on stderr, with `add_ids` as the filter of JSON lines.

    A full disk, or a pipe without a reader, costs log lines and nothing else.
    """
    logging.raiseExceptions = False
    stderr = 2
    if stat.S_ISFIFO(os.fstat(stderr).st_mode):
        os.set_blocking(stderr, False)
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    if kind == "json":  # time, level, logger, message, the record's `extra` fields, and any traceback
        from pythonjsonlogger.json import JsonFormatter

        names = {"levelname": "level", "name": "logger"}
        formatter = JsonFormatter("%(levelname)s %(name)s %(message)s", rename_fields=names, timestamp="time")
        if add_ids is not None:
            handler.addFilter(add_ids)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def about(request_id: str, traceparent: str = "") -> dict[str, str]:
    """Return the `extra` of a log line about one request."""
    fields = {"request_id": request_id}
    if traceparent:
        fields["trace_id"] = traceparent.split("-")[1]
    return fields
