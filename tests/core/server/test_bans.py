"""The ban list: who is matched and until when, checked against the standard library, and what a file may hold."""

from __future__ import annotations

import ipaddress
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.server import bans as bans_module
from flowctl.core.server.bans import (
    NO_BANS,
    Ban,
    BanAction,
    BanList,
    fitting,
    merge_bans,
    parse_lines,
    parse_utc,
    render,
    utc_text,
)
from flowctl.errors import ConfigError

NOW = 1_795_280_400


def when(seconds):
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


LATER = "2099-01-01T00:00:00Z"


def line(**changes):
    value = {"cidr": "203.0.113.7/32", "score": 12.5, "evidence": {"handshake_timeout": 3}, "expires": LATER}
    value |= changes
    return json.dumps({key: item for key, item in value.items() if item is not None})


# Few bits vary, so that networks overlap and addresses are hit.
v4 = st.integers(0, 255).map(lambda low: ipaddress.IPv4Address(0x7F000000 + low * 0x010101 % 0x1000000))
v6 = st.integers(0, 255).map(lambda low: ipaddress.IPv6Address((0x20010DB8 << 96) + (low << 60) + low))
addresses = v4 | v6


@st.composite
def networks(draw):
    address = draw(addresses)
    shortest, longest = (8, 32) if address.version == 4 else (16, 128)
    return ipaddress.ip_network(f"{address}/{draw(st.integers(shortest, longest))}", strict=False)


PRINTABLE = st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)
BANS = st.builds(
    Ban,
    cidr=networks().map(str),
    expires=(st.none() | st.integers(NOW - 50, NOW + 50) | st.integers(0, 253_402_300_799)).map(when),
    action=st.sampled_from(BanAction),
    reason=st.text("abc _.", max_size=20),
    score=st.floats(0, 1e9) | st.integers(0, 10**6),
    evidence=st.dictionaries(PRINTABLE, st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9), max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(BANS, max_size=20), st.lists(addresses, min_size=1, max_size=20), st.integers(NOW - 60, NOW + 60))
def test_match_when_asked_agrees_with_the_standard_library(bans, asked, now):
    found = BanList(bans)
    for address in asked:
        network = [ban for ban in bans if ban.network.version == address.version and address in ban.network]
        lasting = [ban for ban in network if ban.expires is None or now < ban.expires.timestamp()]
        ban = found.match(str(address), now)
        if not lasting:
            assert ban is None
        else:
            assert ban is not None
            strongest = [item for item in lasting if item.action is BanAction.BAN] or lasting
            assert ban.action is strongest[0].action
            assert max(item.network.prefixlen for item in strongest) == ban.network.prefixlen
            assert ban.lasts(now)
            assert address in ban.network


@settings(max_examples=200, deadline=None)
@given(st.lists(BANS, max_size=20))
def test_render_when_read_again_gives_the_same_list(bans):
    found = BanList(bans)
    again = BanList.parse(render(found.bans))
    assert again == found
    assert {(ban.cidr, ban.action) for ban in bans} == {(ban.cidr, ban.action) for ban in again.bans}
    for ban in again.bans:
        ends = [item.expires for item in bans if (item.cidr, item.action) == (ban.cidr, ban.action)]
        assert ban.expires == (None if None in ends else max(ends))


@settings(max_examples=100, deadline=None)
@given(v4, st.integers(8, 32))
def test_match_when_ipv4_is_written_as_ipv6_is_the_same_address(address, length):
    """A listener for both families reports IPv4 peers in IPv6 notation; a ban may be written so too."""
    cidr = str(ipaddress.ip_network(f"{address}/{length}", strict=False))
    mapped = f"::ffff:{cidr.partition('/')[0]}/{96 + length}"
    assert Ban(cidr=mapped, expires=None) == Ban(cidr=cidr, expires=None)
    found = BanList([Ban(cidr=cidr, expires=None)])
    assert found.match(f"::ffff:{address}", NOW) is not None
    assert found.match(ipaddress.IPv6Address(f"::ffff:{address}").exploded, NOW) is not None


