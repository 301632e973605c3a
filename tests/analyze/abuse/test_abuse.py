"""Abuse scores: what is evidence and what is not, standing, decay, subnets, allow lists and the ban list."""

from __future__ import annotations

import ipaddress
import json
import shutil
import time

import pytest
from abuse_records import BEGIN_S, at, closed, event, hits, there, write
from pyarrow.parquet import read_table
from synth.make import found, make
from synth.people import SynthOptions

from flowctl.analyze.abuse import job
from flowctl.analyze.abuse.job import JOB, merge_lists
from flowctl.analyze.abuse.weights import Weights
from flowctl.analyze.duck.session import session
from flowctl.analyze.engine import DUCKDB, using
from flowctl.analyze.job import JobState
from flowctl.analyze.options import AbuseOptions, parse_networks
from flowctl.analyze.records import addresses
from flowctl.analyze.records.window import Window
from flowctl.analyze.run import run
from flowctl.core.server.bans import MOST_EVIDENCE, Ban, BanAction, BanList, render
from flowctl.core.server.guilt import PROOF
from flowctl.core.text.addresses import address_key
from flowctl.errors import ConfigError

pytestmark = pytest.mark.timeout(900)  # starting Java on a machine that does much else takes minutes
NOW_S = BEGIN_S + 3600
HOUR = {"duration_s": 3600.0}


def judge(either, tmp_path, rows, **given):
    write(tmp_path / "events", rows)
    options = AbuseOptions(**{"now_s": NOW_S} | given)
    note = run(either, str(tmp_path / "events"), str(tmp_path / "out"), [JOB], {"abuse": options}).jobs["abuse"]
    assert note.state is JobState.DONE, note.message
    scores = {row["address"]: row for row in either.read.parquet(str(tmp_path / "out" / "abuse_scores")).collect()}
    bans = BanList.parse((tmp_path / "out" / "bans.jsonl").read_text())
    return scores, bans, note


PROOFS = ("amf_depth", "chunk_size_min_bytes", "control_messages_per_second")


def attack(address, at_s=NOW_S, conn_id=900):
    return [event(address, "limit_hit", at_s, axis=axis, conn_id=conn_id) for axis in PROOFS for _ in range(20)]


def viewers(address, count, since_s, first=1, **more):
    return [row for n in range(count) for row in there(address, since_s, NOW_S, conn_id=first + n, **more)]


def ends(address, reason, count, at_s=NOW_S, **columns):
    return [closed(address, reason, at_s, conn_id=number, **columns) for number in range(1, count + 1)]


UNKNOWN = {"role": "unknown", "duration_s": 0.01}
DEAF = {"unrecovered_ms": 20_000.0, "unrecovered_bytes": 0}
NEVER_READ = {"duration_s": 21.0} | DEAF
SLOW = {"unrecovered_ms": 20_000.0, "unrecovered_bytes": 200_000}
CUT_AT_ONCE = {"duration_s": 3.0, "hard_at_once": 1, "unrecovered_ms": 0.2, "unrecovered_bytes": 0}
WAITED = {"duration_s": 20.0, "startup_ms": None}
LOST_LINE = {"duration_s": 60.0} | DEAF
DEAF_AT_LAST = {"duration_s": 35.0} | DEAF
GONE = {"window_bytes": 72_704, "retransmits": 5, "probes": 0, "sent_bytes": 400_000}
CLOSED = {"window_bytes": 0, "retransmits": 0, "probes": 1, "sent_bytes": 8 << 20}
LONG_AGO_S = NOW_S - 8 * 3600


def ends_apart(address, reason, count, **columns):
    return [closed(address, reason, NOW_S - 60 * n, conn_id=n, **columns) for n in range(1, count + 1)]


