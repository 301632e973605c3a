"""The demonstration's clients, in a process of their own: ``python -m flowctl.demo.clients``.

A process of its own, because publisher and viewers would otherwise take turns with the server in one interpreter, and
the server could not be told from its load. It reads one line of JSON (plan, address, recording), then writes lines of
JSON: ``ports`` when all clients are there, which tells the viewers apart at the server, and ``done`` at the end, with
what each of them got. When its input is closed, whoever started it is gone, and it ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.client.connect import start_client
from flowctl.client.player import RtmpPlayer
from flowctl.client.publisher import RtmpPublisher
from flowctl.client.source import FlvFile
from flowctl.demo.audit import Published, frame_key
from flowctl.demo.plan import RECIPE, DemoPlan, Kind, ViewerPlan
from flowctl.errors import FlowctlError
from flowctl.flow import MessageClass
from flowctl.flv import FlvTag
from flowctl.media.synthetic import SyntheticSource
from flowctl.pollgroup import PollGroup
from flowctl.rtmp.session_config import ClientSessionConfig
from flowctl.rtmp.url import RtmpUrl, parse_url
from flowctl.rtmp.wire import Message

_LEAD_S: Final = 1.0
"""Media published before the first viewer joins: they all join in the middle of a group of pictures."""

_LAST_WAIT_S: Final = 3.0
"""How long a slow viewer may take for what is still on its way when the stream has ended."""

_PUBLISHER_CONFIG: Final = ClientSessionConfig(flash_version="FMLE/3.0 (compatible; flowctl demo)")


@dataclass(slots=True)
class _Viewer:
    """A viewer and what it got."""

    plan: ViewerPlan
    player: RtmpPlayer = field(init=False)
    received: array[int] = field(default_factory=lambda: array("Q"))
    port: int = 0

    def note(self, message: Message, message_class: MessageClass) -> None:
        """Note one frame."""
        if message_class is not MessageClass.HEADER:
            self.received.append(frame_key(message.type_id, message.timestamp))


def source_of(path: str | None) -> Iterable[FlvTag]:
    """Return the source: a recording, or the synthetic one at the same rates where there is none."""
    if path is not None:
        return FlvFile(path)
    return SyntheticSource(
        video_bit_rate=RECIPE.video_bit_rate,
        audio_bit_rate=RECIPE.audio_bit_rate,
        fps=RECIPE.fps,
        key_interval_s=RECIPE.gop_s,
        disposable_every=3,
    )


class Clients:
    """Publisher and viewers on one poll group.

    Args:
        plan: who takes part.
        url: the stream's address.
        recording: FLV file. None: the synthetic source.
    """

    def __init__(self, plan: DemoPlan, url: RtmpUrl, recording: str | None) -> None:
        self._plan = plan
        self._url = url
        self._group = PollGroup("demo-clients")
        self._published = Published()
        self._publisher = RtmpPublisher(
            url,
            source_of(recording),
            loop=recording is not None,
            duration_s=plan.duration_s + _LEAD_S,
            config=_PUBLISHER_CONFIG,
            on_sent=self._note_sent,
        )
        bit_rate = RECIPE.video_bit_rate + RECIPE.audio_bit_rate
        self._viewers = [_Viewer(viewer) for viewer in plan.viewers(bit_rate)]

    def _note_sent(self, tag: FlvTag, message_class: MessageClass) -> None:
        self._published.add(tag.type_id, tag.timestamp, message_class)

    def start(self) -> dict[str, int]:
        """Publish, let the viewers join one after the other, and return the local port of each."""
        self._group.start()
        start_client(self._group, self._publisher)
        time.sleep(_LEAD_S)
        for viewer in self._viewers:
            profile = viewer.plan.profile
            config = ClientSessionConfig(flash_version=f"flowctl demo, {viewer.plan.label}")
            viewer.player = RtmpPlayer(self._url, profile, config=config, on_message=viewer.note)
            start_client(
                self._group,
                viewer.player,
                receive_buffer_bytes=profile.receive_buffer_bytes,
                capacity_bytes=profile.capacity_bytes,
            )
            sock = viewer.player.sock
            viewer.port = 0 if sock is None else sock.getsockname()[1]
        return {viewer.plan.label: viewer.port for viewer in self._viewers}

    def wait(self, given_up: threading.Event) -> None:
        """Wait until the stream has ended and everybody who reads has got the last of it."""
        end = time.monotonic() + self._plan.duration_s * 1.5 + 10
        while not (self._publisher.ended or given_up.wait(0.1)) and time.monotonic() < end:
            pass
        last = time.monotonic() + _LAST_WAIT_S
        while time.monotonic() < last and not given_up.wait(0.1):
            players = [viewer.player for viewer in self._viewers]
            if all(player.ended or player.statistics().stalled for player in players):
                return  # who does not read gets nothing more

    def results(self) -> dict[str, Any]:
        """Stop all clients; return what was published and what each viewer got."""
        self._group.stop()
        figures = self._publisher.statistics()
        return {
            "published": {
                "frames": len(self._published),
                "bytes": figures.sent.total_bytes,
                "max_lag_s": figures.max_lag_s,
                "end": str(self._publisher.end),
            },
            "viewers": {viewer.plan.label: self._result(viewer) for viewer in self._viewers},
        }

    def _result(self, viewer: _Viewer) -> dict[str, Any]:
        player = viewer.player
        stalled_at = player.stalled_at
        return {
            # A slow viewer may still have been on its way to the last frames; a healthy one has no excuse.
            **self._published.audit(viewer.received, to_end=viewer.plan.kind is Kind.HEALTHY).as_dict(),
            "started_on_key": player.started_on_key,
            "first_frame_s": player.first_frame_s,
            "stalled_after_s": None if stalled_at is None else stalled_at - player.connection.opened_at,
            "pings_sent": player.statistics().pings_sent,
            "end": None if player.end is None else str(player.end),
        }


def _say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _watch_input(given_up: threading.Event) -> None:
    """Set `given_up` when whoever started us has closed our input or is gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    given_up.set()


def main() -> int:
    """Read what to do from standard input, do it, and write what came of it to standard output."""
    orders = json.loads(sys.stdin.readline())
    given_up = threading.Event()
    threading.Thread(target=_watch_input, args=(given_up,), daemon=True).start()
    clients = Clients(DemoPlan.from_dict(orders["plan"]), parse_url(orders["url"]), orders["recording"])
    try:
        _say(ports=clients.start())
        clients.wait(given_up)
    except FlowctlError as error:
        _say(error=str(error), hint=error.hint)
        return 1
    _say(done=clients.results())
    return 0


if __name__ == "__main__":
    sys.exit(main())
