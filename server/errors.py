"""The exception tree of the server and the one table that turns it into responses.

ServerError
├── InvalidRequest        400  the body: `param` names the field
├── Unauthorized          401
├── NotFound              404  model or route
├── WrongMethod           405
├── TooLarge              413
├── WrongContentType      415
├── Overloaded            429  with Retry-After
├── EngineFailed          500  this request only
├── NotImplementedHere    501
├── NotReady              503  still loading, or the engine has stopped stepping
├── EngineDead            503  the process is going down
├── Draining              503
└── TimedOut              504
"""

from __future__ import annotations

from typing import Any


class ServerError(Exception):
    """Base of everything that becomes an error body. `type` and `code` are OpenAI's names."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code

    def body(self) -> dict[str, Any]:
        """OpenAI's error shape, all four keys always present."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(ServerError):
    status, type, code = 400, "invalid_request_error", "invalid_value"


class Unauthorized(ServerError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class NotFound(ServerError):
    status, type, code = 404, "invalid_request_error", "not_found"


class WrongMethod(ServerError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class TooLarge(ServerError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class WrongContentType(ServerError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class Overloaded(ServerError):
    status, type, code = 429, "rate_limit_error", "queue_full"


class EngineFailed(ServerError):
    status, code = 500, "engine_error"


class NotImplementedHere(ServerError):
    status, code = 501, "not_implemented"


class NotReady(ServerError):
    status, code = 503, "not_ready"


class EngineDead(ServerError):
    status, code = 503, "engine_dead"


class Draining(ServerError):
    status, code = 503, "draining"


class TimedOut(ServerError):
    status, code = 504, "timeout"