@pytest.mark.parametrize("cidr", ["203.0.113.5/32", "203.0.113.0/24", "64:ff9b::cb00:7105/128", "64:ff9b::/96"])
def test_match_when_the_address_comes_through_nat64_is_found_by_either_form(cidr):
    """A ban of the IPv4 address keeps it out behind a translator too; so does one of the translated address."""
    found = BanList([Ban(cidr=cidr, expires=None)])
    assert found.match("64:ff9b::cb00:7105", NOW).cidr == cidr
    assert found.match("64:ff9b:1::cb00:7105", NOW) is None


def test_match_when_the_address_has_a_zone_or_is_none_does_not_fail():
    found = BanList([Ban(cidr="fe80::/16", expires=None), Ban(cidr="10.0.0.0/8", expires=None)])
    assert found.match("fe80::1%eth0", NOW) is not None
    for text in ("", "localhost", "10.0.0", "10.0.0.0.1", "a" * 1000, "\0", "1.2.3.4:80"):
        assert found.match(text, NOW) is None


def test_parse_when_lines_are_good_reads_them():
    text = "\n".join(
        [
            line(),
            "",
            line(cidr="2001:db8::/32", score=None, evidence=None, expires="2099-01-01T01:00:00.5+01:00") + "\r",
            '{"cidr": "10.1.2.3", "expires": null}',
        ]
    )
    found = BanList.parse(text)
    later = parse_utc(LATER)
    assert found == BanList(
        [
            Ban(cidr="203.0.113.7/32", expires=later, score=12.5, evidence={"handshake_timeout": 3}),
            Ban(cidr="2001:db8::/32", expires=later + timedelta(seconds=1)),
            Ban(cidr="10.1.2.3/32", expires=None),
        ]
    )
    assert len(found) == 3
    assert utc_text(later) == LATER
    assert len(NO_BANS) == 0


