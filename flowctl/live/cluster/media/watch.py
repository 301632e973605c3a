"""Which streams of a server are to be written, as they come and go, and as its settings change."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Final

from flowctl.errors import ClosedError, LocalProtocolError
from flowctl.live.cluster.media.order import StreamOrder
from flowctl.live.cluster.succession import OF_THE_OTHER
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer
from flowctl.live.stream import Stream, StreamMember


def order_of(config: LiveConfig, stream: str, address: str = "") -> StreamOrder:
    """Return what the settings want written of a stream that is published from `address`; empty: elsewhere."""
    if config.step_of(stream) is not None:  # its stream is written, and that a viewer needs a step is no reason
        return StreamOrder(address=address)
    media = config.at(stream).media
    return StreamOrder(
        record_format=media.record_format.value if media.record.fits(stream) else "",
        record_length_s=media.record_length_s,
        hls=media.hls.fits(stream),
        hls_segment_s=media.hls_segment_s,
        hls_part_s=min(media.hls_part_s, media.hls_segment_s / 2),
        address=address,
    )


class MediaWatch:
    """Tells what is to be written of the streams of a server, as they come and go, and as its settings change.

    Args:
        tell: called on the thread of the server's first group; None: the stream has gone.
        copies: whether copies of other servers' streams count; those of other workers, and of the server whose place
            this one takes, are written there.
    """

    def __init__(self, server: LiveServer, tell: Callable[[str, StreamOrder | None], None], *, copies: bool) -> None:
        self._hub: Final = server.hub
        self._group: Final = server.groups.groups[0]
        self._tell: Final = tell
        self._copies: Final = copies
        self._told: dict[str, tuple[StreamOrder, StreamMember | None]] = {}  # of which publisher; the group's thread
        server.hub.published += (self._note,)

    def _note(self, name: str) -> None:
        with contextlib.suppress(ClosedError, LocalProtocolError):  # the server ends
            self._group.call_soon(self._look, name)

    def _look(self, name: str) -> None:
        known = self._told.get(name)
        stream = self._hub.find_stream(name)
        publisher = None if stream is None or stream.ended else stream.publisher
        order = None
        if stream is not None and self._is_published(stream):
            address = "" if publisher is None or not publisher.peer[1] else publisher.peer[0]
            if publisher is None and known is not None:  # it may be back
                address = known[0].address
            order = self._of_set(stream, order_of(self._hub.config, name, address))
        elif self._hub.leaving:
            order = StreamOrder(moves=True)
        if order is None:
            if self._told.pop(name, None) is not None:
                self._tell(name, None)
        elif order.writes and (known is None or publisher not in (known[1], None)):
            # Of another publisher it is told too: the stream may have been at another worker meanwhile.
            self._told[name] = order, publisher
            self._tell(name, order)
        elif known is not None and order != known[0]:
            self._told[name] = order, publisher
            self._tell(name, order)

    def _of_set(self, stream: Stream, order: StreamOrder) -> StreamOrder:
        """Return the order for a stream, which has renditions as variants of its HLS if it is the face of a set."""
        found = self._hub.renditions.find(stream) if order.hls else None
        if found is None or found.ladder or found.sound_alone:
            return order
        variants = {item.name: item.key for item in found.renditions() if item.joined}
        return dataclasses.replace(order, hls=bool(variants), renditions=variants)

    def _is_published(self, stream: Stream) -> bool:
        if stream.ended:
            return False
        publisher = stream.publisher
        if publisher is None:  # it may be back, and nobody is told that it has gone; or it moves to the successor
            return not self._hub.leaving
        return publisher.peer[1] > 0 or (self._copies and publisher.peer[0] not in OF_THE_OTHER)
