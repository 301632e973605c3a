"""What goes on when the demonstration is over and its server stays: a stream, and viewers to look at."""

from __future__ import annotations

import contextlib
import threading
from typing import Final

from flowctl.demo.plan import BIT_RATE, DISPOSABLE_EVERY, FPS, KEY_INTERVAL_S, SLOW_SHARES
from flowctl.pollgroup import PollGroup
from flowctl.wire.client.connect import parse_address, start_client
from flowctl.wire.client.player import HEALTHY, PlayProfile, RtmpPlayer
from flowctl.wire.client.publisher import RtmpPublisher
from flowctl.wire.media.synthetic import SyntheticSource

_HEALTHY: Final = 5
_LOOK_S: Final = 1.0
_STOP_S: Final = 5.0


def stay(url: str, until: threading.Event) -> None:
    """Publish to `url` and play it, with healthy and slow viewers, until the event or Ctrl-C."""
    address = parse_address(url)
    profiles = [HEALTHY] * _HEALTHY + [PlayProfile(rate=int(BIT_RATE * share)) for share in SLOW_SHARES]
    group = PollGroup("demo-stay")
    group.start()
    try:
        source = SyntheticSource(
            video_bit_rate=BIT_RATE, fps=FPS, key_interval_s=KEY_INTERVAL_S, disposable_every=DISPOSABLE_EVERY
        )
        start_client(group, RtmpPublisher(address, source))
        for profile in profiles:
            start_client(group, RtmpPlayer(address, profile), receive_buffer_bytes=profile.receive_buffer_bytes)
        with contextlib.suppress(KeyboardInterrupt):
            while not until.wait(_LOOK_S):
                pass
    finally:
        group.stop(_STOP_S)
