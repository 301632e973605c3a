"""Pings by peers that break no list of attacks: `test_e2e_hostile` has those, each beside 50 viewers."""

from __future__ import annotations

import contextlib

from e2e_kit import connection_to, wait_until
from e2e_raw import RawPlayer

from flowctl.core.sending.settings import SenderSettings
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp.messages import EVENT_PING_REQUEST, UserControl, encode_control


def test_pings_below_the_limit_are_answered_once_per_interval(live):
    server = live(rtmp={"ping_answer_interval_s": 3600.0})
    with RawPlayer(server, name="live/nothing") as viewer:
        end = connection_to(server, viewer)
        for number in range(100):
            viewer.send_control(UserControl(EVENT_PING_REQUEST, timestamp=number))
        viewer.send_acknowledgement(99)
        viewer.read_until(lambda: end.session._rtmp.last_acknowledged_bytes == 99 and viewer.pongs)
        assert viewer.pongs == [0]
        assert end in server.connections()


def test_ping_flooder_that_does_not_read_is_cut_when_its_answers_pile_up(live):
    """With both limits on pings off, the answers that nobody reads end the connection at the control lane's limit."""
    settings = SenderSettings(control_bytes=4096, stuck_s=0, soft_too_long_s=0)
    rtmp = {"ping_answer_interval_s": 0.0, "control_messages_per_second": 0}
    server = live(rtmp=rtmp, settings=settings)
    with RawPlayer(server, name="live/nothing") as flooder:
        number = connection_to(server, flooder).number
        ping = flooder.session.send_message(encode_control(UserControl(EVENT_PING_REQUEST, timestamp=7)))
        with contextlib.suppress(ConnectionError):
            while any(item.number == number for item in server.connections()):
                flooder.sock.sendall(ping * 1000)
        assert wait_until(lambda: server.closed_by_reason.get(CloseReason.LIMIT_HIT) == 1, "the limit counted")