WORLD = {
    # who behaves beside an attacker
    "one viewer": ("shared", "192.0.2.1", lambda a: viewers(a, 1, NOW_S - 300) + attack(a)),
    "a school": ("shared", "192.0.2.2", lambda a: viewers(a, 30, NOW_S - 300) + attack(a)),
    "a school at night": ("shared", "192.0.2.3", lambda a: ends(a, "peer closed", 5, LONG_AGO_S, **HOUR) + attack(a)),
    "a mobile network": (
        "shared",
        "2001:db8:a:2::/64",
        lambda _: viewers("2001:db8:a:2::1", 1, NOW_S - 300) + attack("2001:db8:a:2:ffff:1:2:3"),
    ),
    "a publisher": (
        "shared",
        "192.0.2.4",
        lambda a: there(a, NOW_S - 300, NOW_S, role="publish") + attack(a),
    ),
    "one that reads nothing in a school": (
        "shared",
        "192.0.2.5",
        lambda a: ends(a, "peer closed", 300, **HOUR) + ends(a, "stuck", 24, **NEVER_READ),
    ),
    # who does not
    "nobody else": ("ban", "192.0.2.10", attack),
    "its own play, in which it attacks": (
        "ban",
        "192.0.2.11",
        lambda a: viewers(a, 1, NOW_S - 300, first=900) + attack(a, conn_id=900),
    ),
    "a viewer of a server that has gone since": (
        "ban",
        "192.0.2.12",
        lambda a: (
            [
                *viewers(a, 1, NOW_S - 300, node="node-2"),
                event(None, "server_started", NOW_S - 200, conn_id=0, node="node-2"),
                *attack(a),
            ]
        ),
    ),
    "a play that began just now": ("ban", "192.0.2.13", lambda a: viewers(a, 1, NOW_S - 5) + attack(a)),
    "x.y.z.0": ("ban", "192.0.2.0", attack),
    "x.y.z.255": ("ban", "192.0.2.255", attack),
    "a whole /64": (
        "ban",
        "2001:db8:a:1::/64",
        lambda _: [row for n in (1, 2, 3) for row in hits(f"2001:db8:a:1::{n}", "amf_depth", 1, NOW_S)],
    ),
    "the first /64 of a /48": ("ban", "2001:db8:a::/64", lambda _: attack("2001:DB8:A:0::9")),
    "IPv4 written as IPv6": ("ban", "192.0.2.14", lambda _: attack("::ffff:192.0.2.14")),
    "the same in hexadecimal": ("ban", "192.0.2.15", lambda _: attack("::ffff:c000:20f")),
    # honest ones who look bad
    "accidents of hundreds": (
        "ok",
        "192.0.2.20",
        lambda a: (
            ends(a, "peer closed", 300, **HOUR)
            + ends(a, "handshake timeout", 400, **UNKNOWN)
            + ends(a, "stuck", 30, **DEAF)
        ),
    ),
    "lost as they connected, of a thousand": (
        "ok",
        "192.0.2.31",
        lambda a: ends(a, "peer closed", 1000, **HOUR) + ends(a, "stuck", 24, **NEVER_READ),
    ),
    "a crowd that comes back at once": (
        "ok",
        "192.0.2.21",
        lambda a: (
            viewers(a, 300, NOW_S)
            + [event(a, "conn_refused", NOW_S, reason="new_per_address_and_s", count=999) for _ in range(30)]
        ),
    ),
    "a health check each second": ("limit", "192.0.2.22", lambda a: ends(a, "peer closed", 1000, **UNKNOWN)),
    "browsers that a page sends to the port": (
        "limit",
        "192.0.2.23",
        lambda a: [
            row
            for code in ("not-rtmp", "tls-on-plain-port", "handshake-version", None)
            for row in ends(a, "protocol error", 100, code=code, **UNKNOWN)
        ],
    ),
    "connections that say nothing": ("limit", "192.0.2.24", lambda a: ends(a, "handshake timeout", 900, **UNKNOWN)),
    "an encoder with a wrong key": ("limit", "192.0.2.25", lambda a: ends(a, "auth refused", 900, **UNKNOWN)),
    "an encoder that does not wait": ("limit", "192.0.2.26", lambda a: hits(a, "unpublished_bytes", 90, NOW_S, 0)),
    "a limit of another version": ("limit", "192.0.2.27", lambda a: hits(a, "a_limit_to_come_s", 90, NOW_S, 0)),
    "zapping": ("ok", "192.0.2.28", lambda a: ends(a, "peer closed", 200, duration_s=1.5)),
    "a phone on a train": (
        "ok",
        "192.0.2.29",
        lambda a: (
            ends(a, "peer reset", 99, duration_s=3.0)
            + ends(a, "handshake timeout", 9, **UNKNOWN)
            + ends(a, "stuck", 20, **SLOW)
        ),
    ),
    "a second's visit": ("ok", "192.0.2.30", lambda a: ends(a, "peer closed", 1, **UNKNOWN)),
    # who is never touched
    "loopback": ("allowed", "127.0.0.1", attack),
    "a private network": ("allowed", "10.1.2.3", lambda _: attack("::ffff:10.1.2.3")),
    "a private network of IPv6": ("allowed", "fd00:0:0:7::/64", lambda _: attack("fd00:0:0:7::1")),
    "beside a private network": ("ban", "172.32.0.1", attack),
    "a trusted proxy": ("allowed", "192.0.2.40", lambda a: viewers(a, 3, NOW_S - 300) + attack(a)),
    "a /64 that was recorded as its /48": ("no_address", "2001:db8:b::/48", attack),
    "a network that was recorded": ("no_address", "198.18.7.0/24", attack),
    "a hash": ("no_address", "h:00ff00ff00ff00ff", attack),
    "a name": ("no_address", "somebody", attack),
    "no address": ("no_address", "300.1.1.1", attack),
    "an octal address": ("no_address", "1.2.3.04", attack),
    "no address of a peer": ("no_address", "0.0.0.0", attack),
    "a group": ("no_address", "224.0.0.1", attack),
    "a group of IPv6": ("no_address", "ff02::/64", lambda _: attack("ff02::1")),
    "everybody": ("no_address", "255.255.255.255", attack),
    "the /64 of loopback": ("no_address", "::/64", lambda _: attack("::") + attack("::1")),
}
"""Planted by hand: who it is -> verdict, address as scored, records."""
OF_HOURS = {
    # honest ones who look bad
    "a train in a tunnel, with one address": ("ok", "192.0.2.80", lambda a: ends(a, "stuck", 40, **LOST_LINE)),
    "a lecture whose router fails at its begin": (
        "ok",
        "192.0.2.81",
        lambda a: ends(a, "stuck", 40, **DEAF_AT_LAST),
    ),
    "a phone in the underground, stop by stop": (
        "ok",
        "2001:db8:c:1::/64",
        lambda _: ends_apart("2001:db8:c:1::1", "stuck", 30, **LOST_LINE),
    ),
    "a throttled phone, cut again and again": (
        "ok",
        "192.0.2.82",
        lambda a: ends_apart(a, "hard limit", 40, duration_s=21.0, unrecovered_ms=20_000.0, unrecovered_bytes=40_000),
    ),
    "browsers that a page has ask over HTTP and not read": (
        "limit",
        "192.0.2.83",
        lambda a: ends(a, "stuck", 90, role="http_flv", **NEVER_READ),
    ),
    "an encoder that sends nonsense every two seconds": (
        "limit",
        "192.0.2.84",
        lambda a: ends(a, "protocol error", 400, role="publish", duration_s=1.5, code="amf-marker"),
    ),
    "an encoder with a chunk size of 2 GiB": (
        "limit",
        "192.0.2.85",
        lambda a: hits(a, "chunk_size_max_bytes", 400, NOW_S - 900, 2.0, role="publish"),
    ),
    "an encoder that crashes every two seconds": (
        "watch",
        "192.0.2.86",
        lambda a: ends_apart(a, "peer reset", 400, role="publish", duration_s=1.5),
    ),
    "a player that asks for what is not there": (
        "watch",
        "192.0.2.87",
        lambda a: ends_apart(a, "peer closed", 90, **UNKNOWN),
    ),
    "a mobile network with thousands of viewers": (
        "ok",
        "192.0.2.88",
        lambda a: viewers(a, 1100, NOW_S - 90) + attack(a, conn_id=5000),
    ),
    "a mobile network, where nobody attacks": (
        "ok",
        "192.0.2.89",
        lambda a: (
            viewers(a, 500, NOW_S - 90)
            + ends(a, "stuck", 300, **LOST_LINE)
            + ends(a, "hard limit", 200, **SLOW)
            + ends(a, "handshake timeout", 900, **UNKNOWN)
        ),
    ),
    "an office proxy at eight": (
        "shared",
        "192.0.2.90",
        lambda a: viewers(a, 6, NOW_S - 20) + attack(a),
    ),
    "a viewer, heard of last long before a server whose clock is ahead": (
        "shared",
        "192.0.2.96",
        lambda a: [
            *there(a, NOW_S - 1500, NOW_S - 1200, node="node-3"),
            *there("192.0.2.97", NOW_S - 300, NOW_S, node="node-ahead"),
            *attack(a, NOW_S - 1200),
        ],
    ),
    "hosts of a /64": (
        "ok",
        "2001:db8:c:2::/64",
        lambda _: (
            [closed(f"2001:db8:c:2::{n:x}", "peer closed", NOW_S, conn_id=n, **HOUR) for n in range(100, 700)]
            + ends("2001:db8:c:2::fade", "stuck", 24, **NEVER_READ)
        ),
    ),
    "viewers of one who publishes pictures of 9 MB": (
        "ok",
        "192.0.2.98",
        lambda a: ends_apart(a, "hard limit", 40, **CUT_AT_ONCE),
    ),
    "the same, over HTTP": (
        "ok",
        "192.0.2.99",
        lambda a: ends_apart(a, "hard limit", 90, role="http_flv", **CUT_AT_ONCE),
    ),
    "phones without reception, as soon as they have joined": (
        "ok",
        "192.0.2.112",
        lambda a: ends_apart(a, "stuck", 40, **NEVER_READ, **GONE),
    ),
    "a phone with hardly any": (
        "ok",
        "192.0.2.113",
        lambda a: ends_apart(a, "hard limit", 40, **DEAF_AT_LAST, **GONE | {"retransmits": 0}),
    ),
    "phones without reception, over HTTP": (
        "ok",
        "192.0.2.114",
        lambda a: ends_apart(a, "stuck", 90, role="http_flv", **NEVER_READ, **GONE),
    ),
    "a phone whose line went while its player was paused": (
        "ok",
        "192.0.2.115",
        lambda a: ends_apart(a, "stuck", 40, **DEAF_AT_LAST, **CLOSED | {"probes": 3}),
    ),
    "a player that is paused again and again, each time after a minute": (
        "ok",
        "192.0.2.116",
        lambda a: ends_apart(a, "stuck", 14, **DEAF | {"duration_s": 81.0}, **CLOSED | {"sent_bytes": 700_000}),
    ),
    "the same after more than a kernel holds": (
        "ok",
        "192.0.2.117",
        lambda a: ends_apart(a, "stuck", 40, **DEAF_AT_LAST, **CLOSED | {"sent_bytes": 20 << 20}),
    ),
    "people who watch three seconds of one stream after the other, and leave each paused": (
        "ok",
        "192.0.2.121",
        lambda a: ends_apart(
            a, "stuck", 40, **NEVER_READ, **CLOSED | {"sent_bytes": 1_200_000, "acked_bytes": 940_000}
        ),
    ),
    "people who pause within three seconds of a stream of 300 kbit/s": (
        "ok",
        "192.0.2.127",
        lambda a: ends_apart(
            a, "stuck", 20, **DEAF | {"duration_s": 23.0}, **CLOSED | {"sent_bytes": 400_000, "acked_bytes": 178_000}
        ),
    ),
    "who pauses a small stream after a quarter of a minute, sixty times in an hour": (
        "limit",
        "192.0.2.128",
        lambda a: ends_apart(
            a, "stuck", 60, **DEAF_AT_LAST, **CLOSED | {"sent_bytes": 450_000, "acked_bytes": 250_000}
        ),
    ),
    "people who pause soon, and whose players say each quarter of a megabyte": (
        "ok",
        "192.0.2.126",
        lambda a: ends_apart(a, "stuck", 40, **NEVER_READ, **CLOSED, acked_bytes=330_000, read_bytes=250_100),
    ),
    "one who pauses after half a minute, and whose player says that it had read": (
        "ok",
        "192.0.2.122",
        lambda a: ends_apart(a, "stuck", 40, **DEAF_AT_LAST, **CLOSED, acked_bytes=8 << 20, read_bytes=6_250_000),
    ),
    "people who wait for a show, beside one who attacks": (
        "shared",
        "192.0.2.119",
        lambda a: viewers(a, 150, NOW_S - 100, startup_ms=None) + attack(a),
    ),
    "people who waited for it until they were ended, as their server was": (
        "shared",
        "192.0.2.120",
        lambda a: [
            *ends(a, "limit hit", 15, NOW_S - 30, limit_name="player_wait_s", **WAITED),
            *[closed(a, "shutdown", NOW_S, conn_id=n, **WAITED) for n in range(20, 35)],
            *attack(a),
        ],
    ),
    # abusers that evade
    "one whose kernel holds megabytes that it does not read": (
        "ban",
        "192.0.2.118",
        lambda a: ends_apart(a, "stuck", 12, **DEAF | {"duration_s": 45.7}, **CLOSED, acked_bytes=8 << 20),
    ),
    "one that says it has read what its kernel has not got": (
        "ban",
        "192.0.2.123",
        lambda a: ends_apart(a, "stuck", 12, **NEVER_READ, **CLOSED, acked_bytes=60_000, read_bytes=2_500_000),
    ),
    "one that reads nothing, and stands still within two seconds": (
        "ban",
        "192.0.2.129",
        lambda a: ends_apart(
            a, "stuck", 12, **DEAF | {"duration_s": 21.9}, **CLOSED | {"sent_bytes": 300_000, "acked_bytes": 65_536}
        ),
    ),
    "one that says it has read a byte, and has read none": (
        "ban",
        "192.0.2.125",
        lambda a: ends_apart(a, "stuck", 12, **NEVER_READ, **CLOSED, acked_bytes=40_000, read_bytes=1),
    ),
    "one that reads nothing, behind the usual window": (
        "ban",
        "192.0.2.124",
        lambda a: ends_apart(a, "stuck", 12, **NEVER_READ, **CLOSED | {"sent_bytes": 300_000, "acked_bytes": 65_536}),
    ),
    "beside what was cut at once": (
        "ban",
        "192.0.2.100",
        lambda a: (
            ends_apart(a, "hard limit", 40, **CUT_AT_ONCE | {"duration_s": 60.0 * 9, "startup_ms": 6e5}) + attack(a)
        ),
    ),
    "who waits for streams that nobody publishes": (
        "ban",
        "192.0.2.101",
        lambda a: ends(a, "peer closed", 60, **WAITED) + viewers(a, 5, NOW_S - 300, startup_ms=None) + attack(a),
    ),
    "who tries wrong keys, each for a while": (
        "ban",
        "192.0.2.102",
        lambda a: ends(a, "auth refused", 60, role="publish", **WAITED) + attack(a),
    ),
    "who waits, and reads nothing when it begins": (
        "ban",
        "192.0.2.103",
        lambda a: ends_apart(a, "stuck", 12, duration_s=321.0, startup_ms=300_000.0, **DEAF),
    ),
    "who waits for long, and watches for a moment": (
        "ban",
        "192.0.2.104",
        lambda a: ends(a, "peer closed", 9, duration_s=3600.0, startup_ms=3_590_000.0) + attack(a),
    ),
    "one that reads for a while and then stops": (
        "ban",
        "192.0.2.91",
        lambda a: ends_apart(a, "stuck", 12, **DEAF_AT_LAST),
    ),
    "one that reads a byte now and then": (
        "ban",
        "192.0.2.92",
        lambda a: ends_apart(a, "stuck", 12, duration_s=21.0, unrecovered_ms=20_000.0, unrecovered_bytes=500),
    ),
    "one that changes name and agent": (
        "ban",
        "192.0.2.93",
        lambda a: [
            row
            for n, axis in enumerate(("pending_output_bytes", "paused_input_bytes"))
            for row in hits(a, axis, 1, NOW_S, stream=f"name-{n}", node=f"node-{n}")
        ],
    ),
    "one that changes host in its /64": (
        "ban",
        "2001:db8:c:3::/64",
        lambda _: [row for n in range(12) for row in ends_apart(f"2001:db8:c:3:{n:x}::1", "stuck", 1, **NEVER_READ)],
    ),
    "one whose clock is ahead": (
        "ban",
        "192.0.2.94",
        lambda a: hits(a, "amf_depth", 1, NOW_S + 900, node="node-ahead"),
    ),
    "one of the day before yesterday": ("ok", "192.0.2.95", lambda a: hits(a, "amf_depth", 1, NOW_S - 2 * 86_400)),
    # who is never touched
    "a balancer of a cloud": ("allowed", "100.64.3.4", attack),
    # an IPv4 address within an IPv6 one is that one, and its neighbours behind the translator are others
    "one behind a translator": ("ban", "192.0.2.110", lambda _: attack("64:ff9b::c000:26e")),
    "one behind a tunnel": ("ban", "192.0.2.111", lambda _: attack("2001:0:c000:20f:0:1:3fff:fd90")),
}
"""More of these, with evidence of more than a minute or another clock."""
TRUTH = WORLD | OF_HOURS


