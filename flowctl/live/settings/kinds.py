"""How the values of settings are written: a reader, a word and a writer for each kind.

A kind is a type for fields of `flowctl.live.settings.model.LiveSettings`. Text is read by the parsers that the rest of
flowctl has; a file may say numbers, truth and lists as such. Errors begin with the source of the value, which
validation is given as its context.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
)

from flowctl.core.flow.limits import Limits, parse_marks, parse_target_delay, target_marks
from flowctl.core.flow.policy import LIVE_POLICIES
from flowctl.core.text.addresses import Network
from flowctl.core.text.printable import short
from flowctl.core.text.private import check_private
from flowctl.core.text.userfiles import text_of
from flowctl.errors import ConfigError
from flowctl.live.access.keys import KeyFile, read_keys
from flowctl.live.access.rules import HookFailure, Proof
from flowctl.live.access.tokens import SecretFile, read_secrets
from flowctl.live.access.webtokens import WebTokenKey, read_web_token_key
from flowctl.live.config import Redirect, SecondPublisher
from flowctl.live.settings.ladder import Ladder, parse_ladder
from flowctl.live.settings.media import RecordFormat, StreamPatterns, parse_patterns
from flowctl.live.settings.relays import RelayRule, parse_relays
from flowctl.live.settings.renditions import RenditionNames, parse_renditions
from flowctl.live.settings.runs import ONLY_IN_FILE, RunRule, parse_runs
from flowctl.records.flight.options import parse_networks
from flowctl.records.telemetry.options import Addresses, RecordedStreams
from flowctl.units import parse_count, parse_duration, parse_share, parse_size, write_duration, write_size
from flowctl.wire.rtmp.url import redact_url

_USERS: Final = "one user:password per line; chmod 600"


class SettingKind(NamedTuple):
    """How values of one kind are written."""

    word: str
    write: Callable[[Any], str] = str


def _text(parse: Callable[[str, str], Any]) -> BeforeValidator:
    """Return a validator that parses a text with `parse(text, name for errors)` and leaves other values as they are."""

    def read(value: Any, info: ValidationInfo) -> Any:
        return parse(value, _source(info)) if isinstance(value, str) else value

    return BeforeValidator(read)


def _only_text(parse: Callable[[str, str], Any]) -> BeforeValidator:
    """Return the same, for what can only be written as a text."""

    def read(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            raise ValueError("no text")  # noqa: TRY004 - pydantic takes it; what is said of it is in `_validated`
        return parse(value, _source(info))

    return BeforeValidator(read)


def _source(info: ValidationInfo) -> str:
    name = info.field_name or ""
    return str((info.context or {}).get(name, name))


def _number(text: str, source: str) -> float:
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?", text):
        raise ConfigError(f"{source} is {short(text)}, it must be a number, 0 or more, such as 2.5")
    return float(text)


def _yes(text: str, source: str) -> bool:
    if text not in {"yes", "no"}:
        raise ConfigError(f"{source} is {short(text)}, it must be yes or no")
    return text == "yes"


def _path(text: str, _source: str) -> Path:
    return Path(text)


def _marks(text: str, source: str) -> str:
    parse_marks(text, source)  # by themselves; whether they go together is seen when all are there
    return text


def _workers(text: str, source: str) -> int:
    if text == "auto":
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ConfigError(f"{source} is {short(text)}, it must be a number of processes, or auto for one per core")
    return int(text)


def _proxies(text: str, source: str) -> tuple[str, ...]:
    return tuple(map(str, parse_networks(text, source)))


def _proofs(text: str, source: str) -> tuple[Proof, ...]:
    known = {item.value: item for item in Proof}
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if wrong := [word for word in words if word not in known]:
        raise ConfigError(f"{source} has {short(wrong[0])}, it must be some of {', '.join(known)} with commas between")
    return tuple(known[word] for word in words)


def _words(text: str, _source: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _urls(text: str, _source: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def _items(value: Any) -> Any:
    """Accept a list of the file as a list."""
    texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return ",".join(value) if texts else value


def _or_off(value: Any) -> Any:
    """Let ``off`` be none, as an empty list of the file is; an empty text is refused before."""
    return "" if value == "off" else _items(value)


def _seconds(value: Any) -> Any:
    """Let a number of the file be one of seconds, as for any duration."""
    return f"{value:f}" if type(value) in {int, float} else value


def _commas(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


_STRICT: Final = Field(strict=True)
"""Field that takes neither texts nor truth values for numbers."""
_FINITE: Final = Field(strict=True, allow_inf_nan=False)
Duration = Annotated[float, _text(parse_duration), _FINITE, SettingKind("duration", write_duration)]
Size = Annotated[int, _text(parse_size), _STRICT, SettingKind("size", write_size)]
Count = Annotated[int, _text(parse_count), _STRICT, SettingKind("number")]
Workers = Annotated[
    int, _text(_workers), _STRICT, SettingKind("number|auto", lambda value: str(value) if value else "auto")
]
Rate = Annotated[float, _text(_number), _FINITE, SettingKind("rate", "{:g}".format)]
Share = Annotated[float, _text(parse_share), _FINITE, SettingKind("share", "{:.15g}".format)]
Flag = Annotated[bool, _text(_yes), _STRICT, SettingKind("yes|no", lambda value: "yes" if value else "no")]
Text = Annotated[str, SettingKind("text")]
TextOrOff = Annotated[str, BeforeValidator(lambda value: "" if value == "off" else value), SettingKind("off|text")]
Relays = Annotated[
    tuple[RelayRule, ...],
    _only_text(parse_relays),
    BeforeValidator(_or_off),
    SettingKind("off|app/stream=address", lambda rules: "; ".join(map(str, rules))),
]
Runs = Annotated[
    tuple[RunRule, ...],
    BeforeValidator(lambda value, info: parse_runs(value, _source(info))),
    SettingKind(ONLY_IN_FILE, lambda rules: "; ".join(map(str, rules))),
]
Steps = Annotated[
    Ladder, _only_text(parse_ladder), BeforeValidator(_items), SettingKind("off|[app/stream=]height:rate,...")
]
Renditions = Annotated[
    RenditionNames, _only_text(parse_renditions), BeforeValidator(_items), SettingKind("tracks|off|suffixes")
]
Patterns = Annotated[
    StreamPatterns, _only_text(parse_patterns), BeforeValidator(_items), SettingKind("off|app/stream,...")
]
Format = Annotated[RecordFormat, SettingKind("flv|mp4", lambda item: item.value)]
File = Annotated[Path | None, _only_text(_path), SettingKind("path")]
Marks = Annotated[str | None, _only_text(_marks), SettingKind("bytes,messages,age")]
Target = Annotated[
    int | None,
    _only_text(parse_target_delay),
    BeforeValidator(_seconds),
    SettingKind("auto|off|duration", lambda value: target_marks(Limits(target_delay_ms=value))),
]
Place = Annotated[str, BeforeValidator(_or_off), SettingKind("off|[tls://]host:port")]
Places = Annotated[str, BeforeValidator(_or_off), SettingKind("off|host:port,...")]
Listening = Annotated[str, BeforeValidator(_items), SettingKind("off|addresses")]
Admin = Annotated[str, SettingKind("off|[tls://]host:port")]
Folder = Annotated[str, _only_text(lambda text, _: str(Path(text))), SettingKind("path")]
FolderPath = Annotated[Path, _only_text(_path), SettingKind("path")]
Policy = Annotated[str, SettingKind("|".join(LIVE_POLICIES))]
Proxies = Annotated[
    tuple[str, ...], _only_text(_proxies), BeforeValidator(_or_off), SettingKind("off|addresses", _commas)
]
Networks = Annotated[
    tuple[Network, ...], _only_text(parse_networks), BeforeValidator(_or_off), SettingKind("off|addresses", _commas)
]
Second = Annotated[SecondPublisher, SettingKind("refuse|replace|standby", lambda item: item.value)]
Redirects = Annotated[Redirect, SettingKind("off|http|all", lambda item: item.value)]
HowAddresses = Annotated[Addresses, SettingKind("plain|truncated|hashed", lambda item: item.value)]
HowStreams = Annotated[RecordedStreams, SettingKind("hash|plain", lambda item: item.value)]
Proofs = Annotated[
    tuple[Proof, ...],
    _only_text(_proofs),
    BeforeValidator(_or_off),
    SettingKind("off|key,token,jwt", lambda items: _commas(item.value for item in items)),
]
Keys = Annotated[KeyFile | None, _only_text(lambda text, _: read_keys(Path(text))), SettingKind("path")]
Secrets = Annotated[SecretFile | None, _only_text(lambda text, _: read_secrets(Path(text))), SettingKind("path")]
WebTokens = Annotated[
    WebTokenKey | None, _only_text(lambda text, _: read_web_token_key(text)), SettingKind("algorithm:address|path")
]
Words = Annotated[tuple[str, ...], _only_text(_words), BeforeValidator(_or_off), SettingKind("off|words", _commas)]
Hooks = Annotated[
    tuple[str, ...],
    _only_text(_urls),
    BeforeValidator(_or_off),
    SettingKind("off|addresses", lambda urls: _commas(map(redact_url, urls))),
]
Failure = Annotated[HookFailure, SettingKind("refuse|allow", lambda item: item.value)]


def read_credentials(path: Path) -> dict[str, str]:
    """Return the passwords by user of a file with one ``user:password`` per line; ``#`` begins a comment line."""
    try:
        check_private(path)
        lines = text_of(path.read_bytes()).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the credentials file {path}: {error}", hint=_USERS) from error
    credentials = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        user, colon, password = line.partition(":")
        if not (user and colon and password):
            raise ConfigError(f"{path}, line {number}: it must be user:password", hint=_USERS)
        credentials[user] = password
    if not credentials:
        raise ConfigError(f"{path} holds no user", hint="without credentials_file there is no authentication")
    return credentials
