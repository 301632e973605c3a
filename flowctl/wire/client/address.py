"""Addresses of streams as operators write them, parsed, with keys from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Final

from flowctl.core.text.keyfiles import name_file, with_files
from flowctl.errors import ConfigError, RemoteProtocolError
from flowctl.wire.rtmp.events import Rejected
from flowctl.wire.rtmp.url import DEFAULT_APP, RtmpUrl, parse_url, redact_url

_LIKE: Final = "write it like rtmp://host/app/stream"


def parse_address(text: str, schemes: Collection[str] = ("rtmp", "rtmps")) -> RtmpUrl:
    """Return the address of a stream to publish or play, of one of `schemes`, with what its files hold.

    In an address of one segment, ``rtmp://host/room``, that segment is sent as the application and the name is empty,
    as FFmpeg does it.
    """
    try:
        url = dataclasses.replace(parse_url(with_files(text)), name_is_key=bool(name_file(text)))
    except RemoteProtocolError as error:
        raise ConfigError(f"{redact_url(text)!r}: {error}", hint=_LIKE) from error
    if url.scheme not in schemes:
        usable = " or ".join(f"{scheme}://" for scheme in schemes)
        raise ConfigError(f"scheme {url.scheme!r} is not supported", hint=f"use an {usable} address")
    if not url.host:
        raise ConfigError("the address has no host", hint=_LIKE)
    if not url.stream and url.app == DEFAULT_APP:
        raise ConfigError(f"{url} names no stream", hint=_LIKE)
    return url


MOST_REDIRECTS: Final = 3
"""Times in a row that a client lets a server send it to another one; curl allows 50, and more than one is a mistake."""


def redirected(url: RtmpUrl, rejected: Rejected) -> RtmpUrl | None:
    """Return where a server sends a client of `url`, with what it says of keys. None: nowhere that the client may go.

    The scheme has to be the same: a client that asked for TLS does not go on without. User and password stay behind,
    and what a server writes names no files of ours.
    """
    try:
        found = parse_url(rejected.redirect or "")
    except RemoteProtocolError:
        return None
    if found.scheme != url.scheme or not (found.host and found.stream):
        return None
    return dataclasses.replace(found, user=None, password=None, name_is_key=url.name_is_key)