ODD = [
    closed("192.0.2.53", "peer closed", NOW_S, duration_s=-5.0),
    event("192.0.2.53", "conn_refused", NOW_S, reason="new_per_address_and_s", count=10**14),
    event(None, "limit_hit", NOW_S, axis="amf_depth"),
    event("", "limit_hit", NOW_S, axis="amf_depth"),
    event("192.0.2.54", "limit_hit", NOW_S),
]
ALLOWED = {"192.0.2.57": "192.0.2.57", "198.51.101.0/24": "198.51.101.15", "192.0.2.64/29": "192.0.2.71"}
"""A network of the allow list, and who attacks from there."""
BESIDE = [
    *hits("192.0.2.50", "chunk_size_min_bytes", 1, NOW_S),
    *(closed("192.0.2.51", "hard limit", BEGIN_S + n, **SLOW) for n in range(200)),
    *ends_apart("192.0.2.52", "hard limit", 12, **DEAF_AT_LAST),
    *ODD,
    *(row for address in ALLOWED.values() for row in hits(address, "amf_depth", 9, NOW_S)),
    *hits("192.0.2.55", "amf_depth", 9, NOW_S),
    *hits("192.0.2.56", "amf_depth", 9, NOW_S),
    *hits("192.0.2.56", "x" * 300, 1, NOW_S),
    *hits("192.0.2.56", "a\nb", 9, NOW_S),
    *(row for n in range(90) for row in hits("192.0.2.56", f"of_the_future_{n}", 1, NOW_S)),
    # three subnets with ten of ten that are abusive; in the last one a viewer
    *(
        row
        for subnet in ("198.51.100", "203.0.112", "203.0.113")
        for n in range(1, 11)
        for row in hits(f"{subnet}.{n}", "amf_depth", 1, NOW_S)
    ),
    closed("203.0.113.77", "peer closed", NOW_S),
    # one home, with ten /64s of its /56
    *(row for n in range(10) for row in hits(f"2001:db8:d:1{n:02x}::1", "amf_depth", 1, NOW_S)),
]
"""Planted for the tests that name these addresses."""