WRONG = [
    ("{", "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    ('{"cidr": ' + "9" * 5000 + "}", "not valid JSON"),
    ("[]", "it must be a JSON object"),
    ("null", "it must be a JSON object"),
    (line(cidr=None), "cidr is missing"),
    (line(expires=None), "expires is missing"),
    (line(why="x"), "unknown key 'why'"),
    (line(action="kill"), "action is 'kill', it must be ban or limit"),
    (line(action=["ban"]), "action is ['ban'], it must be ban or limit"),
    (line(reason="a\nb"), "reason is 'a\\nb'"),
    (line(reason="\x1b[2J"), "reason is"),
    (line(reason="x" * 201), "reason is 'xxx"),
    (line(reason=5), "reason is 5"),
    (line(cidr=7), "cidr is 7, it must be a text"),
    (line(cidr="example.com"), "cidr is 'example.com'"),
    (line(cidr="10.0.0.1/24"), "host bits set"),
    (line(cidr="10.0.0.0/33"), "cidr is '10.0.0.0/33'"),
    (line(cidr="0.0.0.0/0"), "the widest network that may be banned is /8"),
    (line(cidr="126.0.0.0/7"), "the widest network that may be banned is /8"),
    (line(cidr="::/0"), "the widest network that may be banned is /16"),
    (line(cidr="2000::/15"), "the widest network that may be banned is /16"),
    (line(cidr="::ffff:126.0.0.0/103"), "the widest network that may be banned is /8"),
    (line(expires=5), "expires is 5, it must be a text or null"),
    (line(expires="tomorrow"), "expires is 'tomorrow', it must be a time with its zone"),
    (line(expires="2099-01-01T00:00:00"), "it must be a time with its zone"),
    (line(expires="1969-01-01T00:00:00Z"), "it must be a time with its zone"),
    (line(score="high"), "score is 'high', it must be a number"),
    (line(score=-1), "score is -1"),
    (line(score=True), "score is True"),
    (line().replace("12.5", "NaN"), "score is nan"),
    (line().replace("12.5", "1e999"), "score is inf"),
    (line(score=10**30), "score is 1000"),
    (line(evidence=[1]), "evidence is [1], it must be an object"),
    (line(evidence={"a": "b"}), "evidence 'a' is 'b'"),
    (line(evidence={"a": {"b": 1}}), "evidence 'a' is {'b': 1}"),
    (line(evidence={"a\x1b": 1}), "evidence 'a\\x1b' is 1"),
    (line(evidence={"a" * 101: 1}), "evidence 'aaa"),
    (line(evidence={str(number): 1 for number in range(65)}), "evidence has 65 kinds"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=range(len(WRONG)))
def test_parse_when_one_line_is_wrong_refuses_the_whole_and_names_the_line(text, said):
    """No line is passed over in silence: the file is valid as a whole or not at all."""
    with pytest.raises(ConfigError) as caught:
        BanList.parse(f"{line()}\n\n{text}\n{line()}", "bans.jsonl")
    message = str(caught.value)
    assert message.startswith("bans.jsonl, line 3: ")
    assert said in message
    assert "\n" not in message
    assert len(message) < 300


def test_parse_when_there_are_too_many_refuses(monkeypatch):
    monkeypatch.setattr(bans_module, "MOST_BANS", 3)
    good = "\n".join(line(cidr=f"10.0.0.{number % 3}") for number in range(9))
    assert len(BanList.parse(good)) == 3
    with pytest.raises(ConfigError, match="line 10: there are more than 3 bans"):
        BanList.parse(good + "\n" + line(cidr="10.0.1.0/24"))


def test_parse_when_the_text_is_too_long_refuses(monkeypatch):
    monkeypatch.setattr(bans_module, "MOST_BYTES", 100)
    with pytest.raises(ConfigError, match="more than 100 characters"):
        BanList.parse(" " * 101, "bans.jsonl")


def test_parse_when_the_list_is_long_rests_in_between():
    """Who reads beside a server is given the chance to let it run, once per few lines."""
    rests = []
    BanList.parse("\n".join(line(cidr=f"10.0.{n // 250}.{n % 250}") for n in range(1000)), rest=lambda: rests.append(1))
    assert len(rests) == 1000 // 64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expires": NOW}, "expires is 1795280400, it must be a datetime with its zone"),
        ({"expires": datetime(2026, 1, 1)}, "expires is .* it must be a datetime with its zone"),  # noqa: DTZ001 - that
        ({"expires": datetime(1969, 1, 1, tzinfo=UTC)}, "expires is .* from 1970"),
        ({"action": "ban"}, "action is 'ban', it must be a BanAction"),
        ({"score": -1.0}, "score is"),
    ],
)
def test_ban_when_a_value_is_wrong_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        Ban(**({"cidr": "10.0.0.1", "expires": None} | changes))


def test_documents_when_they_show_a_ban_show_a_valid_one():
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "change-limits-and-bans.md").read_text("utf-8")
    examples = [line for line in re.findall(r"```json\n(.*?)```", text, re.DOTALL) if '"cidr"' in line]
    assert [len(BanList.parse(example)) for example in examples] == [2]


def test_lists_when_merged_keep_what_others_wrote_until_it_expires():
    there = [Ban(cidr="192.0.2.1/32", expires=when(NOW + 9), score=2.0), Ban(cidr="192.0.2.2/32", expires=when(NOW))]
    own = [Ban(cidr="192.0.2.1/32", expires=when(NOW + 5), score=3.0), Ban(cidr="192.0.2.3/32", expires=when(NOW + 1))]
    for first, second in ((there, own), (own, there)):
        merged = {ban.cidr: (ban.expires, ban.score) for ban in merge_bans(first, second, NOW)}
        assert merged == {"192.0.2.1/32": (when(NOW + 9), 3.0), "192.0.2.3/32": (when(NOW + 1), 0.0)}


