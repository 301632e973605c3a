"""What of a peer gets into a record: addresses and names as the settings say, and never a secret."""

from __future__ import annotations

import pytest

from flowctl.errors import ConfigError
from flowctl.records.telemetry.options import Addresses, EventsOptions, RecordedStreams
from flowctl.records.telemetry.privacy import Privacy, read_key

KEY = b"0123456789abcdef"
CARRYING = (
    *(
        "room?token=s3cret",
        "room&token=s3cret",
        "user:s3cret@room",
        "room=s3cret",
        "room;key:s3cret",
        "rtmp://h/s3cret",
    ),
    *("live%3Fkey%3Ds3cret", "live%253Fs3cret", "live%3bs3cret", "live%3A%2F%2Fs3cret", "%2525252525253Fs3cret"),
)
"""Names that carry more than a name."""


def privacy(addresses=Addresses.PLAIN, streams=RecordedStreams.HASH, key=KEY) -> Privacy:
    return Privacy(addresses, streams, key)


@pytest.mark.parametrize(
    ("mode", "address", "stored"),
    [
        (Addresses.PLAIN, "192.0.2.77", "192.0.2.77"),
        (Addresses.PLAIN, "::ffff:192.0.2.77", "192.0.2.77"),
        (Addresses.PLAIN, "fe80::1%eth0", "fe80::1"),
        (Addresses.TRUNCATED, "192.0.2.77", "192.0.2.0/24"),
        (Addresses.TRUNCATED, "::ffff:192.0.2.77", "192.0.2.0/24"),
        (Addresses.TRUNCATED, "2001:db8:1:2::3", "2001:db8:1::/48"),
        (Addresses.PLAIN, "2002:cb00:7105::1", "2002:cb00:7105::1"),
        (Addresses.TRUNCATED, "2002:cb00:7105::1", "203.0.113.0/24"),
        (Addresses.TRUNCATED, "64:ff9b::cb00:7105", "203.0.113.0/24"),
        (Addresses.TRUNCATED, "nowhere", ""),
    ],
)
def test_address_when_stored_is_what_the_setting_lets_through(mode, address, stored):
    assert privacy(mode).address(address) == stored


def test_address_when_hashed_can_be_told_apart_but_not_read():
    one = privacy(Addresses.HASHED)
    stored = one.address("192.0.2.77")
    assert stored == privacy(Addresses.HASHED).address("::ffff:192.0.2.77")
    assert stored == privacy(Addresses.HASHED).address("64:ff9b::c000:24d")
    assert stored != one.address("192.0.2.78")
    assert stored != privacy(Addresses.HASHED, key=b"another key than that").address("192.0.2.77")
    assert stored.startswith("h:")
    assert "." not in stored


def test_stream_when_names_may_be_keys_is_a_hash_beside_its_application():
    app, name = privacy().stream("live/eu/k3y-of-a-publisher")
    assert app == "live"
    assert name.startswith("h:")
    assert len(name) == 18
    assert name == privacy().stream("live/eu/k3y-of-a-publisher")[1]
    assert name != privacy().stream("live/us/k3y-of-a-publisher")[1]
    assert name != privacy(key=None).stream("live/eu/k3y-of-a-publisher")[1]


@pytest.mark.parametrize("path", ["live/k3y", "live/k3y/720p", "live/eu/k3y/720p"])
def test_stream_when_its_name_has_parts_shows_the_application_alone(path):
    app, name = privacy().stream(path)
    assert (app, name) == ("live", privacy().hashed(path))


def test_stream_when_no_application_was_named_is_all_hash():
    assert privacy().stream("k3y/720p", app_named=False) == ("", privacy().hashed("k3y/720p"))
    assert privacy().stream("k3y") == ("", privacy().hashed("k3y"))
    assert privacy(streams=RecordedStreams.PLAIN).stream("room/720p", app_named=False) == ("room", "720p")


@pytest.mark.parametrize(
    ("mode", "cidr", "stored"),
    [
        (Addresses.PLAIN, "192.0.2.77/32", "192.0.2.77/32"),
        (Addresses.TRUNCATED, "192.0.2.77/32", "192.0.2.0/24"),
        (Addresses.TRUNCATED, "10.0.0.0/8", "10.0.0.0/8"),
        (Addresses.TRUNCATED, "2001:db8:1:2::3/128", "2001:db8:1::/48"),
        (Addresses.TRUNCATED, "2002:cb00:7105::/48", None),
        (Addresses.HASHED, "192.0.2.77/32", None),
    ],
)
def test_network_when_stored_tells_no_more_than_an_address(mode, cidr, stored):
    assert privacy(mode).network(cidr) == stored


