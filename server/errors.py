"""Every error that a client can get, and `as_api_error`, which makes one of an exception.

Source: the OpenAI specification's `Error` schema: message, type, param and code are all required. Under /v1/messages
errors have Anthropic's shape, https://platform.claude.com/docs/en/api/errors, and under /v1/models for its clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Scope

_NO_ROUTE: Final = (
    "There is no such route here. The API's port has /v1/chat/completions, /v1/completions, /v1/responses, "
    "/v1/messages, /v1/messages/count_tokens, /v1/embeddings, /rerank, /score, /classify, /pooling, /v1/models, "
    "/tokenize, /detokenize, /tokenizer_info, /health and /version; the ops port has /dashboard, /chat, /metrics, "
    "/workers and more."
)
TTFT_BUDGET: Final = "x-headstart-ttft-budget"
"""The request header with the longest time to the first token, in seconds."""
JSON_HEADERS: Final = (b"content-type", b"application/json")
_REQUEST_ERROR: Final = "invalid_request_error"
MESSAGES_PATH: Final = "/v1/messages"
MODELS_PATH: Final = "/v1/models"
RESPONSES_PATH: Final = "/v1/responses"
_VERSION_HEADER: Final = b"anthropic-version"
_ANTHROPIC_HEADERS: Final = frozenset({_VERSION_HEADER, b"x-api-key"})
"""Headers that Anthropic's clients send, and OpenAI's never."""
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's types of errors by status. Other 4xx are invalid_request_error, other 5xx api_error."""


class ApiError(Exception):
    """An answer other than success. `headers` are added to the response."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    default_headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = (JSON_HEADERS,)

    def __init_subclass__(cls, status: int = 0, type: str = "", code: str = "", header: str = "") -> None:
        """`header`: one that every such answer has. Missing values are inherited."""
        cls.status, cls.type, cls.default_code = status or cls.status, type or cls.type, code or cls.default_code
        if header:
            name, _, value = header.encode().partition(b": ")
            cls.default_headers = (*cls.default_headers, (name, value))

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """`details`: read by Anthropic's SDKs; OpenAI's errors have no such field."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s
        self.extra_headers = headers
        self.details = details

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.fields()})

    def fields(self) -> dict[str, str | None]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [*self.default_headers, *self.extra_headers]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
            headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(self.retry_after_s * 1e3))))
        return headers


class InvalidRequestError(ApiError, status=400, type=_REQUEST_ERROR):
    """Bad JSON, a wrong type or a value out of range; `param` names the field."""


class ContextLengthError(InvalidRequestError, code="context_length_exceeded"):
    """The prompt and `max_tokens` do not fit the model's context. Clients recognise it by the sentence of their API."""

    def __init__(
        self,
        however: str,
        max_model_len: int | None,
        *,
        num_tokens: int = 0,
        is_of_model: bool = True,
        param: str | None = None,
    ) -> None:
        """`num_tokens`: the prompt's tokens that were counted.

        `is_of_model`: False if `max_model_len` is the longest of all contexts (None: no model is known yet).
        """
        limit = "exceeded" if max_model_len is None else f"{max_model_len} tokens"
        if max_model_len is not None and not is_of_model:
            limit = f"at most {limit}"
        remedy = "Please reduce the length of the messages or completion."
        super().__init__(f"This model's maximum context length is {limit}. However, {however}. {remedy}", param=param)
        self._num_tokens = num_tokens
        self._max_model_len = max_model_len

    def for_messages(self) -> str:
        """Return Anthropic's sentence, by which agents recognise that they have to shorten the conversation.

        The first number exceeds the second one even if not all tokens were counted.
        """
        if self._max_model_len is None:
            return "prompt is too long: it has more tokens than a context holds"
        num_tokens = max(self._num_tokens, self._max_model_len + 1)
        return f"prompt is too long: {num_tokens} tokens > {self._max_model_len} maximum"


class AuthenticationError(
    ApiError, status=401, type=_REQUEST_ERROR, code="invalid_api_key", header="www-authenticate: Bearer"
):
    """The key is missing or wrong."""


class ForbiddenError(ApiError, status=403, type="permission_error"):
    """The key may not do this."""


class NotFoundError(ApiError, status=404, type=_REQUEST_ERROR):
    """An unknown route or model."""


class MethodNotAllowedError(ApiError, status=405, type=_REQUEST_ERROR, code="method_not_allowed"):
    """The route takes other methods."""


