"""The line of figures that ``flowctl serve --stats`` logs."""

from __future__ import annotations

from flowctl.cli.figures import summary
from flowctl.limits import Limits
from flowctl.live import build_live_server
from flowctl.server import Server
from flowctl.serving import ServeOptions
from flowctl.session import Session


def test_figures_when_of_a_live_server_tell_of_slow_viewers_memory_and_shadow():
    """What was asked for is in the line: steps, delay, returns, memory held, who gave way, what a shadow would do."""
    options = ServeOptions(memory_budget_bytes=1 << 30, shadow_limits=Limits.parse("1MiB,100"))
    server = build_live_server(options)
    try:
        figures = summary(server)
    finally:
        server.stop()
    assert (figures["streams"], figures["viewers"], figures["steps"], figures["returns"]) == (0, {}, {}, 0)
    assert (figures["worst_delay_s"], figures["held"]) == (0.0, "0 B")
    assert figures["gave_way"] == {"thinned": 0, "closed": 0}
    assert figures["shadow"] == {"agrees": "100%", "more_dropped": 0, "would_close": 0, "would_keep": 0}


def test_figures_when_of_another_server_are_those_of_connections():
    """A server without streams has no figures of viewers."""
    server = Server(Session)
    try:
        assert {"connections", "accepted", "closed", "busy", "in_bytes"} == set(summary(server))
    finally:
        server.stop()
