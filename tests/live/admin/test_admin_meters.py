"""Sums for monitoring by themselves: what ends while they are made, streams without end, and roles that come later."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from flowctl.core.flow.renditionbook import RenditionBook
from flowctl.core.flow.state import SendState
from flowctl.core.sending.figures import Account
from flowctl.live.admin.metrics import Metrics
from flowctl.live.records.meters import MOST_NAMED, OTHERS, Meters
from flowctl.reasons import CloseReason


class Peer:
    """A connection as sums need it."""

    def __init__(self, number, stream="live/a", role="viewer"):
        self.number, self.sent, self.ended = number, 100, None
        self.session = SimpleNamespace(role=role, is_node=False, streams=lambda: [stream] if role else [])
        self.opened_at = 0.0
        self.renditions = None
        self.sender = SimpleNamespace(account=lambda rows: Account(SendState.READY, bytes_sent=self.sent))
        self.receiver = SimpleNamespace(bytes_in=7)

    def now(self):
        return 1.0


def made():
    """Return sums, and a list of those who observe."""
    observers = []
    return Meters(observers.append), observers


def rows_of(meters, peers, between=None):
    """Return the rows by stream and role; `between` is called after the first connection was counted."""

    def connections():
        for at, peer in enumerate(peers):
            yield peer
            if at == 0 and between is not None:
                between()

    found = meters.figures(connections, ())["rows"]
    return {(row["stream"], row["role"]): row for row in found}


def test_sums_when_a_connection_ends_while_they_are_made_have_it_once():
    meters, observers = made()
    first, second = Peer(1), Peer(2)
    assert rows_of(meters, [first, second])["live/a", "viewer"]["sent_bytes"] == 200

    def ends():
        first.sent = 150
        first.ended = CloseReason.PEER_CLOSED
        meters.closed(first, CloseReason.PEER_CLOSED, "", None)

    during = rows_of(meters, [first, second], ends)["live/a", "viewer"]
    assert (during["sent_bytes"], during["closed"].get("peer closed", 0)) == (200, 0)
    after = rows_of(meters, [second])["live/a", "viewer"]
    assert (after["sent_bytes"], after["received_bytes"], after["closed"]) == (250, 14, {"peer closed": 1})
    assert after["states"]["READY"] == 1
    assert observers == [meters]


def test_sums_when_a_connection_has_ended_before_it_was_seen_are_without_it():
    meters, _ = made()
    rows_of(meters, [])
    late = Peer(3)
    late.ended = CloseReason.KICKED
    assert rows_of(meters, [late]) == {}
    meters.closed(late, CloseReason.KICKED, "", None)
    assert rows_of(meters, [late])["", "none"]["closed"] == {"kicked": 1}


def test_streams_when_there_are_more_than_have_names_are_one_label():
    meters, _ = made()
    peers = [Peer(number, f"live/{number}") for number in range(MOST_NAMED + 20)]
    found = rows_of(meters, peers)
    assert len(found) == MOST_NAMED + 1
    assert found[OTHERS, "viewer"]["states"]["READY"] == 20
    assert rows_of(meters, peers[::-1]).keys() == found.keys()


def test_connection_when_it_finds_its_role_later_is_counted_from_then_on():
    meters, _ = made()
    peer = Peer(1, role="")
    assert rows_of(meters, [peer])["", "none"]["sent_bytes"] == 0
    peer.session = Peer(1).session
    found = rows_of(meters, [peer])
    assert found.keys() == {("live/a", "viewer")}
    assert found["live/a", "viewer"]["sent_bytes"] == 100


def test_connection_when_it_is_another_server_is_no_viewer():
    """Its viewers are counted there; one that plays nothing yet has no role."""
    meters, _ = made()
    node, idle = Peer(1), Peer(2, role="")
    node.session.is_node = idle.session.is_node = True
    assert rows_of(meters, [node, Peer(3), idle]).keys() == {("live/a", "node"), ("live/a", "viewer"), ("", "none")}


def test_sums_when_viewers_follow_a_set_tell_who_is_where_and_keep_the_switches_of_those_who_left():
    order = ("360", "720")
    meters, _ = made()
    first, second, plain = Peer(1), Peer(2), Peer(3)
    for peer in (first, second):
        peer.renditions = RenditionBook()
        peer.renditions.enter(0.0, "360", "", lambda: order)
    first.renditions.switch(1.0, "720", "")
    first.renditions.switch(2.0, "360", "", failed=True)
    row = rows_of(meters, [first, second, plain])["live/a", "viewer"]
    assert row["renditions"] == {"360": 2}
    assert row["switches"] == {"up": 1, "down": 1, "failed": 1}
    first.renditions.leave(3.0)
    first.ended = CloseReason.PEER_CLOSED
    meters.closed(first, CloseReason.PEER_CLOSED, "", None)
    row = rows_of(meters, [second, plain])["live/a", "viewer"]
    assert (row["renditions"], row["switches"]) == ({"360": 1}, {"up": 1, "down": 1, "failed": 1})


# -- what they come to for Prometheus


def part(pid, sent, worker=1, stream="live/a"):
    """Return what one process tells."""
    row = {"stream": stream, "role": "viewer", "sent_bytes": sent, "received_bytes": 0, "delay_s": 0.0}
    row |= {"state_s": {"READY": 1.0}, "dropped": {"late": 2}, "closed": {}, "states": {"READY": 1}, "delays": [1] * 9}
    row |= {"renditions": {"720": 1}, "switches": {"up": 2, "down": 1, "failed": 1}}
    figures = {"rows": [row], "limit_hits": {}, "refused": {}, "flush_rounds": 3, "accepted": 1, "up_s": 1.0}
    figures |= {"streams": 1, "bans": 2, "draining": False, "kind": "server", "segments_sent_bytes": 0}
    thread = {"busy": 0.5, "longest_turn_s": 0.1, "errors": 0}
    return {"pid": pid, "worker": worker, "threads": {"flowctl-0": thread}, **figures}


def values(metrics, *parts):
    """Return all samples by name, of those with the same name the sums."""
    found = {}
    for family in text_string_to_metric_families(metrics.text({"parts": list(parts)}).decode()):
        for item in family.samples:
            found[item.name] = found.get(item.name, 0) + item.value
    return found


def test_counters_when_a_worker_is_started_anew_never_go_down():
    metrics = Metrics("1")
    assert values(metrics, part(10, 100), part(20, 50, worker=2))["flowctl_sent_bytes_total"] == 150
    assert values(metrics, part(11, 5), part(20, 60, worker=2))["flowctl_sent_bytes_total"] == 165
    silent = values(metrics, part(11, 7))
    assert silent["flowctl_sent_bytes_total"] == 167
    assert (silent["flowctl_workers"], silent["flowctl_connections"], silent["flowctl_bans"]) == (1, 1, 2)
    assert values(metrics, part(11, 7), part(20, 70, worker=2))["flowctl_sent_bytes_total"] == 177


def test_renditions_when_scraped_are_viewers_switches_and_failures():
    found = {}
    for family in text_string_to_metric_families(Metrics("1").text({"parts": [part(1, 1)]}).decode()):
        if "rendition" in family.name:
            found |= {(item.name, *sorted(item.labels.items())): item.value for item in family.samples}
    stream = ("stream", "live/a")
    assert found == {
        ("flowctl_rendition_viewers", ("rendition", "720"), stream): 1.0,
        ("flowctl_rendition_switches_total", stream, ("way", "up")): 2.0,
        ("flowctl_rendition_switches_total", stream, ("way", "down")): 1.0,
        ("flowctl_rendition_failures_total", stream): 1.0,
    }


def test_labels_when_names_of_peers_are_hostile_stay_one_label():
    name = 'live/"} 1\\n# TYPE evil counter\\nevil'
    text = Metrics("1").text({"parts": [part(1, 1, stream=name)]}).decode()
    assert {family.name for family in text_string_to_metric_families(text)}.isdisjoint({"evil"})
    found = [item.labels.get("stream") for family in text_string_to_metric_families(text) for item in family.samples]
    assert name in found