@pytest.mark.parametrize("lasts_s", [None, 9])
def test_lists_when_merged_leave_what_a_person_wrote_as_it_is(lasts_s):
    """A ban by hand that ends no earlier than that of a program keeps its reason, and is nobody else's."""
    expires = lasts_s and when(NOW + lasts_s)
    hand = Ban(cidr="192.0.2.1/32", expires=expires, reason="ticket 7")
    made = Ban(cidr="192.0.2.1/32", expires=when(NOW + 5), reason="amf_depth", score=9.0, source="watch")
    for first, second in (([hand], [made]), ([made], [hand])):
        assert merge_bans(first, second, NOW) == [hand]


def test_match_when_the_last_number_is_zero_is_an_address_like_any_other():
    """Networks are named with their length: x.y.z.0 alone is one address."""
    found = BanList([Ban(cidr="192.0.2.0", expires=None), Ban(cidr="2001:db8:0:1::/64", expires=None)])
    assert found.match("192.0.2.0", NOW).cidr == "192.0.2.0/32"
    assert found.match("192.0.2.1", NOW) is None
    assert found.match("2001:db8:0:1:ffff::9", NOW).cidr == "2001:db8:0:1::/64"
    assert found.match("2001:db8:0:2::", NOW) is None


def test_lists_when_merged_drop_what_is_allowed_now():
    there = [
        Ban(cidr=text, expires=None) for text in ("192.0.2.0/24", "198.51.100.7/32", "203.0.113.1/32", "2001:db8::/32")
    ]
    allow = [ipaddress.ip_network("192.0.2.9/32"), ipaddress.ip_network("198.51.100.0/24")]
    assert {ban.cidr for ban in merge_bans(there, [], NOW, allow)} == {"203.0.113.1/32", "2001:db8::/32"}


def test_lists_when_merged_are_never_longer_than_a_list_may_be(monkeypatch):
    monkeypatch.setattr(bans_module, "MOST_BANS", 2)
    there = [Ban(cidr="192.0.2.1/32", expires=None), Ban(cidr="192.0.2.2/32", expires=when(NOW + 9), score=1.0)]
    merged = fitting(merge_bans(there, [Ban(cidr="192.0.2.3/32", expires=when(NOW + 9), score=5.0)], NOW))
    assert [ban.cidr for ban in merged] == ["192.0.2.1/32", "192.0.2.3/32"]


def test_lists_when_their_lines_are_long_are_cut_to_the_bytes_that_a_list_may_have(monkeypatch):
    hand = Ban(cidr="192.0.2.1/32", expires=when(NOW + 1))
    made = [Ban(cidr=f"192.0.2.{n}/32", expires=when(NOW + n), score=3.0, evidence={"x": 1.0}) for n in range(10, 20)]
    size = len(render([hand, *made[-2:]]))
    monkeypatch.setattr(bans_module, "MOST_BYTES", size)
    kept = fitting(merge_bans(made, [hand], NOW))
    assert {ban.cidr for ban in kept} == {"192.0.2.1/32", "192.0.2.19/32", "192.0.2.18/32"}
    assert BanList.parse(render(kept)) == BanList(kept)
    monkeypatch.setattr(bans_module, "MOST_BYTES", size - 1)
    assert {ban.cidr for ban in fitting(merge_bans(made, [hand], NOW))} == {"192.0.2.1/32", "192.0.2.19/32"}


def test_list_when_bans_by_hand_do_not_fit_is_an_error(monkeypatch):
    """A program that ends a ban of a person would do so without a word."""
    monkeypatch.setattr(bans_module, "MOST_BANS", 1)
    hand = [Ban(cidr="192.0.2.1/32", expires=when(NOW + 1)), Ban(cidr="192.0.2.2/32", expires=None)]
    with pytest.raises(ConfigError, match="more bans made by hand"):
        fitting(merge_bans(hand, [], NOW))
    assert list(parse_lines(render(hand))) == hand
