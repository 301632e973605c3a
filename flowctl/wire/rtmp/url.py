"""RTMP addresses: from what clients really send to one scheme, host, vhost, application, stream name and query.

A client states its address in three places: ``tcUrl`` and ``app`` of the connect command, and the stream name of
publish or play. How people split an address over them is free: OBS users put ``rtmp://host/live`` into "Server" and
``room?secret=x`` into "Stream Key", or the whole path into either, with the query wherever it ended up. So the paths
are joined first, the last segment is then the stream name and what stands before it the application, and the queries
are merged; every split of one address gives the same `RtmpUrl` (the rule of ossrs/srs, ``srs_net_url_parse_tcurl``).
An address of one segment, ``rtmp://host/room`` with an empty key as people write it for MediaMTX, is a stream of the
default application.

The host (or ``?vhost=``) is told apart as `RtmpUrl.vhost` but is no part of the stream's name, `RtmpUrl.path`: who
publishes to 127.0.0.1 is played under the server's public name.

Values of a query are not percent-decoded: clients do not encode them, and a signed token must reach its verifier
unchanged. Names are, by the server that is asked: `canonical` gives each stream the one name that it has there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Final
from urllib.parse import unquote as percent_decoded

from flowctl.core.text.addresses import bracketed, join_host_port
from flowctl.core.text.printable import printable
from flowctl.errors import RemoteProtocolError

DEFAULT_APP: Final = "__defaultApp__"
"""Application of an address that names none (the name that SRS gives it)."""

DEFAULT_VHOST: Final = "__defaultVhost__"
"""A ``?vhost=`` of this value means none, as in SRS."""

DEFAULT_PORTS: Final = {
    "rtmp": 1935,
    "rtmps": 443,
    "rtmpt": 80,
    "rtmpts": 443,
    "rtmpe": 1935,
    "rtmpte": 80,
    "http": 80,
    "https": 443,
    "ws": 80,
    "wss": 443,
}
"""Port of an address that states none, as in FFmpeg; schemes not listed here get 1935."""

TLS_SCHEMES: Final = frozenset({"rtmps", "https", "wss"})

NAME_MAX_CHARS: Final = 256
"""Default limit on the length of an application or stream name (nginx-rtmp: NGX_RTMP_MAX_NAME 256)."""

ENCODED_CHARS: Final = 12
"""Most characters that one of a name is percent-encoded: four octets of UTF-8."""

_FORMATS: Final = frozenset({"flv", "f4v", "mp4", "mp3"})
"""Formats that clients put before a name (``mp4:talk``) and take from behind it (``clip.flv``)."""
NAMES_HINT: Final = (
    "write app/stream as in live/*, with no / before it or behind; names are decoded, with no mp4: or flv: before them "
    "and no .mp4 or .flv behind"
)
_ESCAPE: Final = re.compile(r"%[0-9A-Fa-f]{2}")

URL_MAX_CHARS: Final = 8192
"""Limit on a tcUrl and on a query: room for a signed token of 4 KiB, which people do put there."""

QUERY_MAX_PAIRS: Final = 64
"""Limit on ``k=v`` pairs; real queries have fewer than ten."""

REDACTED: Final = "***"

_SECRET_WORDS: Final = (
    "key", "secret", "token", "pass", "pwd", "auth", "sign", "sig", "hash", "jwt", "credential", "response",
)  # fmt: skip  # one line of words reads better than twelve lines

# Nothing is given back (`*+`): a line break in what follows would have every way to divide the text tried.
_URL = re.compile(r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*+)://(?P<authority>[^/?#]*+)(?P<path>[^?#]*+)(?P<rest>.*+)$")
# The host of an IPv6 address stands in brackets (RFC 3986 section 3.2.2).
_AUTHORITY = re.compile(r"^(?:(?P<user>.*)@)?(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^:\[\]@]*))(?::(?P<port>\d*))?$")


class Query(dict[str, str]):
    """The pairs of a query, in order; a later pair replaces an earlier one. Its ``repr`` shows no secrets."""

    __slots__ = ()

    def __repr__(self) -> str:
        shown = {name: REDACTED if is_secret(name) and value else value for name, value in self.items()}
        return f"Query({shown!r})"


def is_secret(name: str) -> bool:
    """Return whether the value of query parameter `name` must stay out of logs, judged by the words in it."""
    lowered = name.lower()
    return any(word in lowered for word in _SECRET_WORDS)


def parse_query(raw: str) -> Query:
    """Return the pairs of `raw` (``k=v&k2=v2``, with or without a leading ``?``); a name without ``=`` has value ""."""
    if len(raw) > URL_MAX_CHARS:
        raise RemoteProtocolError(f"query has {len(raw)} characters, at most {URL_MAX_CHARS} are read", code="bad-url")
    parts = [part for part in raw.lstrip("?").split("&") if part]
    if len(parts) > QUERY_MAX_PAIRS:
        raise RemoteProtocolError(f"query has {len(parts)} pairs, at most {QUERY_MAX_PAIRS} are read", code="bad-url")
    query = Query()
    for part in parts:
        name, _, value = part.partition("=")
        query[name] = value
    return query


def redact_query(raw: str) -> str:
    """Return `raw` with the values of secret parameters replaced by ``***``; everything else is kept as it is."""
    parts = []
    # "?" separates as well: Adobe authentication appends "?authmod=..." to a text that may have a query already.
    for part in re.split(r"([&?])", raw):
        name, equals, value = part.partition("=")
        parts.append(f"{name}={REDACTED}" if equals and value and is_secret(name) else part)
    return "".join(parts)


def redact_url(text: str) -> str:
    """Return any address or stream name that a peer sent in a form fit for a log: no secret values, no password."""
    head, mark, rest = text.partition("?")
    scheme, separator, tail = head.partition("://")
    authority, slash, path = tail.partition("/")
    if separator and "@" in authority:
        user, _, host = authority.rpartition("@")
        head = f"{scheme}://{user.partition(':')[0]}:{REDACTED}@{host}{slash}{path}"
    return head + mark + redact_query(rest)


def check_name(name: str, what: str, *, maximum: int = NAME_MAX_CHARS) -> None:
    """Refuse a name that must not reach a path, a log line or a table of streams.

    The message states the rule and not the name, since a stream name may itself be a secret.
    """
    if not name:
        raise RemoteProtocolError(f"{what} is empty", code="bad-name")
    if len(name) > maximum:
        raise RemoteProtocolError(f"{what} has {len(name)} characters, the limit is {maximum}", code="bad-name")
    if "\\" in name or printable(name) != name:
        raise RemoteProtocolError(f"{what} has a control character or a backslash", code="bad-name")
    if not {".", ".."}.isdisjoint(name.split("/")):
        raise RemoteProtocolError(f"{what} has a segment . or ..", code="bad-name")


def _segments(path: str) -> list[str]:
    """Split a path, without empty segments and without the ``_definst_`` that FMLE adds for "no instance"."""
    return [segment for segment in path.split("/") if segment and segment != "_definst_"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RtmpUrl:
    """One RTMP address; ``str`` and ``repr`` are redacted, so that it can be logged as it is."""

    scheme: str = "rtmp"
    host: str = ""  # lower case, without the brackets of IPv6; "" when the client did not say
    port: int = 1935
    vhost: str = ""  # ``?vhost=`` or ``?domain=`` when given, `host` otherwise
    app: str = DEFAULT_APP  # application with its instance, for example ``live`` or ``live/inst``; never empty
    stream: str = ""  # stream name without query; "" for an address that names none (yet)
    raw_query: str = ""
    query: Query = dataclasses.field(default_factory=Query)
    user: str | None = None
    password: str | None = None
    name_is_key: bool = False  # the stream's name is a secret: it came from a file

    @property
    def instance(self) -> str:
        """The part of `app` after its first slash, "" when there is none (``live/inst`` has instance ``inst``)."""
        return self.app.partition("/")[2]

    @property
    def tls(self) -> bool:
        """Whether TLS comes before anything else."""
        return self.scheme in TLS_SCHEMES

    @property
    def path(self) -> str:
        """``app/stream``: the one name of a stream, however the client split it."""
        return f"{self.app}/{self.stream}" if self.stream else self.app

    @property
    def tc_url(self) -> str:
        """The address without stream name, query and credentials: what a client sends as ``tcUrl``."""
        usual = self.port == DEFAULT_PORTS.get(self.scheme, 1935)
        place = bracketed(self.host) if usual else join_host_port(self.host, self.port)
        return f"{self.scheme}://{place}/{'' if self.app == DEFAULT_APP else self.app}"

    def redacted(self) -> str:
        name = REDACTED if self.name_is_key else self.stream
        base = self.tc_url if not self.stream else f"{self.tc_url.rstrip('/')}/{name}"
        return f"{base}?{redact_query(self.raw_query)}" if self.raw_query else base

    __str__ = redacted

    def masked(self, text: str, *others: str) -> str:
        """Return a server's words without what could be a key here: query, its values, password, `others`.

        Servers repeat what they were given, whole or in pieces.
        """
        secrets = {self.raw_query, self.password or "", *self.query.values(), *others}
        if self.name_is_key:
            secrets.add(self.stream)
        for secret in sorted(filter(None, secrets), key=len, reverse=True):  # one may be part of another
            text = text.replace(secret, REDACTED)
        return text

    def __repr__(self) -> str:
        return f"RtmpUrl({self.redacted()!r})"

    def with_stream(self, name: str, *, name_max_chars: int = NAME_MAX_CHARS) -> RtmpUrl:
        """Return this address with the stream name of a publish or play command.

        An empty name (or one that is only a query) takes the last segment of the application: the user put the whole
        path into "Server". Where the query stands in between, as in ``app?k=v/stream``, the name is behind it.
        """
        path, _, more = name.partition("?")
        # Before splitting, which is linear in a text that the peer made as long as it liked.
        if path:
            check_name(path, "stream name", maximum=name_max_chars)
        app = _segments("" if self.app == DEFAULT_APP else self.app)
        raw_query, segments = self.raw_query, _segments(path)
        before, slash, behind = raw_query.rpartition("/")
        if slash and segments and _segments(behind) == segments:
            raw_query = before  # the address had the name as well
        raw_query = "&".join(part for part in (raw_query, more) if part)
        if not segments and len(app) < 2:
            raw_query, segments = _name_behind_query(raw_query, name_max_chars)
        segments = app + segments
        if not segments:
            raise RemoteProtocolError("stream name is empty", code="bad-name")
        query = parse_query(raw_query)
        joined = "/".join(segments[:-1]) or DEFAULT_APP
        check_name(joined, "application name", maximum=name_max_chars)
        return dataclasses.replace(
            self,
            app=joined,
            stream=segments[-1],
            raw_query=raw_query,
            query=query,
            vhost=_vhost(query, self.vhost),
        )


def canonical(url: RtmpUrl, *, decoded: bool = False, name_max_chars: int = NAME_MAX_CHARS) -> RtmpUrl:
    """Return an address with the one name that its stream has at a server, however the client spells it.

    FFmpeg sends ``my%20show`` as it stands in the address, ``mp4:talk.mp4`` for ``talk.mp4`` and ``clip`` for
    ``clip.flv``; librtmp decodes, and sends ``mp4:talk``. So names are decoded, once, unless HTTP has (`decoded`), a
    format before a segment is left out, and so is one behind the stream's name. What the server decides, keeps or tells
    of a stream goes by this name. It stays as it is when this is done again, in another server for instance: a name
    that would not is refused.
    """
    path = url.path
    if not decoded:
        try:
            path = percent_decoded(path, errors="strict")
        except UnicodeDecodeError as error:
            raise RemoteProtocolError("stream name is no percent-encoded UTF-8", code="bad-name") from error
    if _ESCAPE.search(path):
        raise RemoteProtocolError("stream name is percent-encoded twice", code="bad-name")
    if "?" in path:
        raise RemoteProtocolError("stream name has a question mark", code="bad-name")
    segments = _segments("/".join(map(_without_prefix, path.split("/"))))
    stream = ""
    if url.stream:
        stream = _without_suffix(segments.pop()) if segments else ""
        if _segments(stream) != [stream]:
            raise RemoteProtocolError("stream name is empty, or nothing but a format", code="bad-name")
        check_name(stream, "stream name", maximum=name_max_chars)
    app = "/".join(segments) or DEFAULT_APP
    check_name(app, "application name", maximum=name_max_chars)
    return url if (app, stream) == (url.app, url.stream) else dataclasses.replace(url, app=app, stream=stream)


def _without_prefix(segment: str) -> str:
    while (cut := segment.partition(":"))[1] and cut[0] in _FORMATS:
        segment = cut[2]
    return segment


def _without_suffix(name: str) -> str:
    while (cut := name.rpartition("."))[1] and cut[2] in _FORMATS:
        name = cut[0]
    return name


def _name_behind_query(raw_query: str, name_max_chars: int) -> tuple[str, list[str]]:
    """Return query and path of ``k=v/stream``; the query alone when no name is behind the last slash."""
    before, _, behind = raw_query.rpartition("/")
    if not before or not behind or not {"=", "&", "?"}.isdisjoint(behind):
        return raw_query, []
    check_name(behind, "stream name", maximum=name_max_chars)
    return before, [behind]


def _vhost(query: Query, default: str) -> str:
    vhost = (query.get("vhost") or query.get("domain") or "").lower()
    return vhost if vhost and vhost != DEFAULT_VHOST.lower() else default


def parse_url(text: str, *, name_max_chars: int = NAME_MAX_CHARS) -> RtmpUrl:
    """Return the address ``rtmp://[user[:password]@]host[:port]/app[/inst]/stream[?k=v]``.

    The last of two or more segments is the stream name; with one it is left to `RtmpUrl.with_stream` what it is.
    ``rtmp://host/app?k=v/stream``, the form that Flash media encoders wrote, is understood when the path alone names no
    stream.
    """
    url = _parse_base(text, name_max_chars)
    if "/" in url.app or _name_behind_query(url.raw_query, name_max_chars)[1]:
        return url.with_stream("", name_max_chars=name_max_chars)
    return url


def from_connect(tc_url: str | None, app: str | None, *, name_max_chars: int = NAME_MAX_CHARS) -> RtmpUrl:
    """Return the address, without a stream name yet, that a connect command states.

    A ``tcUrl`` that is missing or no address (cameras send an empty one, or quotes around it) is made up for by
    ``app``; with neither the application is `DEFAULT_APP`.
    """
    path, _, raw_query = unquote(app or "").partition("?")
    text = unquote(tc_url or "")
    try:
        url = _parse_base(text, name_max_chars)
    except RemoteProtocolError as error:
        # A bad name is refused wherever it stands; a text that is no address has a stand-in.
        if error.code != "bad-url" or len(text) > URL_MAX_CHARS:
            raise
        url = RtmpUrl()
    joined = "/".join(_segments(path))
    if url.app == DEFAULT_APP and joined:
        check_name(joined, "application name", maximum=name_max_chars)
        url = dataclasses.replace(url, app=joined)
    if not url.raw_query and raw_query:
        query = parse_query(raw_query)
        url = dataclasses.replace(url, raw_query=raw_query, query=query, vhost=_vhost(query, url.vhost))
    return url


def unquote(text: str) -> str:
    """Return `text` without blanks and quotes around it (seen from cameras, bluenviron/mediamtx 1405)."""
    return text.strip().strip("'\"").strip()


def _parse_base(text: str, name_max_chars: int) -> RtmpUrl:
    if len(text) > URL_MAX_CHARS:
        raise RemoteProtocolError(f"address has {len(text)} characters, the limit is {URL_MAX_CHARS}", code="bad-url")
    # Before there was "?vhost=", SRS took "app...vhost...name".
    match = _URL.match(text.replace("...vhost...", "?vhost=", 1))
    if match is None:
        raise RemoteProtocolError("address is not scheme://host/app", code="bad-url")
    scheme = match["scheme"].lower()
    authority = _AUTHORITY.match(match["authority"])
    if authority is None:
        raise RemoteProtocolError("address has no valid host and port", code="bad-url")
    port = _port(authority["port"], scheme)
    app = "/".join(_segments(match["path"]))
    if app:
        check_name(app, "application name", maximum=name_max_chars)
    raw_query = match["rest"].lstrip("?#")
    query = parse_query(raw_query)
    host = (authority["six"] or authority["host"] or "").lower()
    user, colon, password = (authority["user"] or "").partition(":")
    return RtmpUrl(
        scheme=scheme,
        host=host,
        port=port,
        vhost=_vhost(query, host),
        app=app or DEFAULT_APP,
        raw_query=raw_query,
        query=query,
        user=user or None,
        password=password if colon else None,
    )


def _port(digits: str | None, scheme: str) -> int:
    if not digits:
        return DEFAULT_PORTS.get(scheme, 1935)
    # The length first: int() of a long text is quadratic.
    if len(digits) > 5 or not digits.isascii() or not 1 <= int(digits) <= 65535:
        raise RemoteProtocolError("port of the address is not 1..65535", code="bad-url")
    return int(digits)


def is_path(name: str) -> bool:
    """Return whether `name` is one that a stream may have at a server, ``app/stream``, and not only like one.

    For names that do not come from RTMP: no other one can be published, played or followed.
    """
    most = 2 * NAME_MAX_CHARS + 1
    try:
        return canonical(RtmpUrl().with_stream(name, name_max_chars=most), name_max_chars=most).path == name
    except RemoteProtocolError:
        return False


def fits_names(pattern: str) -> bool:
    """Return whether names that streams have may fit a pattern of ``app/stream``, as far as its letters say.

    One that is spelled otherwise than `canonical` does would never apply, and nobody would be told.
    """
    segments = pattern.split("/")
    segments[-1] = _without_suffix(segments[-1])
    spelled = "/".join(_segments("/".join(map(_without_prefix, segments))))
    return not _ESCAPE.search(pattern) and {".", ".."}.isdisjoint(segments) and spelled == pattern


def url_of(path: str, host: str, port: int = 1935) -> RtmpUrl:
    """Return the address at which a server has the stream `path`, whatever characters are in that name.

    An address is no text here that is parsed: ``live/room#2`` would be read as ``live/room``, another stream.
    """
    before, _, behind = path.rpartition("/")
    # Some applications cannot stand in a tcUrl; then all of it is the stream's name, which servers split again.
    for app, stream in ((before, behind), (DEFAULT_APP, path)):
        url = RtmpUrl(host=host, vhost=host, port=port, app=app, stream=stream)
        with contextlib.suppress(RemoteProtocolError):
            if canonical(from_connect(url.tc_url, app).with_stream(stream)).path == path:
                return url
    raise RemoteProtocolError("no client can ask for a stream of this name", code="bad-name")
