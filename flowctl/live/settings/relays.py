"""Settings of the streams that are pushed to other servers and pulled from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Final

from flowctl.core.flow.limits import Limits, parse_target_delay
from flowctl.core.text.addresses import join_host_port
from flowctl.core.text.keyfiles import with_files
from flowctl.errors import ConfigError, RemoteProtocolError
from flowctl.wire.rtmp.url import NAMES_HINT, REDACTED, RtmpUrl, fits_names, parse_url

MOST_RELAYS: Final = 64
_ALWAYS: Final = "always"
TARGET_DELAY: Final = "target-delay"
_PATH_ENDS: Final = frozenset("?#")
"""Characters of names behind which an address has no path: the rest would be read as a query, of another stream."""
_WILD: Final = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class RelayRule:
    """One line of them."""

    streams: str
    # address at the other server, with ``{app}`` and ``{stream}`` for those of the stream, and ``@FILE`` for a key, see
    # `flowctl.core.text.keyfiles`. Not shown: it may hold keys.
    url: str = field(repr=False)
    always: bool = False  # pulled without viewers, too
    target_delay: str = ""  # how late pictures may reach the target, as the setting. Empty: that of viewers.

    def __post_init__(self) -> None:
        if self.target_delay:
            parse_target_delay(self.target_delay, f"relay of {self.streams!r:.60}: {TARGET_DELAY}")
        if "/" not in self.streams:
            raise ConfigError(f"relay of {self.streams!r:.60}: it must be a pattern of app/stream")
        if not fits_names(self.streams):
            raise ConfigError(f"relay of {self.streams!r:.60} fits no stream", hint=NAMES_HINT)
        if self.always and not _WILD.isdisjoint(self.streams):
            raise ConfigError(
                f"relay of {self.streams!r:.60}: only a stream with a whole name is pulled always",
                hint="RTMP lists no streams: name each, with semicolons between; or see flowctl edge --stream",
            )
        try:
            target = self.target("app/stream")  # a file that cannot be read is told at the start
        except RemoteProtocolError as error:
            hint = "write it like rtmp://host/{app}/{stream}"
            raise ConfigError(f"relay of {self.streams!r:.60}: its address is none", hint=hint) from error
        if target.scheme not in {"rtmp", "rtmps"} or not target.host or not target.stream:
            raise ConfigError(
                f"relay of {self.streams!r:.60}: its address must have host, application and stream of rtmp or rtmps",
                hint="write it like rtmp://host/{app}/{stream}",
            )

    def limits_of(self, viewers: Limits) -> Limits:
        """Return the limits of a push, given those of viewers of its stream."""
        if not self.target_delay:
            return viewers
        return replace(viewers, target_delay_ms=parse_target_delay(self.target_delay, TARGET_DELAY))

    def fits(self, stream: str) -> bool:
        return fnmatchcase(stream, self.streams)

    def address(self, stream: str) -> RtmpUrl:
        """Return the address of a stream as it is written, with the names of its files."""
        return _filled_in(self.url, stream)

    def target(self, stream: str) -> RtmpUrl:
        """Return the address of a stream, with what its files hold at this moment."""
        return _filled_in(with_files(self.url), stream)  # in this order: names of streams are chosen by peers

    @property
    def place(self) -> str:
        """Where it leads, without anything that could be a key."""
        return place_of(self.address("app/stream"))

    def __str__(self) -> str:
        target = f" {TARGET_DELAY}={self.target_delay}" if self.target_delay else ""
        return f"{self.streams}={self.place}{' ' + _ALWAYS if self.always else ''}{target}"


def _filled_in(address: str, stream: str) -> RtmpUrl:
    if not _PATH_ENDS.isdisjoint(stream):
        raise RemoteProtocolError("no address can have a stream of this name", code="bad-name")
    app, _, name = stream.rpartition("/")
    return parse_url(address.replace("{app}", app).replace("{stream}", name))


def place_of(url: RtmpUrl) -> str:
    """Return an address without the name of its stream, which is a key where others publish, and without its query."""
    return f"{url.scheme}://{join_host_port(url.host, url.port)}/{url.app.partition('/')[0]}/{REDACTED}"


def parse_relays(text: str, source: str) -> tuple[RelayRule, ...]:
    """Return the rules of a text like ``live/*=rtmp://host/{app}/{stream}; live/cam=rtmp://other/x/cam always``.

    Behind the address of a push may stand ``target-delay=2s``.
    """
    rules = []
    for part in map(str.strip, filter(str.strip, text.split(";"))):
        streams, equals, rest = part.partition("=")
        url, *words = rest.split() or [""]
        options = dict(word.partition("=")[::2] for word in words)
        unknown = options.keys() - {_ALWAYS, TARGET_DELAY} or len(options) != len(words)
        if not equals or unknown or options.get(_ALWAYS) or options.get(TARGET_DELAY) == "":
            raise ConfigError(
                f"{source}: the part of {streams.strip()!r:.60} is not app/stream=address",
                hint="write it like live/*=rtmp://host/{app}/{stream}; behind it always, or target-delay=2s",
            )
        rules.append(RelayRule(streams.strip(), url, _ALWAYS in options, options.get(TARGET_DELAY, "")))
    if len(rules) > MOST_RELAYS:
        raise ConfigError(f"{source} has {len(rules)} parts, {MOST_RELAYS} are allowed")
    return tuple(rules)
