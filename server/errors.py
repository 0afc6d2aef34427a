"""Every error that a client can get, and the one place that turns an exception into one.

    ApiError
    |-- InvalidRequestError   400   bad JSON, type, range; `param` names the field
    |   |-- ContextLengthError  400   prompt + max_tokens do not fit the model's context
    |-- AuthenticationError   401
    |-- ForbiddenError        403
    |-- NotFoundError         404   unknown route or model
    |-- MethodNotAllowedError 405
    |-- BodyTooLargeError     413
    |-- MediaTypeError        415
    |-- HeaderTooLargeError   431
    |-- OverloadedError       429   capacity exists but is contended
    |-- InternalError         500   our bug, or a poison request: clients must not retry
    |-- WorkerLostError       503   the worker died and no other could take over
    |-- UnavailableError      503   no worker can serve
    |   |-- ShuttingDownError   503   the gateway stops, and its grace is over
    |-- DeadlineError         504
    +-- HttpVersionError      505

Source: the OpenAI specification's `Error` schema: message, type, param and code are all required.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final

import msgspec
from starlette.exceptions import HTTPException

from server.router.placement import NoWorkerError

_NO_ROUTE: Final = (
    "There is no such route. This server offers /v1/chat/completions, /v1/completions, /v1/responses, "
    "/v1/models, /tokenize, /detokenize and /version."
)
JSON_HEADERS: Final = (b"content-type", b"application/json")


class ApiError(Exception):
    """An answer other than success. `headers` are added to the response."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    should_retry: ClassVar[bool | None] = None
    """The value of `x-should-retry`; None leaves it to the client's own rule."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s
        self.extra_headers = headers

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.fields()})

    def fields(self) -> dict[str, str | None]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [JSON_HEADERS, *self.extra_headers]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
            headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(self.retry_after_s * 1e3))))
        if self.should_retry is not None:
            headers.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        return headers


class InvalidRequestError(ApiError):
    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    default_code = "context_length_exceeded"


class AuthenticationError(ApiError):
    status = 401
    type = "invalid_request_error"
    default_code = "invalid_api_key"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class ForbiddenError(ApiError):
    status = 403
    type = "permission_error"


class NotFoundError(ApiError):
    status = 404
    type = "invalid_request_error"


class MethodNotAllowedError(ApiError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class BodyTooLargeError(ApiError):
    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class MediaTypeError(ApiError):
    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_media_type"


class HeaderTooLargeError(ApiError):
    status = 431
    type = "invalid_request_error"
    default_code = "headers_too_large"


class OverloadedError(ApiError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    should_retry = True


class InternalError(ApiError):
    status = 500
    default_code = "internal_error"
    should_retry = False


class WorkerLostError(ApiError):
    status = 503
    default_code = "worker_lost"


class UnavailableError(ApiError):
    status = 503
    default_code = "service_unavailable"


class ShuttingDownError(UnavailableError):
    default_code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("This gateway stops before the answer is whole: ask again.", retry_after_s=1.0)


class DeadlineError(ApiError):
    status = 504
    default_code = "timeout"


class HttpVersionError(ApiError):
    status = 505
    type = "invalid_request_error"
    default_code = "http_version_not_supported"


def as_api_error(error: BaseException) -> ApiError:
    """Return the ApiError that stands for any exception. An unknown one reveals nothing of our insides."""
    match error:
        case ApiError():
            return error
        case NoWorkerError(contended=True):
            return OverloadedError(str(error), code="queue_full", retry_after_s=error.retry_after_s)
        case NoWorkerError():
            return UnavailableError(str(error), retry_after_s=error.retry_after_s)
        case HTTPException(status_code=404):
            return NotFoundError(_NO_ROUTE, code="not_found")
        case HTTPException(status_code=405):
            allow = (error.headers or {}).get("Allow", "")
            extra = ((b"allow", allow.encode("latin-1")),) if allow else ()
            return MethodNotAllowedError(f"This route takes {allow or 'another method'}.", headers=extra)
        case TimeoutError():
            return DeadlineError("The request ran into its deadline.")
    return InternalError("The server met an internal error.")
