"""Logging of the programs: structlog for our own lines, the standard library's `logging` routed through the same.

How it works: both kinds of record end in one handler on the root logger, which adds time, level and logger name, masks
what must stay secret, and renders one line: for people (colours only where a terminal will show them), or one JSON
object. The libraries of flowctl below the programs log through `logging` only, so that an application which embeds
them sees their records wherever its own go; nothing here is set up before `configure` is called.

Masking is the last step before rendering, so nothing can get around it: values of keys that are named like a secret
are replaced, addresses in any text lose their credentials and secret query values, and both in nested values as well.
Names of streams and what peers call themselves are judged by the rule of the records (`core.text.printable`): a plain
name stays readable, of one that carries a secret a hash is written, which is the same in all lines of the process.
The same step cuts what is long and writes control characters as text, so that nothing can act on the terminal of
the person who reads, or forge a line. It takes time in proportion to the text.

Lines are written on a thread of their own, and those about one address are limited in number: see
`flowctl.core.text.logwriter`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from flowctl.core.text import journal
from flowctl.core.text.addresses import address_key
from flowctl.core.text.journal import JournalTarget, journal_entry, leads_to_journal
from flowctl.core.text.logfile import LogFile, LogFileOptions
from flowctl.core.text.logwriter import DescriptorTarget, LineLimiter, LineWriter, LogTarget
from flowctl.core.text.printable import carries_secret, decoded, printable, without_secret
from flowctl.errors import ConfigError
from flowctl.wire.rtmp.url import REDACTED, redact_query, redact_url

LEVELS: Final = ("debug", "info", "warning", "error", "critical")

_SECRET_WORDS: Final = frozenset(
    {"secret", "token", "password", "passwd", "passphrase", "pass", "pwd", "auth", "authorization", "signature", "sign",
     "sig", "jwt", "credential", "credentials", "cookie", "apikey", "streamkey"}
)  # fmt: skip  # one list of words reads better than twenty lines
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Between the words that are looked at: what stands in no address, and in no query.
_SPLIT_AT = re.compile(r"[\s\"'<>]")
_MARKS: Final = ("=", "://", "%")
_MAX_DEPTH: Final = 6
"""Nested values deeper than this are shown as text: a log line is no place for a document."""
_MAX_VALUES: Final = 256
"""Most values of one line, nested ones too."""
_MAX_CHARS: Final = 4096
"""Most characters of one text: an address with a signed token has some 1,000."""
_MAX_TRACEBACK_CHARS: Final = 32 * 1024
_MAX_KEY_CHARS: Final = 128
_TRACEBACKS: Final = frozenset({"exception", "stack"})
_NAMES: Final = frozenset({"stream", "app"})
"""Fields with the name of a stream or application, which a peer chose; a peer's name for itself is in ``agent``."""
_HASH_KEY: Final = secrets.token_bytes(32)
"""Key of hashed names, without which none can be found by trying. Records have their own, which a file may give."""
_FLUSH_DEADLINE_S: Final = 2.0
"""Longest wait for the log at the end of the process: longer than a busy terminal needs, short enough for a stop."""


def is_secret_key(key: str) -> bool:
    """Return whether the value of log field `key` must be masked, judged by the words in it.

    ``key`` counts as a word only at the end (``stream_key``, ``key``): ``key_frames`` is a count of pictures.
    """
    words = [word.lower() for word in _WORD.findall(key[-_MAX_KEY_CHARS:])]
    return bool(words) and (words[-1] == "key" or not _SECRET_WORDS.isdisjoint(words))


def redact_text(text: str) -> str:
    """Return `text` with every address in it fit for a log: no password, no secret values.

    The time is in proportion to the length.
    """
    if not any(mark in text for mark in _MARKS):
        return text
    pieces: list[str] = []
    begin = 0
    for match in _SPLIT_AT.finditer(text):
        pieces += (_redact_word(text[begin : match.start()]), match[0])
        begin = match.end()
    pieces.append(_redact_word(text[begin:]))
    return "".join(pieces)


def _redact_word(word: str) -> str:
    shown = _redact_plain(word)
    return shown if "%" not in shown or _redact_plain(plain := decoded(shown)) == plain else _hashed(word)


def _redact_plain(word: str) -> str:
    if "=" not in word and "://" not in word:
        return word
    if "://" in word:
        return redact_url(word)
    if "?" in word:
        return redact_query(word)
    return "&".join(_redact_pair(pair) for pair in word.split("&"))


def _redact_pair(pair: str) -> str:
    # Judged by whole words, as fields are: "monkey=3" is no secret.
    name, equals, value = pair.partition("=")
    return f"{name}={REDACTED}" if equals and value and is_secret_key(name) else pair


