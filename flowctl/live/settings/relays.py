"""Settings of the streams that are pushed to other servers and pulled from them (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from flowctl.errors import ConfigError, RemoteProtocolError
from flowctl.wire.rtmp.url import REDACTED, RtmpUrl, parse_url

MOST_RELAYS: Final = 64
_ALWAYS: Final = "always"
_WILD: Final = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class RelayRule:
    """One line of them."""

    streams: str
    # address at the other server, with ``{app}`` and ``{stream}`` for those of the stream. Not shown: it may hold keys.
    url: str = field(repr=False)
    always: bool = False  # pulled without viewers, too

    def __post_init__(self) -> None:
        if "/" not in self.streams:
            raise ConfigError(f"relay of {self.streams!r:.60}: it must be a pattern of app/stream")
        if self.always and not _WILD.isdisjoint(self.streams):
            raise ConfigError(f"relay of {self.streams!r:.60}: only a stream with a whole name is pulled always")
        try:
            target = self.target("app/stream")
        except RemoteProtocolError as error:
            hint = "write it like rtmp://host/{app}/{stream}"
            raise ConfigError(f"relay of {self.streams!r:.60}: its address is none", hint=hint) from error
        if target.scheme != "rtmp" or not target.host or not target.stream:
            raise ConfigError(
                f"relay of {self.streams!r:.60}: its address must have host, application and stream of rtmp",
                hint="write it like rtmp://host/{app}/{stream}",
            )

    def fits(self, stream: str) -> bool:
        return fnmatchcase(stream, self.streams)

    def target(self, stream: str) -> RtmpUrl:
        app, _, name = stream.rpartition("/")
        return parse_url(self.url.replace("{app}", app).replace("{stream}", name))

    @property
    def place(self) -> str:
        """Where it leads, without anything that could be a key."""
        return place_of(self.target("app/stream"))

    def __str__(self) -> str:
        return f"{self.streams}={self.place}{' ' + _ALWAYS if self.always else ''}"


def place_of(url: RtmpUrl) -> str:
    """Return an address without the name of its stream, which is a key where others publish, and without its query."""
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"rtmp://{host}:{url.port}/{url.app.partition('/')[0]}/{REDACTED}"


def parse_relays(text: str, source: str) -> tuple[RelayRule, ...]:
    """Return the rules of a text like ``live/*=rtmp://host/{app}/{stream}; live/cam=rtmp://other/x/cam always``."""
    rules = []
    for part in map(str.strip, filter(str.strip, text.split(";"))):
        streams, equals, rest = part.partition("=")
        url, _, word = rest.strip().partition(" ")
        if not equals or word.strip() not in {"", _ALWAYS}:
            raise ConfigError(
                f"{source}: the part of {streams.strip()!r:.60} is not app/stream=address",
                hint="write it like live/*=rtmp://host/{app}/{stream}; pulled without viewers too: always behind it",
            )
        rules.append(RelayRule(streams.strip(), url, bool(word.strip())))
    if len(rules) > MOST_RELAYS:
        raise ConfigError(f"{source} has {len(rules)} parts, {MOST_RELAYS} are allowed")
    return tuple(rules)