@pytest.fixture(scope="module")
def world(either, tmp_path_factory):
    """Judge all of `TRUTH` and `BESIDE` at once: a run takes long, more rows do not."""
    rows = [row for _, address, make in TRUTH.values() for row in make(address)] + BESIDE
    allow = tuple(parse_networks(["192.0.2.40", "203.0.112.200", *ALLOWED], "--allow"))
    scores, bans, result = judge(either, tmp_path_factory.mktemp("world"), rows, allow=allow)
    return scores, bans, result


def listed(bans, prefix):
    return [ban.cidr for ban in bans.bans if ban.cidr.startswith(prefix)]


@pytest.mark.parametrize("who", TRUTH)
def test_abuse_when_the_truth_is_known_says_it(world, who):
    scores, bans, _ = world
    expected, address, _ = TRUTH[who]
    row = scores[address]
    assert (row["verdict"], row["banned"]) == (expected, expected == "ban")
    action = {"ban": "ban", "shared": "limit", "limit": "limit"}.get(expected)
    assert row["action"] == action
    cidr = address if address.endswith("/64") else f"{address}/32"
    assert [ban.action.value for ban in bans.bans if ban.cidr == cidr] == ([] if action is None else [action])


def test_abuse_when_an_address_is_shared_caps_each_kind_and_says_so(world):
    scores, bans, result = world
    row = scores["192.0.2.2"]
    assert (row["people"], row["points"]) == (30, 10.0 * len(PROOFS))
    assert bans.match("192.0.2.2", NOW_S).reason.startswith("shared: limit_hit.")
    assert bans.match("192.0.2.22", NOW_S).reason == "limited: fruitless_connection"
    limits = sum(ban.action is BanAction.LIMIT for ban in bans.bans)
    assert (result.summary["bans"], result.summary["limits"]) == (len(bans) - limits, limits)


