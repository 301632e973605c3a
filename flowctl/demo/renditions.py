"""The set of renditions of the demonstration: its publishers, and the load run of the viewer that plays it.

Three publishers send the same content in three sizes, with key frames at the same times, from a thread of this process.
The viewer reads half of the bit rate of the largest, as one of those that play a single stream does, and the server
chooses for it. It is the crowd of a load run of its own; what it measured joins the results of the other one.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final, Self

from flowctl.demo.plan import RENDITIONS, DemoPlan
from flowctl.demo.runner import FPS, KEY_INTERVAL_S
from flowctl.load.results.result import RunResult
from flowctl.load.run import run_load
from flowctl.pollgroup import PollGroup
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import start_client
from flowctl.wire.client.publisher import RtmpPublisher
from flowctl.wire.media.synthetic import SyntheticSource

_AUDIO_BIT_RATE: Final = 64_000
_KEY_FRAME_RATIO: Final = 20.0
"""As of a picture with little motion: the burst of a key frame is what shows the server what a line carries."""
_BEGIN_S: Final = 0.5
"""Time in which all three are to be connected: they begin at the same moment."""
_HEAD_S: Final = KEY_INTERVAL_S
"""Head start of the publishers: the rates of the renditions are known when the viewer comes."""
_STOP_S: Final = 5.0


def publish_set(group: PollGroup, url: str) -> None:
    """Publish the set at `url` from the thread of `group`, until that stops."""
    begin = time.monotonic() + _BEGIN_S
    for suffix, (bit_rate, width, height) in RENDITIONS.items():
        source = SyntheticSource(
            video_bit_rate=bit_rate - _AUDIO_BIT_RATE,
            audio_bit_rate=_AUDIO_BIT_RATE,
            fps=FPS,
            key_interval_s=KEY_INTERVAL_S,
            key_frame_ratio=_KEY_FRAME_RATIO,
            width=width,
            height=height,
        )
        publisher = RtmpPublisher(parse_address(url + suffix), source, begins=lambda now: max(now, begin))
        start_client(group, publisher)


class SetRun:
    """Publishes the set at `url`, and plays it for as long as the plan says; a context."""

    def __init__(self, plan: DemoPlan, url: str) -> None:
        self._plan = plan
        self._url = url
        self._group = PollGroup("demo-set")
        self._thread = threading.Thread(target=self._play, name="demo-set-load", daemon=True)
        self._found: RunResult | None = None

    def __enter__(self) -> Self:
        self._group.start()
        publish_set(self._group, self._url)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(None if kind is None else 0.0)
        self._group.stop(_STOP_S)

    def _play(self) -> None:
        time.sleep(_BEGIN_S + _HEAD_S)
        self._found = run_load(self._plan.set_plan(self._url))

    def add_to(self, result: RunResult) -> None:
        """Add what the viewer measured to the result of the demonstration's load run; after the end of the context."""
        found, name = self._found, self._plan.set_profile
        if found is None:
            return
        (given,) = found.profiles
        result.profiles = {**result.profiles, name: 1}
        for peer in found.peers:
            peer.number, peer.profile = len(result.peers), name
            result.peers.append(peer)
        result.delays_ms[name] = found.delays_ms.get(given, [])
        for sample, other in zip(result.samples, found.samples, strict=False):
            for field in ("connected", "playing", "missing", "pictures", "missing_pictures", "cut", "failed"):
                counts: dict[str, int] = getattr(sample, field)
                counts[name] = getattr(other, field).get(given, 0)
