"""Where recordings are looked for: at a server that lists them, over HTTP, or in the folder of a stream."""

from __future__ import annotations

import contextlib
import http.client
import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from flowctl.core.loop.trust import client_context
from flowctl.core.text.printable import foreign
from flowctl.errors import ConfigError, FlowctlError
from flowctl.live.playback.library import LATEST_S, Library, time_text
from flowctl.wire.client.address import parse_address
from flowctl.wire.rtmp.url import RtmpUrl, canonical

_TIMEOUT_S: Final = 30.0
_READ_BYTES: Final = 64 * 1024
_LIST_BYTES: Final = 4 << 20
"""Longest list that is read of a server: 1000 recordings are some 300 kB."""
_HINTS: Final = {
    401: "put the key or token behind the address, as for playing: ?key=... or ?token=...",
    403: "put the key or token behind the address, as for playing: ?key=... or ?token=...",
    404: "does the server list recordings of this stream (record_play), and was it recorded then?",
    503: "try again later",
}


class FolderRecordings:
    """The folder of a stream's recordings."""

    def __init__(self, folder: Path) -> None:
        folder = folder.resolve()
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder", hint="name that of a stream: recordings/live/room")
        self._library = Library(folder)

    def close(self) -> None:
        """Do nothing: a file is open only while it is read."""

    def find(self, from_s: float | None, to_s: float | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Return the recordings of a time, the latest first, and whether there are more."""
        found, more = self._library.recordings("", "", from_s, to_s, "", limit)
        return [item.row() for item in found], more

    def fetch(self, from_s: float, to_s: float | None, suffix: str) -> tuple[str, int, Iterator[bytes]]:
        """Return when a part of that time begins, its size, and the part."""
        span = self._library.span("", "", from_s, LATEST_S if to_s is None else to_s, suffix)
        if span is None:
            raise FlowctlError(
                f"nothing was recorded then as {suffix[1:].upper()}", hint="without --fetch it is listed what there is"
            )
        return time_text(span.start_s), span.size_bytes, self._library.parts("", "", span)


class ServerRecordings:
    """The recordings of a stream at a server, found and fetched as those of a folder; asked once."""

    def __init__(self, text: str) -> None:
        url = parse_address(text, ("http", "https"))
        try:
            self._url: RtmpUrl = canonical(url)
        except FlowctlError as error:
            raise ConfigError(f"{url}: {error}") from error
        self._opened = contextlib.ExitStack()

    def close(self) -> None:
        self._opened.close()

    def find(self, from_s: float | None, to_s: float | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        answer = self._ask("", from_s, to_s, limit=str(limit))
        try:
            said = json.loads(answer.read(_LIST_BYTES))
            return [dict(row) for row in said["recordings"]], said["next"] is not None
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise FlowctlError(f"{self._url} answers with no list of recordings", hint=_HINTS[404]) from error

    def fetch(self, from_s: float, to_s: float | None, suffix: str) -> tuple[str, int, Iterator[bytes]]:
        answer = self._ask(suffix, from_s, to_s)
        if answer.getheader("Recording-Start") is None:  # a live stream
            raise FlowctlError(f"{self._url} has no recordings there", hint=_HINTS[404])
        return answer.getheader("Recording-Start", "?"), answer.length or 0, _read(answer)

    def _ask(self, suffix: str, from_s: float | None, to_s: float | None, **more: str) -> http.client.HTTPResponse:
        url = self._url
        times = {"from": from_s, "to": to_s}
        asked = {name: time_text(time_s) for name, time_s in times.items() if time_s is not None} | more
        query = "&".join(filter(None, (url.raw_query, urlencode(asked))))
        if url.scheme == "https":
            context = client_context()
            client: http.client.HTTPConnection = http.client.HTTPSConnection(
                url.host, url.port, timeout=_TIMEOUT_S, context=context
            )
        else:
            client = http.client.HTTPConnection(url.host, url.port, timeout=_TIMEOUT_S)
        self._opened.callback(client.close)
        headers = {"User-Agent": "flowctl recordings"}
        if url.user is not None:
            word = b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
            headers["Authorization"] = f"Basic {word}"
        try:
            client.request("GET", f"{quote(f'/recordings/{url.path}')}{suffix}?{query}", headers=headers)
            answer = self._opened.enter_context(client.getresponse())
        except (OSError, http.client.HTTPException) as error:
            hint = "does the server listen there? http:// is where its setting http says"
            raise FlowctlError(f"{url} cannot be asked: {error}", hint=hint) from error
        if answer.status != 200:
            said = foreign(answer.read(300).decode("utf-8", "replace"))
            raise FlowctlError(f"{url}: {answer.status} {said}", hint=_HINTS.get(answer.status))
        return answer


def _read(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        while data := answer.read(_READ_BYTES):
            yield data
    except (OSError, http.client.HTTPException) as error:
        raise FlowctlError(f"the server broke off: {error}", hint="fetch it again") from error
