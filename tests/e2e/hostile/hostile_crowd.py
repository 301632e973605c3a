"""A publisher and healthy viewers in a process of their own, beside the server that is being attacked.

``python hostile_crowd.py URL VIEWERS``: writes one JSON line when every viewer has frames, answers each line of its
input with what the viewers have got so far, and ends with its input; ``reset`` begins to measure delays anew. Every
frame carries its number, so one that is missing is seen, wherever it was lost, and the time at which it was made.
"""

from __future__ import annotations

import json
import sys
import time

from flowctl.pollgroup import PollGroup
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import start_client
from flowctl.wire.client.player import HEALTHY, RtmpPlayer
from flowctl.wire.client.publisher import RtmpPublisher
from flowctl.wire.media.stamp import read_stamp
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.wire import TYPE_VIDEO

SOURCE = SyntheticSource(video_bit_rate=1_200_000, audio=False, fps=25, key_interval_s=0.6)
PATIENCE_S = 30.0
AT_ONCE, PAUSE_S = 30, 0.06
"""How viewers come: the server lets 40 of one address in at once and 20 more per second."""


class Viewer:
    def __init__(self, group: PollGroup, url: str) -> None:
        self.first = self.last = -1
        self.count = 0
        self.disorder = 0
        self.delays_us: list[int] = []
        self.player = RtmpPlayer(parse_address(url), HEALTHY, on_message=self.take)
        start_client(group, self.player)

    def take(self, message, _class) -> None:
        if message.type_id != TYPE_VIDEO or (found := read_stamp(message.payload)) is None:
            return
        number, made_us = found
        self.delays_us.append(time.time_ns() // 1000 - made_us)
        self.disorder += number <= self.last
        self.first = number if self.first < 0 else self.first
        self.last = number
        self.count += 1

    @property
    def missing(self) -> int:
        return self.last - self.first + 1 - self.count if self.count else 0


def figures(viewers: list[Viewer], publisher: RtmpPublisher) -> dict:
    ends = [str(viewer.player.end) for viewer in viewers if viewer.player.end is not None]
    if publisher.end is not None:
        ends.append(f"publisher: {publisher.end}")
    delays = sorted(delay for viewer in viewers for delay in list(viewer.delays_us))
    return {
        "delays": len(delays),
        "p99_ms": delays[len(delays) * 99 // 100] / 1000 if delays else None,
        "frames": min(viewer.count for viewer in viewers),
        "missing": sum(viewer.missing for viewer in viewers),
        "disorder": sum(viewer.disorder for viewer in viewers),
        "behind": max(viewer.last for viewer in viewers) - min(viewer.last for viewer in viewers),
        "ended": ends,
    }


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    url, count = sys.argv[1], int(sys.argv[2])
    group = PollGroup("crowd")
    group.start()
    try:
        publisher = RtmpPublisher(parse_address(url), SOURCE)
        start_client(group, publisher)
        viewers = []
        for number in range(count):
            viewers.append(Viewer(group, url))
            time.sleep(PAUSE_S if number >= AT_ONCE else 0.0)
        end = time.monotonic() + PATIENCE_S
        while not all(viewer.count for viewer in viewers) and time.monotonic() < end:
            time.sleep(0.02)
        say(json.dumps(figures(viewers, publisher)))
        for line in sys.stdin:
            if line.strip() == "reset":
                for viewer in viewers:
                    viewer.delays_us = []
            say(json.dumps(figures(viewers, publisher)))
    finally:
        group.stop(2.0)


if __name__ == "__main__":
    main()