def test_abuse_when_a_proof_is_seen_bans_the_address_with_its_evidence(world):
    _, bans, _ = world
    [ban] = (ban for ban in bans.bans if ban.cidr == "192.0.2.50/32")
    assert (ban.score, dict(ban.evidence)) == (PROOF, {"limit_hit.chunk_size_min_bytes": 1})
    assert ban.expires.timestamp() == NOW_S + 3600 * PROOF / 10


def test_abuse_when_a_slow_viewer_is_cut_again_and_again_does_not_ban_it(world):
    scores, bans, _ = world
    assert (scores["192.0.2.51"]["score"], bans.match("192.0.2.51", NOW_S)) == (0.0, None)
    assert "slow_close" in json.loads(scores["192.0.2.51"]["evidence"])


def test_abuse_when_a_viewer_reads_nothing_again_and_again_bans_it(world):
    scores, bans, _ = world
    assert scores["192.0.2.52"]["points"] == pytest.approx(12.0, rel=0.01)
    assert bans.match("192.0.2.52", NOW_S)


def test_abuse_when_no_time_is_told_ages_evidence_to_now_and_judges_private_networks_if_told(either, tmp_path):
    rows = hits("192.0.2.72", "amf_depth", 3, time.time() - 7 * 86_400) + attack("10.0.0.9", time.time() - 7 * 86_400)
    scores, bans, result = judge(either, tmp_path, rows, now_s=None, private=True, weights=Weights(threshold=5.0))
    assert scores["192.0.2.72"]["points"] == pytest.approx(36 / 2**7, rel=0.01)
    assert [ban.cidr for ban in bans.bans] == ["10.0.0.9/32"]
    assert "the records end 7.0 days ago" in result.warnings[0]


