"""Abuse scores: what is evidence and what is not, standing, decay, subnets, allow lists and the ban list."""

from __future__ import annotations

import ipaddress
import json

import pytest
from abuse_kit import BEGIN_S, at, closed, event, hits, write
from pyspark.sql import functions as f

from flowctl.bans import Ban, BanList, render
from flowctl.errors import ConfigError
from flowctl.pipeline import addresses
from flowctl.pipeline.abuse import AbuseOptions, run
from flowctl.pipeline.addresses import parse_networks
from flowctl.pipeline.weights import PROOF, Weights

pytestmark = pytest.mark.timeout(900)  # starting Java on a machine that does much else takes minutes
NOW_S = BEGIN_S + 3600
HOUR = {"connected_s": 3600.0}


def judge(spark, tmp_path, rows, **given):
    """Return the scores by address and the ban list."""
    write(tmp_path / "events", rows)
    options = AbuseOptions(**{"now_s": NOW_S, **given})
    result = run(spark, str(tmp_path / "events"), str(tmp_path / "out"), options)
    result.check()
    scores = {row["address"]: row for row in spark.read.parquet(result.outputs["abuse_scores"]).collect()}
    bans = BanList.parse((tmp_path / "out" / "bans.jsonl").read_text())
    return scores, bans, result


def test_abuse_when_a_proof_is_seen_bans_the_address_with_its_evidence(spark, tmp_path):
    """One limit hit that no sound client makes is enough, and the ban says which it was."""
    _, bans, _ = judge(spark, tmp_path, hits("192.0.2.7", "chunk_size_min_bytes", 1, NOW_S))
    [ban] = bans.bans
    assert (ban.cidr, ban.score, dict(ban.evidence)) == ("192.0.2.7/32", PROOF, {"limit_hit.chunk_size_min_bytes": 1})
    assert ban.expires.timestamp() == NOW_S + 3600 * PROOF / 10


def test_abuse_when_a_slow_viewer_is_cut_again_and_again_does_not_ban_it(spark, tmp_path):
    """Hard-limit closes of a viewer that drained all the time are counted and weigh nothing."""
    rows = [
        closed("192.0.2.8", "hard limit", BEGIN_S + n, trouble_s=20.0, trouble_sent_bytes=900_000) for n in range(200)
    ]
    scores, bans, _ = judge(spark, tmp_path, rows)
    assert (scores["192.0.2.8"]["score"], len(bans)) == (0.0, 0)
    assert "slow_close" in json.loads(scores["192.0.2.8"]["evidence"])


def test_abuse_when_a_viewer_reads_nothing_again_and_again_bans_it(spark, tmp_path):
    """The same closes of a peer that took nothing are abuse."""
    rows = [closed("192.0.2.9", "hard limit", NOW_S, trouble_s=20.0, trouble_sent_bytes=0) for _ in range(12)]
    scores, bans, _ = judge(spark, tmp_path, rows)
    assert scores["192.0.2.9"]["score"] == 12.0
    assert bans.match("192.0.2.9", NOW_S)


def test_abuse_when_hundreds_share_an_address_does_not_ban_it(spark, tmp_path):
    """Accidents of many honest viewers are divided by the hours in which they behaved."""
    rows = [closed("192.0.2.10", "peer closed", NOW_S, **HOUR) for _ in range(300)]
    rows += [closed("192.0.2.10", "handshake timeout", NOW_S, role="unknown") for _ in range(40)]
    scores, bans, _ = judge(spark, tmp_path, rows)
    row = scores["192.0.2.10"]
    assert (row["points"], row["standing_hours"], row["verdict"]) == (120.0, 300.0, "shared")
    assert len(bans) == 0


def test_abuse_when_a_crowd_comes_back_from_one_address_at_once_does_not_ban_it(spark, tmp_path):
    """Plays that have just begun stand for their viewers: refusals of a crowd's return are no reason."""
    rows = [event("192.0.2.11", "play_started", NOW_S, role="play") for _ in range(300)]
    rows += [
        event("192.0.2.11", "conn_refused", NOW_S, reason="new_per_address_and_s", detail={"count": 100})
        for _ in range(30)
    ]
    scores, bans, _ = judge(spark, tmp_path, rows)
    assert (scores["192.0.2.11"]["points"], len(bans)) == (30.0, 0)


