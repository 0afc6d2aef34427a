"""[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...} ...        Mistral"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from server.text.detokenizer import ambiguous_len
from server.text.formats.base import Asking, CallRules, CallSchemas, Reading, TextReader, ToolFormat

MAX_NAME_CHARS: Final = 256
_BARE_NAME: Final = re.compile(rf"([^{{]{{0,{MAX_NAME_CHARS}}})\{{")
_CALLS: Final = "[TOOL_CALLS]"
_ARGUMENTS: Final = "[ARGS]"


def _read(reader: TextReader) -> Reading:
    while (yield from reader.until(_CALLS, reader.emit_content)):
        is_list = (yield from reader.skip()) == "["
        is_read = yield from (reader.call_list() if is_list else _bare_call(reader))
        if not is_read:
            return


def _bare_call(reader: TextReader) -> Asking:
    """Read a name and its arguments. Return False if there is no call, or only a part of one."""
    while (head := _BARE_NAME.match(reader.text)) is None:
        if len(reader.text) > MAX_NAME_CHARS:
            return False
        if reader.ended:
            name, _, rest = reader.text.partition(_ARGUMENTS)
            if name and not rest.strip():
                reader.emit("call", name[: len(name) - ambiguous_len(name, (_ARGUMENTS,))].strip())
                reader.text = ""
            return False
        yield
    name, _, rest = head[1].partition(_ARGUMENTS)
    if rest.strip():  # no arguments follow
        return False
    reader.text = reader.text[len(head[1]) :]
    reader.emit("call", name.strip())
    yield from reader.value(partial(reader.emit, "arguments"))
    return True


def _call_rules(schemas: CallSchemas) -> CallRules:
    return CallRules(f"{schemas.marker(_CALLS)} call", "body", schemas.many("arguments"))


MISTRAL: Final = ToolFormat("mistral", (_CALLS, _ARGUMENTS), lambda text: _CALLS in text, _read, _call_rules)