def test_stream_when_names_are_public_is_plain_unless_it_carries_a_query():
    plain = privacy(streams=RecordedStreams.PLAIN)
    assert plain.stream("live/room") == ("live", "room")
    for name in CARRYING:
        assert "s3cret" not in plain.stream(f"live/{name}")[1]
    for name in ("room 1", "100%", "caf%C3%A9", "a%20b"):
        assert plain.stream(f"live/{name}") == ("live", name)


@pytest.mark.parametrize("streams", list(RecordedStreams))
def test_application_when_it_carries_a_query_is_a_hash(streams):
    for app in CARRYING:
        if "/" not in app:
            assert privacy(streams=streams).stream(f"{app}/room")[0] == privacy().hashed(app)


@pytest.mark.parametrize("text", ["%25" * 20_000 + "3F", "%" * 60_000, "bearer" * 10_000, ":/" * 30_000])
def test_text_when_it_is_made_to_be_dear_takes_as_long_as_any(text):
    """Texts of 60,000 characters take linear work: its square or cube would not end within the test's time."""
    for _ in range(3):
        assert len(privacy().text(text)) <= 120
        app, name = privacy(streams=RecordedStreams.PLAIN).stream(f"live/{text}")
        assert app == "live"
        assert len(name) <= 120


def test_text_when_a_peer_chose_it_is_short_printable_and_without_secrets():
    one = privacy()
    assert one.text("FMLE/3.0\x1b[31m") == "FMLE/3.0\\u001b[31m"
    assert len(one.text("\x1b" * 500)) == 120
    name = "\U0001f468\u200d\U0001f469 a\u3000b\u00a0c"  # what a stream may be called is stored as it is
    assert one.text(name) == name
    assert len(one.text("x" * 500)) == 120
    assert one.text("agent?token=s3cret") == "agent"
    assert "s3cret" not in one.text("rtmp://user:s3cret@host/app")
    assert one.text("OBS rtmp://h/live/s3cret") == "OBS rtmp"
    assert one.text("player Bearer s3cret") == "player "
    for text in ("OBS rtmp%3A%2F%2Fh/live/s3cret", "x%3Ftoken%3Ds3cret", "x%253Fs3cret", "user%3As3cret%40h"):
        assert one.text(text) == one.hashed(text)
    browser = "Mozilla/5.0 (X11; Linux x86_64; rv:130.0) Gecko/20100101 Firefox/130.0"
    assert one.text(browser) == browser


def test_hashes_when_many_are_asked_for_are_remembered_within_bounds():
    one = privacy()
    first = one.stream("live/0")[1]
    for number in range(17_000):
        one.stream(f"live/{number}")
    assert len(one._known) <= 16_384
    assert one.stream("live/0")[1] == first


def test_key_file_when_unfit_is_refused_without_showing_it(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot read events_key_file") as caught:
        read_key(path)
    assert "urandom" in caught.value.hint
    path.write_bytes(KEY)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="has mode 0644"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == KEY
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes") as caught:
        read_key(path)
    assert "short" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"node": ".hidden"}, "node is '.hidden'"),
        ({"node": "a/b"}, "node is 'a/b'"),
        ({"node": "n" * 65}, "1 to 64"),
        ({"interval_s": 0.01}, "interval_s is 0.01 s, allowed is 0.1 s to 1 h"),
        ({"rotate_s": 4000}, "rotate_s is 4000 s"),
        ({"rotate_s": float("nan")}, "rotate_s is nan s"),
        ({"queue_rows": 1}, "events_queue_rows is 1"),
        ({"max_bytes": -1}, "events_max_bytes is -1"),
        ({"key": b"short"}, "has 5 bytes"),
    ],
)
def test_options_when_out_of_range_name_the_setting(values, words):
    with pytest.raises(ConfigError) as caught:
        EventsOptions(**{"folder": "x", "node": "n1", **values})
    assert words in str(caught.value)