def test_abuse_when_connections_are_only_opened_and_left_bans_the_flood(spark, tmp_path):
    """A storm of connections that never play is abuse, and a single one is nothing."""
    rows = [closed("192.0.2.12", "peer closed", NOW_S, role="unknown", connected_s=0.1) for _ in range(100)]
    rows += [closed("192.0.2.13", "peer closed", NOW_S, role="unknown", connected_s=0.1)]
    scores, bans, _ = judge(spark, tmp_path, rows)
    assert (scores["192.0.2.12"]["verdict"], scores["192.0.2.13"]["verdict"], len(bans)) == ("ban", "ok", 1)


def test_abuse_when_evidence_is_a_half_life_old_counts_it_half(spark, tmp_path):
    """Evidence decays, so that an address is forgiven with time."""
    weights = Weights(half_life_s=3600)
    scores, bans, _ = judge(spark, tmp_path, hits("192.0.2.14", "amf_depth", 1), weights=weights)
    assert (scores["192.0.2.14"]["score"], len(bans)) == (PROOF / 2, 0)


@pytest.mark.parametrize("allowed", ["192.0.2.15", "192.0.2.0/24", "192.0.2.8/29"])
def test_abuse_when_an_address_is_allowed_never_bans_it(spark, tmp_path, allowed):
    """Who is on the allow list is scored and not banned, whatever the prefix length."""
    allow = tuple(parse_networks([allowed], "--allow"))
    scores, bans, _ = judge(spark, tmp_path, hits("192.0.2.15", "amf_depth", 9), allow=allow)
    assert (scores["192.0.2.15"]["verdict"], len(bans)) == ("allowed", 0)


@pytest.mark.parametrize(
    "address", ["h:00ff00ff00ff00ff", "192.0.2.0", "2001:db8:1::", "somebody", "1.2.3", "300.1.1.1", "1.2.3.04"]
)
def test_abuse_when_no_whole_address_was_recorded_bans_nobody(spark, tmp_path, address):
    """A hash or a cut address is scored, and nothing is banned for it."""
    scores, bans, _ = judge(spark, tmp_path, hits(address, "amf_depth", 9))
    assert (scores[address]["verdict"], len(bans)) == ("no_address", 0)


def test_abuse_when_most_of_a_subnet_is_abusive_bans_it_as_one(spark, tmp_path):
    """Ten abusive addresses of ten are one ban of their /24; a neighbour network with one honest half is not."""
    rows = [row for n in range(1, 11) for row in hits(f"198.51.100.{n}", "amf_depth", 1, NOW_S)]
    rows += [row for n in range(1, 11) for row in hits(f"203.0.113.{n}", "amf_depth", 1, NOW_S)]
    rows += [closed(f"203.0.113.{n}", "peer closed", NOW_S) for n in range(11, 21)]
    scores, bans, result = judge(spark, tmp_path, rows)
    assert bans.match("198.51.100.77", NOW_S)
    assert not bans.match("203.0.113.15", NOW_S)
    assert (len(bans), result.summary["verdicts"]["address_subnet_ban"]) == (11, 10)
    assert scores["198.51.100.0/24"]["addresses"] == 10


def test_abuse_when_a_subnet_holds_an_allowed_address_bans_its_addresses_only(spark, tmp_path):
    """No network is banned that contains one of the allow list, even one that was not seen."""
    rows = [row for n in range(1, 11) for row in hits(f"198.51.100.{n}", "amf_depth", 1, NOW_S)]
    allow = tuple(parse_networks(["198.51.100.200"], "--allow"))
    _, bans, _ = judge(spark, tmp_path, rows, allow=allow)
    assert (len(bans), bans.match("198.51.100.200", NOW_S)) == (10, None)


def test_abuse_when_there_are_more_than_fit_keeps_the_worst_and_says_so(spark, tmp_path):
    """The ban list is cut at its length, the highest scores first, and the rest is counted."""
    rows = [row for n in range(1, 7) for row in hits(f"192.0.2.{n}", "amf_depth", n, NOW_S, 0)]
    _, bans, result = judge(spark, tmp_path, rows, most_bans=2)
    assert {ban.cidr for ban in bans.bans} == {"192.0.2.5/32", "192.0.2.6/32"}
    assert result.summary["bans_left_out"] == 4


def test_abuse_when_addresses_are_ipv6_finds_their_network(spark, tmp_path):
    """IPv6 addresses are banned one by one, and their subnet is the /48, however they are written."""
    written = ["2001:db8:a:1::5", "2001:db8:a::9", "2001:db8:a:ffff:1:2:3:4"]
    scores, bans, _ = judge(spark, tmp_path, [row for item in written for row in hits(item, "amf_depth", 1, NOW_S)])
    assert {scores[item]["subnet"] for item in written} == {"2001:db8:a::/48"}
    assert {ban.cidr for ban in bans.bans} == {f"{ipaddress.ip_address(item)}/128" for item in written}


