"""Publishes an FLV file in real time as ``flowctl publish`` does: ``publish_file.py URL FILE TARGET_DELAY``.

Prints one JSON line when it begins (``began``, of the monotonic clock, at which timestamp 0 was due), and one with its
figures and processor time at the end.
"""

from __future__ import annotations

import json
import sys
import time

from flowctl.core.flow.limits import parse_target_delay
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import ClientRun
from flowctl.wire.client.publisher import RtmpPublisher
from flowctl.wire.client.source import FlvFile


def main() -> None:
    """Publish until the file ends."""

    def begins(now: float) -> float:
        print(json.dumps({"began": now}), flush=True)
        return now

    address, source = parse_address(sys.argv[1]), FlvFile(sys.argv[2])
    target_delay_ms = parse_target_delay(sys.argv[3], "target delay")
    with ClientRun(
        lambda _, on_end: RtmpPublisher(address, source, begins=begins, on_end=on_end, target_delay_ms=target_delay_ms)
    ) as run:
        cpu_s = time.process_time()
        run.start()
        run.wait()
        figures = run.client.statistics()
        row = {"cpu_s": time.process_time() - cpu_s, "sent": figures.sent.total_messages, "end": str(run.client.end)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