def test_abuse_when_a_window_is_short_knows_who_behaved_before_it(either, tmp_path):
    write(tmp_path / "events", ends("192.0.2.90", "peer_closed", 20, NOW_S - 3 * 3600, duration_s=3000.0))
    write(tmp_path / "events", attack("192.0.2.92", NOW_S - 3 * 3600), "early")
    write(tmp_path / "events", [*attack("192.0.2.90"), *attack("192.0.2.91")], "late")
    options, verdicts = {"abuse": AbuseOptions(now_s=NOW_S)}, []
    for out, window in (("out", None), ("out", Window(at(NOW_S), None)), ("first", Window(at(NOW_S), None))):
        result = run(either, str(tmp_path / "events"), str(tmp_path / out), [JOB], options, window)
        assert not result.failed
        scores = either.read.parquet(str(tmp_path / out / "abuse_scores")).collect()
        told = (row for row in scores if row["kind"] == "address")
        verdicts.append({row["address"]: (row["verdict"], row["connections"]) for row in told})
    assert verdicts[0] == {"192.0.2.90": ("shared", 20), "192.0.2.91": ("ban", 0), "192.0.2.92": ("ban", 0)}
    assert verdicts[1] == verdicts[2] == {"192.0.2.90": ("shared", 0), "192.0.2.91": ("ban", 0)}


@pytest.fixture(scope="module")
def short(either, tmp_path_factory):
    """Judge with a half-life of an hour, for a list of two bans; what is an hour old is of 192.0.2.14 alone."""
    rows = hits("192.0.2.14", "amf_depth", 1)
    rows += [row for n in range(1, 7) for row in hits(f"192.0.2.{n}", "amf_depth", n, NOW_S, 0)]
    options = {"weights": Weights(half_life_s=3600), "most_bans": 2}
    return judge(either, tmp_path_factory.mktemp("short"), rows, **options)


def test_abuse_when_evidence_is_a_half_life_old_counts_it_half(short):
    """Evidence decays, so that an address is forgiven with time."""
    scores, _, _ = short
    assert scores["192.0.2.14"]["score"] == PROOF / 2
    assert scores["192.0.2.14"]["action"] is None