def test_abuse_when_a_record_is_odd_goes_on(spark, tmp_path):
    """Details that are no JSON, absurd counts, and rows without an address change nothing for others."""
    rows = [event("192.0.2.20", "conn_closed", NOW_S, reason="peer closed", role="play") | {"detail": "{not json"}]
    rows += [event("192.0.2.20", "conn_refused", NOW_S, reason="new_per_address_and_s", detail={"count": 10**18})]
    rows += [event(None, "limit_hit", NOW_S, axis="amf_depth"), event("", "limit_hit", NOW_S, axis="amf_depth")]
    rows += [event("192.0.2.21", "limit_hit", NOW_S)]
    scores, _, result = judge(spark, tmp_path, rows)
    assert set(scores) - {"192.0.2.0/24"} == {"192.0.2.20", "192.0.2.21"}
    assert result.accounts[0].rows_out == len(rows)


def test_abuse_when_rows_come_in_another_order_scores_the_same(spark, tmp_path):
    """Sums are of whole numbers: cut into other files in another order, the table is the same to the last digit."""
    rows = [row for n in range(1, 30) for row in hits(f"192.0.2.{n % 7 + 1}", "handshake_time_s", 1, BEGIN_S + n * 7)]
    rows += [closed(f"192.0.2.{n % 7 + 1}", "handshake timeout", BEGIN_S + n / 3) for n in range(90)]
    first, _, _ = judge(spark, tmp_path / "one", rows)
    for number in range(3):
        write(tmp_path / "two" / "events", rows[::-1][number::3], f"node-1-1-{number + 2}")
    second, _, _ = judge(spark, tmp_path / "two", [rows[0] | {"peer_ip": None}])
    assert {key: row.asDict() for key, row in first.items()} == {key: row.asDict() for key, row in second.items()}


def test_abuse_when_the_list_would_be_too_long_is_refused():
    """A ban list longer than a server takes is an error before any work."""
    with pytest.raises(ConfigError, match="--max-bans"):
        AbuseOptions(most_bans=1_000_000)


def test_networks_when_wrong_are_refused_by_name():
    """An allow list with something else in it is an error that names it."""
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7/24"):
        parse_networks(["192.0.2.7/24"], "--allow")


def test_abuse_when_text_looks_like_an_address_takes_what_python_takes(spark):
    """What has digits here is an address to the ban list, and the other way round."""
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
    odd += ["1:2:3:4:5:6:7::8", "1:2:3:4:5:6:7:", "12345::", "g::"]
    frame = spark.createDataFrame([(text,) for text in whole + odd], "address string")
    rows = frame.select("address", addresses.digits(f.col("address")).alias("digits")).collect()
    assert {row["address"] for row in rows if row["digits"] is not None} == set(whole)
    for text in whole:
        assert ipaddress.ip_address(text)
    for text in odd:
        with pytest.raises(ValueError, match=r".*"):
            ipaddress.ip_address(text)


def test_abuse_when_no_ban_can_be_made_of_an_address_counts_it_and_bans_the_others(spark, tmp_path):
    """A record with absurd words costs its own ban, not those of all."""
    rows = hits("192.0.2.7", "amf_depth", 9, NOW_S) + hits("192.0.2.8", "amf_depth", 9, NOW_S)
    rows += hits("192.0.2.8", "x" * 300, 1, NOW_S)
    _, bans, result = judge(spark, tmp_path, rows)
    assert [ban.cidr for ban in bans.bans] == ["192.0.2.7/32"]
    assert (result.summary["bans"], result.summary["bans_invalid"]) == (1, 1)


@pytest.mark.parametrize("replace", [False, True])
def test_abuse_when_there_is_a_ban_list_keeps_its_bans_unless_told_otherwise(spark, tmp_path, replace):
    """Bans of others that last stay on the list; with --replace-bans the list begins anew."""
    (tmp_path / "out").mkdir()
    old = [Ban(cidr="203.0.113.9/32", expires=at(NOW_S + 60)), Ban(cidr="203.0.113.8/32", expires=at(NOW_S))]
    (tmp_path / "out/bans.jsonl").write_text(render(old))
    _, bans, result = judge(spark, tmp_path, hits("192.0.2.7", "amf_depth", 9, NOW_S), replace_bans=replace)
    kept = set() if replace else {"203.0.113.9/32"}
    assert {ban.cidr for ban in bans.bans} == {"192.0.2.7/32"} | kept
    assert result.summary["bans_kept"] == len(kept)
