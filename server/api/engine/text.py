"""Requests whose text the engine writes: its own API renders the prompt and the answer.

    body -> the engine's ids of the prompt, by a worker -> placed by their hashes -> the engine's API, with these ids

The gateway decides on the model, the salt and the priority. Every other field is the engine's business, errors too.

Source: docs/architecture/engine_text.md.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from server.api.chat import ChatEndpoint, ConversationEndpoint
from server.api.endpoint import GenerateEndpoint, PreparedRequest
from server.api.engine.chats import chat_of, keep_images
from server.api.engine.control import LENGTHS, check_control_tokens
from server.api.engine.media import CHAT_PATH, COMPLETIONS_PATH, Media, read_media, with_images, with_small_images
from server.api.engine.prompts import EnginePrompts
from server.api.engine.rendering import EngineRenderer
from server.api.engine.shapes import EngineShapes
from server.api.formatting import ResponseFormatter, encode_json, response_id
from server.api.prompts.client_lines import body_without_line, conversation_without_line
from server.api.prompts.ignored_tools import IgnoredTools
from server.api.prompts.params import choice_seeds, new_spec
from server.auth.identity import Identity, request_salt
from server.config import GatewayConfig
from server.errors import ContextLengthError, InvalidRequestError, NotFoundError, UnavailableError
from server.event_loop import StreamInterval, run_sliced
from server.http.stream import DONE, sse
from server.models.registry import Models
from server.models.served_model import ServedModel
from server.request.choice import ChoiceDelta, EngineTextRequest, GenerationSpec
from server.request.response import ResponseStream
from server.request_context import CURRENT, trace_stage
from server.schema.decoding import TextLimit, fields_of, located, read_json, unsupported
from server.schema.field_table import IGNORED, REFUSED_FIELDS, SENT_FIELDS, SENT_XARGS
from server.schema.fields import CallerFields, RequestFields, StreamOptions
from server.schema.intent import ChatIntent
from server.schema.requests import CompletionRequest
from server.schema.wishes import WORDS
from server.text.output_parser import OutputRules
from server.workers.client import WorkerClient
from server.workers.fleet import Fleet
from worker.common.capabilities import IMAGES
from worker.wire import POOLING_PATHS, EngineCall, Rendered, SamplingParams

ENGINE_PATHS: Final = {
    **{path: path for path in POOLING_PATHS},
    **{"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"},
}
"""The engine's path, by the path of a request without text: embeddings, pooling, classes, scores and ranks."""
MAX_CHOICES: Final = 16_384
"""More are left to the engine to refuse."""
_COMPLETION_TOKENS: Final = 16  # OpenAI's default, which engines add to the prompt as if it were asked for
_BYTES_PER_TOKEN: Final = 4  # of usual English, as a guess before the engine has counted
_OWN_FIELDS: Final = ("model", "priority", "request_id", "stream_options")
"""Fields of a body that the gateway or the adapter writes. The salt stays, for the engine to check."""
_HINTS: Final = frozenset(RequestFields.__struct_fields__)
_NOT_SENT: Final = {
    "use_beam_search": "is not offered, as an engine searches with many requests: ask for `n` samples",
    "kv_transfer_params": "is for transfers between engines, which the fleet makes itself: leave it out",
    "ec_transfer_params": "is for transfers between engines, which the fleet makes itself: leave it out",
}
"""Why some fields are refused, next to those that the gateway's own text refuses or honours."""
_REFUSED: Final = frozenset({*_NOT_SENT, *CompletionRequest.__struct_fields__}.union(*REFUSED_FIELDS.values()))
"""Fields that some server honours: refused on a route that does not send them on."""
_STATEFUL: Final = (
    *("stop", "structured_outputs", "response_format", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logprobs", "echo", "include_reasoning", "bad_words", "return_prompt_text", "repetition_detection", "vllm_xargs"),
)
"""Fields with which the tokens so far are not enough to continue an answer. One with thoughts never goes on."""


class _Head(msgspec.Struct):
    model: str = ""


class _Known(CallerFields, kw_only=True):
    """The fields of a body that the gateway needs, of whatever API."""

    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    encoding_format: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class _EngineBody(NamedTuple):
    """The part of a body for an engine that the gateway reads."""

    path: str
    """The engine's route."""
    name: str
    """The model, as the client calls it."""
    model: ServedModel
    known: _Known
    media: Media
    intent: ChatIntent | None
    """The chat that a body of another API asks for."""


_head_of: Final = msgspec.json.Decoder(_Head).decode
_known_of: Final = msgspec.json.Decoder(_Known, strict=False).decode


class EngineTexts:
    """Prepares the requests whose text an engine writes. Owned by the gateway."""

    def __init__(
        self, models: Models, client: WorkerClient, fleet: Fleet, ignored_tools: IgnoredTools, config: GatewayConfig
    ) -> None:
        self._ignored_tools = ignored_tools
        self._config = config
        self._xargs = SENT_XARGS | config.engine_xargs
        self._models = models
        self._renderer = EngineRenderer(models, client, fleet)
        self._prompts = EnginePrompts(self._renderer)
        self._shapes = EngineShapes(self._renderer, self._prompts, is_strict=config.strict_template)
        self._interval = StreamInterval()

    async def prepare(
        self, path: str, body: bytes, identity: Identity, endpoint: GenerateEndpoint, *, counts: bool = False
    ) -> PreparedRequest | None:
        """Return the request with its prompt; None if the gateway writes the text. Raises ApiError.

        `endpoint` reads a body of another API than the engine's as a chat, and writes its answer.
        `counts`: only the prompt is wanted, whatever length the answer should have.
        """
        dialect: ConversationEndpoint | None = None
        path = ENGINE_PATHS.get(path, path)
        if isinstance(endpoint, ConversationEndpoint) and not isinstance(endpoint, ChatEndpoint):
            dialect, path = endpoint, CHAT_PATH
        if not self._models.has_engine_text or path not in SENT_FIELDS:
            return None
        with trace_stage("validate"):
            asked = await self._read(path, body, identity, dialect, counts=counts)
        if asked is None:
            return None
        with _naming(asked.intent, asked.model):
            sent = await self._repaired(asked)
            call = EngineCall(path, encode_json(sent), bool(asked.known.stream) and path not in POOLING_PATHS)
            rendered = None
            if not call.pools:
                with trace_stage("tokenise"):
                    rendered = await self._prompt(call, sent, asked)
                if len(rendered.prompts) != 1:
                    why = "takes one prompt where the engine writes the text: send several requests"
                    raise unsupported("prompt", why)
        if rendered is not None and asked.intent is not None and asked.intent.max_tokens is not None:
            able = self._renderer.able(asked.model, path, has_images=bool(asked.media.images))
            longest = max([each.member.max_model_len for each in able], default=asked.model.max_model_len)
            num_tokens = max(1, min(asked.intent.max_tokens, longest - len(rendered.prompts[0])))
            asked = asked._replace(known=replace(asked.known, max_tokens=num_tokens))
            call = replace(call, body=encode_json(sent | {"max_completion_tokens": num_tokens}))
        spec = _spec(response_id(endpoint.prefix), call, asked, identity, rendered)
        if dialect is None or asked.intent is None or counts:
            return PreparedRequest((spec,), EngineFormatter(), call.streams)
        rules = OutputRules(client_names=asked.intent.tool_set.names, parallel=asked.intent.parallel_tool_calls)
        return PreparedRequest((spec,), dialect.formatter(asked.intent.fields, spec, rules), call.streams)

    async def has_other_template(self, model: ServedModel) -> bool:
        """Return whether the model's engines render chats otherwise than the gateway."""
        return bool(self._renderer.digests(model)) and not await self._prompts.shares_template(model)

    async def _read(
        self, path: str, body: bytes, identity: Identity, dialect: ConversationEndpoint | None, *, counts: bool
    ) -> _EngineBody | None:
        """Decode and check a body. None: the gateway writes the text itself. Raises ApiError."""
        limit = self._models.batch_text_limit if path in POOLING_PATHS else self._models.text_limit
        name = (await read_json(body, _head_of, lambda: with_images(limit(), self._config))).model
        try:
            model = self._models.allowed(name, identity)
        except (NotFoundError, UnavailableError):
            return None
        if not self._models.engine_writes(path, model):
            return None
        CURRENT.get().name_model(model.name)
        rules = self._config if {path, IMAGES} <= model.facts.capabilities and path == CHAT_PATH else None
        intent = None
        if dialect is not None:
            with_room = limit if rules is None else lambda: with_images(limit(), self._config)
            intent = await dialect.read(body, with_room, counts=counts)
            if rules is not None:
                keep_images(intent.conversation.messages)
            self._ignored_tools.take(intent)
            if not model.keeps_client_lines:
                conversation, CURRENT.get().removal_rule = conversation_without_line(intent.conversation)
                intent = dataclasses.replace(intent, conversation=conversation)
            body = chat_of(intent)
        with _decoding(), _naming(intent, model):
            fields, known = fields_of(body), _known_of(body)
            if counts:
                fields = {name: value for name, value in fields.items() if name not in LENGTHS}
                fields["max_tokens"] = Raw(b"1")
            salt = request_salt(identity, known.cache_salt)
            media = await run_sliced(read_media(fields, path, rules, salt))
            _check(path, known, media.fields, self._xargs)
        if (num_bytes := limit().num_bytes) is not None and len(body) > num_bytes:  # of text and images
            text_limit = TextLimit(num_bytes + media.num_bytes, limit().max_model_len)
            await read_json(body, _head_of, lambda: text_limit)
        return _EngineBody(path, name, model, known, media, intent)

    async def _repaired(self, asked: _EngineBody) -> dict[str, Any]:
        """Return the body for the engine, in a shape that its template takes. Name what is left out of it."""
        path, model = asked.path, asked.model
        with _decoding():
            sent = _body(asked, self._interval.num_tokens())
            if path == CHAT_PATH and asked.intent is None:
                if not model.keeps_client_lines:
                    sent, CURRENT.get().removal_rule = body_without_line(sent)
                sent = self._ignored_tools.without(sent)
            fields = asked.media.fields.items()
            self._ignored_tools.name([name for name, value in fields if _is_left_out(path, name, value)])
            if path != CHAT_PATH:
                return sent
            sent, repairs = await self._shapes.repaired(sent, model)
            wishes = None if asked.intent is None else asked.intent.conversation.wishes
            sent, wish_repairs, unheeded = await self._shapes.granted(sent, wishes, model)
        context = CURRENT.get()
        context.repairs = (*repairs, *wish_repairs)
        context.ignore(unheeded)
        return sent

    async def _prompt(self, call: EngineCall, sent: dict[str, Any], asked: _EngineBody) -> Rendered:
        """Return the prompt of a call, without control tokens of the client. Raises ApiError."""
        model, has_images = asked.model, bool(asked.media.images)
        if call.path == CHAT_PATH and not has_images and (prompt := await self._prompts.render(sent, model)):
            return prompt
        rendered = await self._renderer.rendered(call, asked.media, model)
        if call.path != COMPLETIONS_PATH and not self._config.control_tokens_in_content:
            render = partial(self._renderer.render, model=model, has_images=has_images)
            body = with_small_images(sent) if has_images else sent  # which the engine need not read again
            await check_control_tokens(call, body, None if has_images else rendered, model, render)
        return rendered


@contextmanager
def _naming(intent: ChatIntent | None, model: ServedModel) -> Iterator[None]:
    """Name the client's fields in errors of a chat that was made of another API's body."""
    try:
        yield
    except InvalidRequestError as error:
        if intent is None:
            raise
        if error.code == "context_length_exceeded":
            message = "your prompt has more tokens"
            raise ContextLengthError(message, model.max_model_len, param=intent.names.messages) from error
        if error.param is not None and error.param.startswith("messages"):
            error.param = intent.names.messages
        raise


@contextmanager
def _decoding() -> Iterator[None]:
    """Raise InvalidRequestError for values of another type, and for strings that are no UTF-8, or half of a pair."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise located(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from error


def _is_sent(path: str, name: str) -> bool:
    return name in SENT_FIELDS[path] or name in _HINTS or (path == CHAT_PATH and name in WORDS)


def _is_left_out(path: str, name: str, value: Any) -> bool:
    """Return whether a field is neither sent on nor empty, and not one that cannot change an answer."""
    is_known = _is_sent(path, name) or (name in IGNORED and name not in _NOT_SENT)
    return not (is_known or not value or (name in ("n", "best_of") and repr(value) == "1"))


def _check(path: str, known: _Known, fields: Mapping[str, Any], xargs: Collection[str]) -> None:
    """Raises InvalidRequestError for fields that any server honours, and that are not sent on to engines."""
    for name, value in fields.items():
        if name in _REFUSED and _is_left_out(path, name, value):
            refusal = REFUSED_FIELDS.get(path, {}).get(name)
            why = "is not sent on to the model's engine: leave it out" if refusal is None else refusal.why
            raise unsupported(f"{name:.64}", _NOT_SENT.get(name, why))
    given = fields.get("vllm_xargs")
    for name in given if isinstance(given, dict) else ():  # the engine refuses another type in its own words
        if name not in xargs:
            raise unsupported(f"vllm_xargs.{name:.64}", "is not in the gateway's --engine-xargs")
    if known.encoding_format in ("bytes", "bytes_only"):
        raise unsupported("encoding_format", "of this kind is not served: use `float` or `base64`")


def _body(asked: _EngineBody, num_event_tokens: int) -> dict[str, Any]:
    """Return the client's fields that are the engine's business.

    Streams get `num_event_tokens` in an event, or what the client asks for. An engine has its own least.
    """
    path, model, known, fields = asked.path, asked.model, asked.known, asked.media.fields
    body: dict[str, Any] = {name: value for name, value in fields.items() if _is_sent(path, name)}
    for name in _OWN_FIELDS:
        body.pop(name, None)
    if model.adapter:
        body["model"] = model.adapter
    if path == CHAT_PATH and (model.template_kwargs or model.forced_kwargs):
        kwargs = fields.get("chat_template_kwargs")
        if kwargs is None or isinstance(kwargs, dict):  # the engine refuses another type
            body["chat_template_kwargs"] = {**model.template_kwargs, **(kwargs or {}), **model.forced_kwargs}
    if path in (CHAT_PATH, COMPLETIONS_PATH):
        options = known.stream_options
        if options is not None and (options.include_usage or not known.stream):
            body["stream_options"] = fields["stream_options"]
        elif known.stream and (known.n or 1) == 1:  # with more, the engine's fingerprint would go to another event
            body["stream_options"] = {"include_usage": True}
        if known.stream and num_event_tokens > 1:
            body.setdefault("stream_interval", num_event_tokens)
    return body


def _spec(
    id_: str, call: EngineCall, asked: _EngineBody, identity: Identity, rendered: Rendered | None
) -> GenerationSpec:
    """Return the request of a call. `rendered`: None without text; then its length is estimated."""
    known, model, options = asked.known, asked.model, asked.known.stream_options
    num_choices = 1 if rendered is None else min(max(1, known.n or 1), MAX_CHOICES)
    media = rendered.media[0] if rendered is not None and rendered.media else ()
    shows_usage = options is not None and bool(options.include_usage)
    is_stateful = any(asked.media.fields.get(field) for field in _STATEFUL)
    caller = known if asked.intent is None else asked.intent.fields
    head = {"id": Raw(encode_json(id_)), "model": Raw(encode_json(asked.name))}
    text_request = EngineTextRequest(
        call=call,
        is_read=asked.intent is not None,
        head=head if rendered is None else head | {"created": Raw(encode_json(int(time.time())))},
        shows_usage=shows_usage or rendered is None,
        has_usage=num_choices == 1 or shows_usage,
        shows_ids=bool(known.return_token_ids) or asked.media.fields.get("echo") is True,
        is_resumable=call.path in (CHAT_PATH, COMPLETIONS_PATH) and num_choices == 1 and not (is_stateful or media),
        num_tokens=0 if rendered is not None else min(len(call.body) // _BYTES_PER_TOKEN, model.max_model_len - 1),
    )
    num_demanded = known.max_tokens if known.max_completion_tokens is None else known.max_completion_tokens
    if call.path == COMPLETIONS_PATH and "max_tokens" not in asked.media.fields:
        num_demanded = _COMPLETION_TOKENS
    if rendered is None:
        return replace(new_spec(id_, model, identity, caller, "input"), text_request=text_request)
    return replace(
        new_spec(id_, model, identity, caller, "prompt" if call.path == COMPLETIONS_PATH else "messages"),
        prompt_ids=rendered.prompts[0],
        seeds=choice_seeds(0, num_choices),
        sampling=SamplingParams(max_tokens=num_demanded or rendered.max_tokens[0]),
        grammar_param="response_format",
        clamps_max_tokens=num_demanded is None,
        text_request=text_request,
        media=media,
    )


class EngineFormatter(ResponseFormatter):
    """Writes the engine's events as they are."""

    def body(self, response: ResponseStream, choices: Sequence[ChoiceDelta]) -> Iterable[bytes]:
        return [choice.event for choice in choices]

    def events(self, response: ResponseStream, deltas: Sequence[ChoiceDelta]) -> bytes:
        return b"".join([sse(delta.event) for delta in deltas])

    def last_events(self, response: ResponseStream) -> bytes:
        return DONE


class PoolingEndpoint(GenerateEndpoint):
    """A route that only engines have. The gateway places its requests by load, and the engine reads the texts."""

    route, prefix = "pooling", "pool-"

    async def prepare(self, body: bytes, identity: Identity) -> PreparedRequest:
        """Refuse the request: no engine of the model has this route."""
        name = (await read_json(body, _head_of, self._models.batch_text_limit)).model
        self._known_model(name, identity)
        why = "is not served at this route: an engine with a model for it is needed"
        raise InvalidRequestError(f"The model {name!r:.200} {why}.", param="model")
