"""Log lines with the request's id, for people (console) or for machines (json)."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from config.settings import Settings

request_id: ContextVar[str] = ContextVar("samebits_request_id", default="-")
FIELDS = ("method", "route", "path", "status", "duration_ms", "client")


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, request_id, and an access line's
    fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": request_id.get(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Console(logging.Formatter):
    """`12:00:01 info samebits.http [req-…] message`; line breaks in a message stay escaped."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        who = request_id.get()
        line = f"{clock} {record.levelname.lower():7} "
        line += message if who == "-" else f"[{who}] {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(settings: Settings) -> None:
    """Send the loggers below `samebits` to stderr, in the format and from the level of the
    settings.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else Console())
    logger = logging.getLogger("samebits")
    logger.handlers[:] = [handler]
    logger.setLevel(settings.log_level.upper())
    logger.propagate = False