class BodyTooLargeError(ApiError, status=413, type=_REQUEST_ERROR, code="request_too_large"):
    """The body is larger than the port takes."""


class MediaTypeError(ApiError, status=415, type=_REQUEST_ERROR, code="unsupported_media_type"):
    """The body is not plain JSON."""


class HeaderTooLargeError(ApiError, status=431, type=_REQUEST_ERROR, code="headers_too_large"):
    """The head is larger than the port takes."""


class OverloadedError(
    ApiError, status=429, type="rate_limit_error", code="rate_limit_exceeded", header="x-should-retry: true"
):
    """A limit is reached: of a key (`auth.limits`), the queue (`router.queue`) or every worker (`request.retry`)."""


class InternalError(ApiError, code="internal_error", header="x-should-retry: false"):
    """A bug, or a poison request: clients must not retry."""


class WorkerLostError(ApiError, status=503, code="worker_lost"):
    """The worker died and no other could take over."""


class UnavailableError(ApiError, status=503, code="service_unavailable"):
    """No worker can serve."""


class RevisionGoneError(UnavailableError):
    """The revision of the model for which the request was prepared does not serve any more."""

    def __init__(self) -> None:
        super().__init__("The model has another revision now: ask again.", retry_after_s=1.0)


class ShuttingDownError(UnavailableError, code="shutting_down"):
    """The gateway stops, and its grace is over."""

    def __init__(self) -> None:
        super().__init__("This gateway stops before the answer is whole: ask again.", retry_after_s=1.0)


class DeadlineError(ApiError, status=504, code="timeout"):
    """The request ran into its deadline."""


class HttpVersionError(ApiError, status=505, type=_REQUEST_ERROR, code="http_version_not_supported"):
    """Neither HTTP/1.1 nor HTTP/1.0."""


def as_api_error(error: BaseException) -> ApiError:
    """Return the ApiError that stands for any exception. An unknown exception reveals no internals."""
    match error:
        case ApiError():
            return error
        case HTTPException(status_code=404):
            return NotFoundError(_NO_ROUTE, code="not_found")
        case HTTPException(status_code=405):
            allow = (error.headers or {}).get("Allow", "")
            extra = ((b"allow", allow.encode("latin-1")),) if allow else ()
            return MethodNotAllowedError(f"This route takes {allow or 'another method'}.", headers=extra)
        case TimeoutError():
            return DeadlineError("The request ran into its deadline.")
    return InternalError("The server met an internal error.")


def forget(error: BaseException) -> None:
    """Free what an answered exception holds: the frames of its traceback, and its causes.

    A frame with its exception in a variable is a cycle; so is a group that causes its own member. The collector counts
    objects, not bytes: until it runs, such cycles would hold the bodies of many requests.
    """
    errors = [error]
    while errors:
        each = errors.pop()
        behind = each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())
        errors += [other for other in behind if other is not None]
        each.__traceback__ = each.__cause__ = each.__context__ = None


def anthropic_error(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Return the status and the body of an error in Anthropic's shape: 529 for 503, and the field in the text."""
    status = 529 if error.status == 503 else error.status
    kind = _ANTHROPIC_TYPES.get(status, _REQUEST_ERROR if status < 500 else "api_error")
    if isinstance(error, ContextLengthError):
        message = error.for_messages()
    else:
        names_field = not error.param or error.param in error.message
        message = error.message if names_field else f"{error.param}: {error.message}"
    fields: dict[str, Any] = {"type": kind, "message": message}
    if error.details is not None:
        fields["details"] = error.details
    return status, msgspec.json.encode({"type": "error", "error": fields, "request_id": request_id})


def responses_error(error: ApiError) -> ApiError:
    """Return an error in the words of /v1/responses: OpenAI has its own sentence there for too long a prompt."""
    if not isinstance(error, ContextLengthError):
        return error
    sentence = "Your input exceeds the context window of this model. Please adjust your input and try again."
    return InvalidRequestError(sentence, param=error.param, code=error.code)


def is_under(path: str, route: str) -> bool:
    return path == route or path.startswith(f"{route}/")


def is_for_anthropic(scope: Scope) -> bool:
    """Return whether the answer, and an error too, has Anthropic's shape."""
    if is_under(scope["path"], MESSAGES_PATH):
        return True
    names = [name for name, _ in scope["headers"]]
    if is_under(scope["path"], MODELS_PATH):  # the one route that both APIs have
        return not _ANTHROPIC_HEADERS.isdisjoint(names)
    return _VERSION_HEADER in names  # its SDK sends it to each address, also to one that is not here