def test_abuse_when_there_are_more_than_fit_keeps_the_worst_and_says_so(short):
    _, bans, result = short
    assert {ban.cidr for ban in bans.bans} == {"192.0.2.5/32", "192.0.2.6/32"}
    assert result.summary["bans_left_out"] == 4


@pytest.mark.parametrize("allowed", ALLOWED)
def test_abuse_when_an_address_is_allowed_never_bans_it(world, allowed):
    scores, bans, result = world
    address = ALLOWED[allowed]
    assert "--judge-private judges them as any other" in result.warnings[0]
    assert (scores[address]["verdict"], bans.match(address, NOW_S)) == ("allowed", None)


def test_abuse_when_most_of_a_subnet_is_abusive_bans_it_as_one_if_nobody_honest_is_there(world):
    scores, bans, result = world
    assert bans.match("198.51.100.77", NOW_S)
    assert not bans.match("203.0.113.77", NOW_S)
    assert listed(bans, "198.51.100.") == ["198.51.100.0/24"]
    assert len(listed(bans, "203.0.113.")) == 10
    assert result.summary["verdicts"]["address_subnet_ban"] == 20, "ten of this one, and ten of a home"
    assert scores["198.51.100.0/24"]["addresses"] == 10
    inside = [row for row in scores.values() if row["subnet"] == "198.51.100.0/24" and row["kind"] == "address"]
    worst = max(row["score"] for row in inside)
    [ban] = (ban for ban in bans.bans if ban.cidr == "198.51.100.0/24")
    assert (ban.score, ban.expires.timestamp()) == (worst, NOW_S + 360 * worst), "as long as that of its worst address"


def test_abuse_when_a_home_has_many_64s_leaves_the_homes_beside_it_alone(world):
    _, bans, _ = world
    assert listed(bans, "2001:db8:d:") == ["2001:db8:d:100::/60"]
    assert bans.match("2001:db8:d:10f::1", NOW_S)
    assert not bans.match("2001:db8:d:200::1", NOW_S)


def test_abuse_when_a_subnet_holds_an_allowed_address_bans_its_addresses_only(world):
    _, bans, _ = world
    assert (len(listed(bans, "203.0.112.")), bans.match("203.0.112.200", NOW_S)) == (10, None)


def test_abuse_when_a_record_is_odd_goes_on(world):
    scores, _, _ = world
    assert {row["peer_ip"] for _, row in ODD} & set(scores) == {"192.0.2.53", "192.0.2.54"}


def test_abuse_when_records_have_absurd_words_bans_all_the_same(world):
    scores, bans, result = world
    ban = bans.match("192.0.2.56", NOW_S)
    assert (scores["192.0.2.56"]["verdict"], ban.reason) == ("ban", "limit_hit.amf_depth")
    assert {"limit_hit.a_b", "limit_hit.of_the_future_0"} <= set(ban.evidence)
    assert len(ban.evidence) == MOST_EVIDENCE
    assert f"limit_hit.{'x' * 80}" in json.loads(scores["192.0.2.56"]["evidence"])
    assert result.summary["bans_invalid"] == 0


@pytest.mark.parametrize(("heard_s", "verdict"), [(NOW_S - 1200, "shared"), (NOW_S, "ban")])
def test_abuse_when_a_node_is_heard_of_by_any_record_regards_no_viewer_whose_rows_had_ended(
    either, tmp_path, heard_s, verdict
):
    """That rows were lost is no evidence, but it tells that the node was there, and wrote none of the viewer."""
    rows = [*there("192.0.2.1", NOW_S - 1500, NOW_S - 1200), *attack("192.0.2.1", NOW_S - 1300)]
    said = event(None, "overflow", heard_s, conn_id=0)
    other = event(None, "server_started", NOW_S, node="node-2", conn_id=0)
    write(tmp_path / "events", [other], "node-2-1-1")
    scores, _, _ = judge(either, tmp_path, [*rows, said])
    assert scores["192.0.2.1"]["verdict"] == verdict


def test_abuse_when_no_ban_can_be_made_of_an_address_bans_the_others():
    rows = [{"cidr": cidr, "verdict": "ban", "score": 12.0, "evidence": "{}"} for cidr in ("0.0.0.0/1", "192.0.2.1/32")]
    assert [ban.cidr for ban in job._bans(rows, Weights(), NOW_S)] == ["192.0.2.1/32"]


def test_abuse_when_rows_come_in_another_order_scores_the_same(either, tmp_path):
    rows = [row for n in range(1, 30) for row in hits(f"192.0.2.{n % 7 + 1}", "handshake_time_s", 1, BEGIN_S + n * 7)]
    rows += [closed(f"192.0.2.{n % 7 + 1}", "handshake timeout", BEGIN_S + n / 3) for n in range(90)]
    first, _, _ = judge(either, tmp_path / "one", rows)
    for number in range(3):
        write(tmp_path / "two" / "events", rows[::-1][number::3], f"node-1-1-{number + 2}")
    second, _, _ = judge(either, tmp_path / "two", [event(None, "limit_hit")])
    assert {key: row.asDict() for key, row in first.items()} == {key: row.asDict() for key, row in second.items()}


