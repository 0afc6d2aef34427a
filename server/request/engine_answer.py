"""The answer of an engine that writes the text itself: its events, less what the client did not ask for.

    data of an event -> ids of the gateway -> without token ids and usage, unless asked for -> the client
                     -> parts of the answer -> the writer of another API -> the client

When a worker is lost, the answer decides whether another can continue it:

    nothing sent                                     from the prompt, at any worker
    one choice, only plain content                   with the token ids whose text was sent, within the numerics class
    text of the last event's tokens is kept back     an error
    reasoning, calls, several choices                an error

Source: docs/architecture/engine_text.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from server.errors import WorkerLostError
from server.request.choice import Choice, ChoiceDelta, EngineTextRequest, StopReason
from server.schema.decoding import NULL, fields_of, first_char, value_of
from server.text.output_parser import OutputDelta, call_id
from server.text.tokenizer import Tokenizer
from server.workers.connection import WorkerLost

_choices_of: Final = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_encode: Final = msgspec.json.Encoder().encode
_PLAIN: Final = frozenset({"role", "content"})
_text_of: Final = msgspec.json.Decoder(str).decode
_ID: Final = rb"(?:0|[1-9]\d*)"
_IDS: Final = re.compile(_ID + rb"(?:, ?" + _ID + rb")*")
_PLAIN_EVENT: Final = re.compile(
    rb'(.*"delta": ?)(\{"content": ?("(?:[^"\\]|\\.)*")\})(.*"token_ids": ?)\[[\d, ]+\](.*)', re.DOTALL
)


class _Shape(NamedTuple):
    """The bytes around content and token ids in an event, and around the content that is passed on.

    The next event of the same bytes is not parsed: its content is one JSON string, and its ids are numbers.
    """

    before: bytes
    between: bytes
    after: bytes
    passed_before: bytes
    passed_after: bytes


class EngineAnswer:
    """Passes the events of one generation on, over all its attempts."""

    def __init__(self, request: EngineTextRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._token_bytes = tokenizer.token_bytes
        self.reset()

    def reset(self) -> None:
        """Forget everything: nothing has been sent."""
        self._pending: list[ChoiceDelta] = []
        self._shape: _Shape | None = None
        """The shape of plain events; None: none was parsed since the attempt began."""
        self._held: list[dict[str, Raw]] = []
        """The event that ends the choice. It waits for the usage, whose fingerprint it gets."""
        self._is_plain = self._request.is_resumable
        self._is_rest = False
        """The client has the beginning, from an engine that was lost."""
        self._num_resumed = 0
        """Output tokens in the engine's present prompt."""
        self._num_shown_ids = 0
        """Output tokens whose text is in events, all of it if `_shows_all`."""
        self._shows_all = True
        self.num_output_tokens = 0
        """Those that the engine has counted at its end. Before that, the events with output, if it gives no ids."""
        self.num_reasoning_tokens = 0
        self.num_prompt_tokens = 0
        """As the engine has counted them. The only count for an answer without text."""

    def restart(self, choices: Sequence[Choice], *, client_has_output: bool) -> None:
        """Prepare another attempt after a lost one. Raises WorkerLostError if none can go on with what was sent."""
        self._shape = None
        if not client_has_output:
            self.reset()
            for choice in choices:
                choice.reset()
        elif not (self._is_plain and self._shows_all) or (
            self._request.shows_ids and len(choices[0].output_ids) > self._num_shown_ids
        ):
            message = "The worker was lost, and no other can go on with an answer of this kind: ask again."
            raise WorkerLostError(message, retry_after_s=1.0)
        else:
            self._is_rest, self._num_resumed = True, self._num_shown_ids
            choices[0].output_ids = choices[0].output_ids[: self._num_shown_ids]

    def take_deltas(self) -> list[ChoiceDelta]:
        deltas, self._pending = self._pending, []
        return deltas

    def _pass(self, fields: dict[str, Raw]) -> None:
        self._pending.append(ChoiceDelta(0, "", [], [], None, event=_encode(fields)))

    def take(self, data: bytes, ids: Sequence[int]) -> None:
        """Take an event, behind the output tokens `ids` of the first choice. Raises WorkerLost."""
        try:
            if not self._take_plain(data, ids):
                self._take(data, ids)
        except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
            raise WorkerLost(f"an event of another form: {error}") from error

    def _take_plain(self, data: bytes, ids: Sequence[int]) -> bool:
        """Take an event of the same bytes as the last, apart from content and ids. Return False for any other."""
        shape = self._shape
        if shape is None or not ids or not (data.startswith(shape.before) and data.endswith(shape.after)):
            return False
        content, found, token_ids = data[len(shape.before) : -len(shape.after)].rpartition(shape.between)
        if not found or len(content) <= len(b'""') or not _IDS.fullmatch(token_ids):
            return False
        try:
            text = _text_of(content)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        self._shown(text, ids)
        event, parts = b"", []
        if self._request.is_read:
            parts = [OutputDelta("content", text)]
        else:
            event = shape.passed_before + content + shape.passed_after
        self._pending.append(ChoiceDelta(0, "", [], [], None, parts=parts, event=event))
        return True

    def _learn(self, data: bytes, choice: dict[str, Raw], fields: dict[str, Raw]) -> None:
        """Keep the shape of an event that was passed on, if it is of plain content."""
        request = self._request
        is_other = [name for name in ("finish_reason", "logprobs", "stop_reason") if _has(choice, name)]
        if request.shows_ids or self._is_rest or is_other or _has(fields, "usage"):
            return
        found = _PLAIN_EVENT.fullmatch(data)
        if found is None or data.count(b'"delta"') != 1 or data.count(b'"token_ids"') != 1:
            return
        before, delta, literal, between, after = found.groups()
        passed = b"" if request.is_read else self._pending[-1].event
        passed_before, _, passed_after = passed.partition(b'"delta":' + delta)
        head, tail = delta.split(literal, 1)
        self._shape = _Shape(
            before + head, tail + between + b"[", b"]" + after, passed_before + b'"delta":' + head, tail + passed_after
        )

    def _take(self, data: bytes, ids: Sequence[int]) -> None:
        request, fields = self._request, fields_of(data)
        fields |= {name: value for name, value in request.head.items() if name in fields}
        self._count(fields)
        if "choices" not in fields:
            self._pass(fields)
            return
        choices = _choices_of(fields["choices"])
        if (self._is_rest or not request.shows_ids) and "prompt_token_ids" in fields:
            fields["prompt_token_ids"] = NULL
        kept = [choice for choice in choices if self._keep(choice, ids)]
        if request.is_read:
            self._pending += map(_read, kept)
        elif not choices:
            self._end(fields)
        elif kept:
            fields["choices"] = Raw(_encode(kept))
            is_last = request.call.streams and any(_has(choice, "finish_reason") for choice in kept)
            if is_last:
                self._is_plain = False
            if is_last and request.has_usage and not request.shows_usage:
                self._held.append(fields)
                return
            self._pass(fields)
        if len(choices) == len(kept) == 1 and request.call.streams and "delta" in kept[0]:
            self._learn(data, kept[0], fields)

    def _keep(self, choice: dict[str, Raw], ids: Sequence[int]) -> bool:
        """Take out what was not asked for. Return False for a choice that is then empty."""
        request = self._request
        hides = {"token_ids": not request.shows_ids, "prompt_token_ids": self._is_rest or not request.shows_ids}
        choice.update({name: NULL for name, is_hidden in hides.items() if is_hidden and name in choice})
        if not request.call.streams:
            return True
        is_over = _has(choice, "finish_reason")
        if "text" in choice:
            delta = {"content": value_of(choice["text"])}
        else:
            delta = value_of(choice["delta"])
            if not delta and not is_over and not request.shows_ids and not _has(choice, "logprobs"):
                return False
            if self._is_rest and delta.pop("role", None) is not None:  # the client has it
                if not any(delta.values()) and not is_over:
                    return False
                choice["delta"] = Raw(_encode(delta))
        self._is_plain &= all(name in _PLAIN or value is None for name, value in delta.items())
        self.num_output_tokens += not ids and any(value for name, value in delta.items() if name != "role")
        if content := delta.get("content"):
            self._shown(content, ids)
        return True

    def _shown(self, content: str, ids: Sequence[int]) -> None:
        """Note the output tokens whose text was sent with this content."""
        self._is_plain &= len(ids) > 0  # an engine may give no ids of a stream
        new, shown = ids[self._num_shown_ids :], content.encode()
        text = b"".join([self._token_bytes[id_] for id_ in new])
        # A parser may keep back what may begin a call, and a detokenizer a part of a character.
        num_kept = 0
        while len(text) > len(shown) and num_kept + 1 < len(new):
            num_kept += 1
            text = text[: len(text) - len(self._token_bytes[new[-num_kept]])]
        self._shows_all = len(text) <= len(shown) if len(new) == 1 else bool(text) and shown.endswith(text)
        self._num_shown_ids = len(ids) - num_kept * self._shows_all

    def _end(self, fields: dict[str, Raw]) -> None:
        """Take the event of the usage."""
        for held in self._held:
            if "system_fingerprint" in fields:
                held["system_fingerprint"] = fields["system_fingerprint"]
            self._pass(held)
        self._held = []
        if self._request.shows_usage:
            self._pass(fields)

    def _count(self, fields: dict[str, Raw]) -> None:
        """Read the usage, and count the tokens of a resumed answer as output."""
        usage = value_of(fields["usage"]) if "usage" in fields else None
        if not isinstance(usage, dict):
            return
        if self._num_resumed:
            usage["prompt_tokens"] -= self._num_resumed
            usage["completion_tokens"] += self._num_resumed
            if details := usage.get("prompt_tokens_details"):
                details["cached_tokens"] = min(details.get("cached_tokens") or 0, usage["prompt_tokens"])
            fields["usage"] = Raw(_encode(usage))
        if isinstance(num_tokens := usage.get("prompt_tokens"), int):
            self.num_prompt_tokens = num_tokens
        num_tokens, details = usage.get("completion_tokens"), usage.get("completion_tokens_details")
        self.num_output_tokens = num_tokens if isinstance(num_tokens, int) else 0
        self.num_reasoning_tokens = (details or {}).get("reasoning_tokens") or 0


def _read(choice: dict[str, Raw]) -> ChoiceDelta:
    """Return the parts of a chat's choice, of a stream or whole."""
    message = value_of(choice["delta"] if "delta" in choice else choice["message"])
    parts, ids = [OutputDelta("reasoning", message.get("reasoning") or message.get("reasoning_content") or "")], []
    parts.append(OutputDelta("content", message.get("content") or ""))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        if name := function.get("name"):
            parts.append(OutputDelta("call", name))
            ids.append(call.get("id") or call_id())
        parts.append(OutputDelta("arguments", function.get("arguments") or ""))
    reason: StopReason | None = None
    if _has(choice, "finish_reason"):
        reason = "length" if bytes(choice["finish_reason"]) == b'"length"' else "stop"
    logprobs = value_of(choice["logprobs"]).get("content") if _has(choice, "logprobs") else None
    stop = value_of(choice.get("stop_reason", NULL))
    return ChoiceDelta(0, "", [], [], reason, stop, parts=parts, call_ids=ids, logprobs=logprobs or ())


def _has(fields: dict[str, Raw], name: str) -> bool:
    """Return whether a field is there and not null."""
    return name in fields and first_char(fields[name]) != "n"
