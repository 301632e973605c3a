"""Streams pulled from servers over RTMP to be written: connected, kept up, and tried again when lost."""

from __future__ import annotations

from typing import Final

from flowctl.core.outcomes.backoff import Backoff
from flowctl.live.cluster.follow import Follow, Sink, Source
from flowctl.pollgroup import PollGroup
from flowctl.wire.rtmp.url import RtmpUrl

_BACKOFF: Final = Backoff(first_s=0.25, factor=2.0, most_s=10.0)
HOLD_S: Final = 10.0
"""How long a stream whose server is lost may be away and still go on in the same file, if its clock does."""


def pull(url: RtmpUrl, sink: Sink, group: PollGroup) -> Follow:
    """Return what plays `url` into `sink` on the thread of `group`; start it."""
    return Follow(Source(url), sink, group, backoff=_BACKOFF, hold_s=HOLD_S)