def _cut(text: str, most_chars: int) -> str:
    """Return both ends of a text that is too long, in whole words: half a word could be half a secret."""
    if len(text) <= most_chars:
        return text
    head, tail = text[: most_chars // 2].rpartition(" ")[0], text[-most_chars // 2 :].partition(" ")[2]
    return f"{head} ... ({len(text) - len(head) - len(tail)} characters left out) ... {tail}"


def _clean(text: str) -> str:
    return printable(redact_text(_cut(text, _MAX_CHARS)))


def _hashed(text: str) -> str:
    """Return what stands in a log for a text that carries a secret: as in a record, with another key."""
    raw = text.encode("utf-8", "surrogatepass")
    return "h:" + hashlib.blake2b(raw, digest_size=8, key=_HASH_KEY).hexdigest()


def _name(path: str) -> str:
    """Return the name of a stream or application, or what stands for it; the application stays if it is a plain one."""
    if not carries_secret(path):
        return path
    app, slash, _ = path.partition("/")
    return f"{app}/{_hashed(path)}" if slash and not carries_secret(app) else _hashed(path)


class _Mask:
    """Masks one line; counts its values."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _MAX_VALUES

    def field(self, key: str, value: Any, depth: int) -> Any:
        # Flags and "none given" say nothing about a secret, and are worth knowing: waiting_for_key=True, token=None.
        if value is None or isinstance(value, bool):
            return value
        # A number named "key" counts key frames.
        if is_secret_key(key) and not (key == "key" and isinstance(value, (int, float))):
            return REDACTED
        if depth == 0 and key in _TRACEBACKS and isinstance(value, str):
            # Indented, so that no line of a message in it can pass for a line of the log.
            text = printable(redact_text(_cut(value, _MAX_TRACEBACK_CHARS)), lines=True)
            return "\n".join(f"    {line}" for line in text.split("\n"))
        if isinstance(value, str):
            if key in _NAMES:
                value = _name(value)
            elif key == "agent":
                value = without_secret(value, _MAX_CHARS, _hashed)
        return self._value(value, depth)

    def _value(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if isinstance(value, str):
            return _clean(value)
        if isinstance(value, (int, float)):
            return value
        if self._left <= 0 or depth >= _MAX_DEPTH:
            return "..." if isinstance(value, (dict, list, tuple, set, frozenset)) else _clean(str(value))
        if isinstance(value, dict):
            shown = [(str(name), item) for name, item in islice(value.items(), self._left)]
            return {printable(name[:_MAX_KEY_CHARS]): self.field(name, item, depth + 1) for name, item in shown}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self._value(item, depth + 1) for item in islice(value, self._left)]
        return _clean(value.decode("utf-8", "replace") if isinstance(value, (bytes, bytearray)) else str(value))


def mask_secrets(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
    """Mask every value that must stay secret, and make the rest safe to show; a structlog processor."""
    del logger, method_name
    mask = _Mask()
    return {printable(key[:_MAX_KEY_CHARS]): mask.field(key, value, 0) for key, value in event_dict.items()}


def parse_level(level: str | int) -> int:
    if isinstance(level, int):
        return level
    if level.lower() not in LEVELS:
        raise ConfigError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    return int(logging.getLevelNamesMapping()[level.upper()])


def use_colours(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that is to have colours (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


_in_force: Final[list[dict[str, Any]]] = [{}]


def in_force() -> dict[str, Any]:
    """Return what `configure` was told last, for processes that are to log beside this one."""
    return _in_force[0]


def configure(
    level: str | int = "info",
    *,
    json: bool = False,
    stream: TextIO | None = None,
    file: LogFileOptions | None = None,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Send all log lines of the process to one place; replaces whatever was set up before.

    The place is a file, or a stream: standard error unless another is given. Where that is the journal of systemd,
    lines are entries there, with their fields.
    """
    _in_force[:] = [{"level": level, "json": json, "file": file}]
    number = parse_level(level)
    stream = sys.stderr if stream is None else stream
    target = _target(stream, file, json=json)
    target_is_stream = target is None or isinstance(target, DescriptorTarget)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        *([] if fields is None else [partial(_with_fields, dict(fields))]),
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.StackInfoRenderer(),
        # Tracebacks become text before masking: an exception's message may hold an address.
        structlog.processors.format_exc_info,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            mask_secrets,
            _renderer(target, json=json, colours=target_is_stream and use_colours(stream)),
        ],
    )
    handler = _Handler(target, stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        if isinstance(old, _Handler):
            old.close()
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


def _with_fields(
    fields: Mapping[str, Any], logger: WrappedLogger, method_name: str, event_dict: EventDict
) -> EventDict:
    del logger, method_name
    for name, value in fields.items():
        event_dict.setdefault(name, value)
    return event_dict


class _Handler(logging.Handler):
    """Renders records on the thread that logs, within the limits per address, and hands the lines to the writer.

    A stream without a descriptor is memory: it is written to at once.
    """

    def __init__(self, target: LogTarget | None, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._to_journal = isinstance(target, JournalTarget)
        self._limiter = LineLimiter()
        self._writer = None if target is None else LineWriter(target, self._dropped_line, self._kept_back_lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless its peer has had its share; under this handler's lock."""
        if self._limiter.allows(_about(record), time.monotonic()):
            self._put(self._line(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that logging gives it
        """Pass over what another handler would write to standard error, perhaps for ever."""

    def flush(self) -> None:
        with self.lock or contextlib.nullcontext():
            for line in self._kept_back_lines(at_end=True):
                self._put(line)
        if self._writer is not None:
            self._writer.flush(_FLUSH_DEADLINE_S)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close(_FLUSH_DEADLINE_S)
        super().close()

    @property
    def error(self) -> OSError | None:
        return None if self._writer is None else self._writer.error

    def look(self) -> None:
        if self._writer is not None:
            self._writer.put(b"")

    def _put(self, line: bytes) -> None:
        if self._writer is not None:
            self._writer.put(line)
            return
        with contextlib.suppress(OSError, ValueError):  # memory, or closed
            self._stream.write(line.decode("utf-8"))

    def _line(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001 - what a value's __str__ raises; a log line ends nothing
            text = self.format(_record("a log line could not be rendered", error=type(error).__name__, of=record.name))
        return text.encode("latin-1") if self._to_journal else f"{text}\n".encode("utf-8", "backslashreplace")

    def _dropped_line(self, count: int) -> bytes:
        return self._line(_record(f"{count} log lines dropped, nobody read them", lines=count))

    def _kept_back_lines(self, *, at_end: bool = False) -> list[bytes]:
        with self.lock or contextlib.nullcontext():
            withheld = self._limiter.withheld_counts(None if at_end else time.monotonic())
        return [self._line(_record(f"{count} log lines kept back", about=key, lines=count)) for key, count in withheld]


def _about(record: logging.LogRecord) -> str:
    """Return the subject of a record: its peer, by what counts as one address; where it has none, its text."""
    fields = record.msg if isinstance(record.msg, dict) else vars(record)
    peer = fields.get("peer")
    if isinstance(peer, str):
        host = peer.rpartition(":")[0]
        # Some lines name no port: then the last colon, if there is one, belongs to an address of IPv6.
        has_port = host.endswith("]") or (host and ":" not in host)
        return address_key(host.strip("[]") if has_port else peer)
    return f"{record.name}: {str(fields.get('event', record.msg))[:80]}"


def _record(event: str, **fields: Any) -> logging.LogRecord:
    record = logging.LogRecord("flowctl.log", logging.WARNING, __file__, 0, event, None, None)
    vars(record).update(fields)
    return record


def flush() -> None:
    """Wait until the lines of the log are written, two seconds at most: before other text that is to follow them."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.flush()


def look_at_file() -> None:
    """Have the log file opened again now, where somebody has moved it; that is seen within a second without this."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.look()


def write_error() -> OSError | None:
    """Return why lines of the log could not be written, None if they could."""
    errors = [handler.error for handler in logging.getLogger().handlers if isinstance(handler, _Handler)]
    return next((error for error in errors if error is not None), None)


def _target(stream: TextIO, file: LogFileOptions | None, *, json: bool) -> LogTarget | None:
    """Return where lines go. None: the stream is memory."""
    if file is not None and file.path is not None:
        return LogFile(file.path, file)
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):  # io.UnsupportedOperation is both of the latter
        return None
    return JournalTarget(journal.SOCKET) if not json and leads_to_journal(descriptor) else DescriptorTarget(descriptor)


def _renderer(target: LogTarget | None, *, json: bool, colours: bool) -> Processor:
    if json:
        return structlog.processors.JSONRenderer(default=str)
    to_journal = isinstance(target, JournalTarget)
    console = structlog.dev.ConsoleRenderer(
        colors=colours, exception_formatter=structlog.dev.plain_traceback, pad_event_to=0 if to_journal else 36
    )
    return partial(_journal_entry, console) if to_journal else console


def _journal_entry(
    console: structlog.dev.ConsoleRenderer, logger: WrappedLogger, method_name: str, event_dict: EventDict
) -> str:
    """Return a line as an entry, an octet a character: the text for people, without time and level, and its fields."""
    level = event_dict.pop("level", "info")
    del event_dict["timestamp"]
    fields = {name: value for name, value in event_dict.items() if name not in _TRACEBACKS | {"event"}}
    return journal_entry(str(console(logger, method_name, event_dict)), level, fields).decode("latin-1")


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger `name`; its methods take the event and then its fields by keyword."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
