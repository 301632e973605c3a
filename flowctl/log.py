"""Logging of the programs: structlog for our own lines, the standard library's `logging` routed through the same.

How it works: both kinds of record end in one handler on the root logger, which adds time, level and logger name, masks
what must stay secret, and renders one line: for people (colours only where a terminal will show them), or one JSON
object. The libraries of flowctl below the programs log through `logging` only, so that an application which embeds
them sees their records wherever its own go; nothing here is set up before `configure` is called.

Masking is the last step before rendering, so nothing can get around it: values of keys that are named like a secret
are replaced, addresses in any text lose their credentials and secret query values, and both in nested values as well.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from flowctl.errors import ConfigError
from flowctl.rtmp.url import REDACTED, redact_query, redact_url

LEVELS: Final = ("debug", "info", "warning", "error", "critical")

_SECRET_WORDS: Final = frozenset(
    {"secret", "token", "password", "passwd", "passphrase", "pass", "pwd", "auth", "authorization", "signature", "sign",
     "sig", "jwt", "credential", "credentials", "cookie", "apikey", "streamkey"}
)  # fmt: skip  # one list of words reads better than twenty lines
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# What may be an address or the query of one; judged by the functions for addresses.
_ADDRESS = re.compile(r"[^\s\"'<>]*(?:://|\?[^\s\"'<>]*=)[^\s\"'<>]*")
_MAX_DEPTH: Final = 6
"""Nested values deeper than this are shown as text: a log line is no place for a document."""


def is_secret_key(key: str) -> bool:
    """Return whether the value of log field `key` must be masked, judged by the words in it.

    ``key`` counts as a word only at the end (``stream_key``, ``key``): ``key_frames`` is a count of pictures.
    """
    words = [word.lower() for word in _WORD.findall(key)]
    return bool(words) and (words[-1] == "key" or not _SECRET_WORDS.isdisjoint(words))


def redact_text(text: str) -> str:
    """Return `text` with every address in it fit for a log: no password, no secret query values."""
    if "://" not in text and "=" not in text:
        return text
    return _ADDRESS.sub(_redact_match, text)


def _redact_match(match: re.Match[str]) -> str:
    word = match[0]
    return redact_url(word) if "://" in word else redact_query(word)


def _mask(key: str, value: Any, depth: int) -> Any:
    # Flags and "none given" say nothing about a secret, and are worth knowing: waiting_for_key=True, token=None.
    if value is None or isinstance(value, bool):
        return value
    # A number named "key" counts key frames.
    if is_secret_key(key) and not (key == "key" and isinstance(value, (int, float))):
        return REDACTED
    return _redact(value, depth)


def _redact(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, (int, float)):
        return value
    if depth >= _MAX_DEPTH:
        return redact_text(repr(value))
    if isinstance(value, dict):
        return {name: _mask(str(name), item, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_redact(item, depth + 1) for item in value]
    return redact_text(value.decode("utf-8", "replace") if isinstance(value, (bytes, bytearray)) else str(value))


def mask_secrets(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
    """Mask every value that must stay secret; a structlog processor.

    Args:
        logger: unused, part of structlog's signature.
        method_name: unused, likewise.
        event_dict: the fields of the line.
    """
    del logger, method_name
    return {key: _mask(key, value, 0) for key, value in event_dict.items()}


def parse_level(level: str | int) -> int:
    """Return the number of a level.

    Raises:
        ConfigError: there is no such level.
    """
    if isinstance(level, int):
        return level
    if level.lower() not in LEVELS:
        raise ConfigError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    return int(logging.getLevelNamesMapping()[level.upper()])


def use_colours(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that is to have colours (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def configure(level: str | int = "info", *, json: bool = False, stream: TextIO | None = None) -> None:
    """Send all log lines of the process to one stream; replaces whatever was set up before.

    Args:
        level: least level shown: debug, info, warning, error, critical, or a number of the standard library.
        json: whether to write one JSON object per line.
        stream: where to. None: standard error, since standard output is for data.

    Raises:
        ConfigError: there is no such level.
    """
    number = parse_level(level)
    target = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=json),
        structlog.processors.StackInfoRenderer(),
        # Tracebacks become text before masking: an exception's message may hold an address.
        structlog.processors.format_exc_info,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, mask_secrets, _renderer(target, json)],
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(number)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        # Not cached: tests and embedding programs configure more than once.
        cache_logger_on_first_use=False,
    )


def _renderer(stream: TextIO, json: bool) -> Processor:  # noqa: FBT001 - private, named at its only call
    if json:
        return structlog.processors.JSONRenderer(default=str)
    return structlog.dev.ConsoleRenderer(
        colors=use_colours(stream), exception_formatter=structlog.dev.plain_traceback, pad_event_to=36
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger `name`; its methods take the event and then its fields by keyword."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