def test_abuse_when_the_list_would_be_too_long_is_refused():
    with pytest.raises(ConfigError, match="--max-bans"):
        AbuseOptions(most_bans=1_000_000)


def test_networks_when_wrong_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7/24"):
        parse_networks(["192.0.2.7/24"], "--allow")


def test_abuse_when_text_looks_like_an_address_takes_what_python_takes(either):
    whole = ["1.2.3.4", "255.255.255.255", "0.0.0.9", "::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "A::b"]
    odd = [
        "256.1.1.1",
        "01.2.3.4",
        "1.2.3",
        "1:2:3",
        "1::2::3",
        ":::",
        "1:2:3:4:5:6:7:8:9",
        ":1:2:3:4:5:6:7:8",
        "1:2:",
        "",
    ]
    odd += ["1:2:3:4:5:6:7::8", "1:2:3:4:5:6:7:", "12345::", "g::", "1.2.3.4\n", "::1\n"]
    frame = either.createDataFrame([(text,) for text in whole + odd], "peer_ip string")
    rows = addresses.with_unit(frame).collect()
    assert {row["peer_ip"] for row in rows if row["subnet"] is not None} == set(whole)
    for text in whole:
        assert ipaddress.ip_address(text)
    for text in odd:
        with pytest.raises(ValueError, match=r".*"):
            ipaddress.ip_address(text)


def test_unit_when_of_a_column_is_what_servers_count_as_one_address(either):
    made = [
        "203.0.113.5",
        "2001:db8:1:2::3",
        "::ffff:203.0.113.5",
        "::ffff:0:cb00:7105",
        "64:ff9b::cb00:7105",
        "64:ff9b:1::cb00:7105",
        "2002:cb00:7105:9::1",
        "2001:0:4136:e378:8000:63bf:34ff:8efa",
        "2001:1::cb00:7105",
        "::1",
        "0:0:0:10::1",
        "h:0123456789abcdef",
    ]
    frame = addresses.with_unit(either.createDataFrame([(text,) for text in made], "peer_ip string"))
    assert frame.columns == ["peer_ip", "address", "subnet"]
    rows = frame.collect()
    assert {row["peer_ip"]: row["address"] for row in rows} == {text: address_key(text) for text in made}
    places = {row["peer_ip"]: row["subnet"] for row in rows}
    assert (places["64:ff9b::cb00:7105"], places["::1"]) == ("203.0.113.0/24", "::/48")
    bans = BanList([Ban(cidr="203.0.113.5/32", expires=None)])
    assert sum(bans.match(text, NOW_S) is not None for text in made) == 6


@pytest.mark.parametrize("replace", [False, True])
def test_abuse_when_there_is_a_ban_list_keeps_its_bans_unless_told_otherwise(replace):
    there = render([Ban(cidr="203.0.113.9/32", expires=at(NOW_S + 60)), Ban(cidr="203.0.113.8/32", expires=at(NOW_S))])
    made = render([Ban(cidr="192.0.2.7/32", expires=at(NOW_S + 600))])
    options = AbuseOptions(now_s=NOW_S, replace_bans=replace)
    kept = set() if replace else {"203.0.113.9/32"}
    assert {ban.cidr for ban in BanList.parse(merge_lists(there, made, options)).bans} == {"192.0.2.7/32"} | kept
    if replace:
        assert merge_lists("{broken", made, options) == made
        return
    with pytest.raises(ConfigError, match="not replaced") as caught:
        merge_lists("{broken", made, options)
    assert "--replace-bans" in caught.value.hint


def test_abuse_when_worlds_are_planted_finds_the_abusers_and_bans_nobody_honest(spark, tmp_path):
    worlds = ("attackers", "nat", "proxy", "health", "commuters", "neighbours")
    options = SynthOptions(events=20_000, days=0.2, worlds=worlds)
    make(spark, str(tmp_path / "events"), options)
    end_s = options.start_s + options.days * 86_400
    _, bans, note = judge(spark, tmp_path, [], now_s=end_s, private=True)
    truth = found(spark, str(tmp_path / "out" / "abuse_scores"), str(tmp_path / "events"))
    scores = read_table(tmp_path / "out" / "abuse_scores")
    shutil.rmtree(tmp_path / "out")
    with using(DUCKDB), session() as database:
        _, same_bans, same_note = judge(database, tmp_path, [], now_s=end_s, private=True)
    same = read_table(tmp_path / "out" / "abuse_scores")
    assert sorted(map(repr, same.to_pylist())) == sorted(map(repr, scores.to_pylist()))
    assert (same_bans.bans, same_note.summary) == (bans.bans, note.summary)
    assert truth["abusive_addresses"] > 20
    assert truth["alone_found"] == truth["alone"], truth
    assert truth["found"] == truth["abusive_addresses"], truth
    assert truth["honest_banned"] == 0, truth
