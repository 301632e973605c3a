"""The plan of a run: what is refused before anything starts, who joins when, and how the work is shared out."""

from __future__ import annotations

import resource

import pytest

from flowctl.errors import BrokenError, ConfigError
from flowctl.load import run, target
from flowctl.load.crowd import source_address
from flowctl.load.plan import MAX_PEERS, LoadPlan
from flowctl.load.run import run_load
from flowctl.load.target import check_descriptors, resolve

URL = "rtmp://127.0.0.1/live/room"


def plan(**fields):
    return LoadPlan(**{"url": URL, **fields})


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"profiles": {}}, "0 viewers"),
        ({"profiles": {"healthy": MAX_PEERS + 1}}, f"allowed is 1 to {MAX_PEERS}"),
        ({"profiles": {"helthy": 1}}, "no profile"),
        ({"profiles": {"healthy": 5, "stall": -1}}, "-1 viewers"),
        ({"duration_s": 0}, "duration_s is 0"),
        ({"duration_s": float("nan")}, "duration_s is nan"),
        ({"duration_s": 86_400, "ramp_s": 5}, "together"),
        ({"ramp_s": -1}, "ramp_s is -1"),
        ({"workers": 0}, "workers is 0"),
        ({"measure_every": 0}, "measure_every is 0"),
        ({"publishers": 5000}, "publishers is 5000"),
        ({"publishers": 2, "streams": 3}, "one each"),
        ({"until": "never"}, "until is 'never'"),
        ({"profiles": {"burst@10s": 1}, "duration_s": 10}, "when the run is over"),
    ],
)
def test_plan_when_a_value_is_out_of_range_names_it(fields, what):
    with pytest.raises(ConfigError, match=what):
        plan(**fields)


def test_assignments_when_profiles_are_mixed_are_spread_over_the_ramp():
    made = plan(profiles={"healthy": 90, "stall": 10}, ramp_s=10.0, streams=4).assignments(2)
    assert [*range(100)] == [order.number for order in made]
    stalls = [order.join_s for order in made if order.profile == "stall"]
    assert len(stalls) == 10
    assert all(abs(join - (index + 0.5)) < 0.6 for index, join in enumerate(stalls))
    assert [order.stream for order in made[:5]] == [0, 1, 2, 3, 0]
    assert sorted(order.join_s for order in made) == [order.join_s for order in made]


def test_assignments_when_a_burst_is_among_them_join_it_at_its_moment():
    made = plan(profiles={"healthy": 3, "burst@7s": 3}, ramp_s=3.0, duration_s=5.0).assignments(2)
    assert {7.0} == {order.join_s for order in made if order.profile == "burst@7s"}


@pytest.mark.parametrize(("peers", "every"), [(100, 1), (1000, 1), (2000, 2), (8000, 45)])
def test_parsed_every_when_the_crowd_is_large_parses_a_part(peers, every):
    assert every == plan(profiles={"healthy": peers}).parsed_every(2)
    assert plan(profiles={"healthy": peers}, measure_every=1).parsed_every(2) == 1


def test_assignments_when_a_part_is_parsed_include_some_of_each_profile():
    made = plan(profiles={"healthy": 50, "stall": 2}, measure_every=10).assignments(2)
    parsed = [order.profile for order in made if order.parsed]
    assert (parsed.count("healthy"), parsed.count("stall")) == (5, 1)


@pytest.mark.parametrize(("peers", "cores", "workers"), [(1, 4, 1), (1500, 4, 1), (1501, 4, 2), (20_000, 4, 4)])
def test_workers_when_not_said_follow_viewers_and_cores(peers, cores, workers):
    assert workers == plan(profiles={"healthy": peers}).worker_count(cores)
    assert min(3, peers) == plan(profiles={"healthy": peers}, workers=3).worker_count(cores)


def test_source_addresses_when_spread_are_all_different_and_loopback():
    addresses = [source_address(number) for number in range(MAX_PEERS)]
    assert len(set(addresses)) == MAX_PEERS
    assert all(item.startswith("127.") and max(map(int, item.split("."))) < 255 for item in addresses)


# -- where to


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]"])
def test_resolve_when_the_server_is_on_the_loopback_interface_is_allowed(host):
    url, chosen = resolve(f"rtmp://{host}:9/live/room", allow_remote=False)
    assert (url.port, 9) == (9, chosen.address[1])


@pytest.mark.parametrize("host", ["192.0.2.1", "[2001:db8::1]", "[::ffff:192.0.2.1]", "0.0.0.0"])
def test_run_when_the_server_is_elsewhere_is_refused_before_anything_starts(host, monkeypatch):
    """Load goes to this machine unless it is said otherwise; the error says how."""
    monkeypatch.setattr(target, "_answering", lambda *_: pytest.fail("it has tried to connect"))
    with pytest.raises(ConfigError, match="not the loopback") as caught:
        run_load(plan(url=f"rtmp://{host}/live/room"))
    assert "--allow-remote" in caught.value.hint


def test_resolve_when_one_of_several_addresses_is_elsewhere_is_refused(monkeypatch):
    found = [(2, 1, 6, "", ("127.0.0.1", 1935)), (2, 1, 6, "", ("192.0.2.7", 1935))]
    monkeypatch.setattr(target.socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7"):
        resolve("rtmp://two.example/live/room", allow_remote=False)
    monkeypatch.setattr(target, "_answering", lambda found: next(item for item in found if item[1][0] == "192.0.2.7"))
    _, chosen = resolve("rtmp://two.example/live/room", allow_remote=True)
    assert chosen.address == ("192.0.2.7", 1935)


@pytest.mark.parametrize(
    ("host", "family", "address", "spread"),
    [
        ("my-laptop", 2, ("127.0.1.1", 1935), True),
        ("localhost", 2, ("127.0.0.1", 1935), True),
        ("localhost", 10, ("::1", 1935, 0, 0), False),
        ("127.example.org", 2, ("192.0.2.7", 1935), False),
    ],
)
def test_addresses_when_not_decided_are_spread_where_the_address_is_loopback(
    monkeypatch, host, family, address, spread
):
    monkeypatch.setattr(target.socket, "getaddrinfo", lambda *_, **__: [(family, 1, 6, "", address)])
    monkeypatch.setattr(target, "_answering", lambda addresses: addresses[0])
    plans = []

    class NotedError(Exception):
        pass

    def note(found, *_):
        plans.append(found)
        raise NotedError

    monkeypatch.setattr(run, "_Run", note)
    for asked in (None, True, False):
        with pytest.raises(NotedError):
            run_load(plan(url=f"rtmp://{host}/live/room", allow_remote=True, spread_addresses=asked))
    assert [spread, True, False] == [found.spread_addresses for found in plans]


def test_resolve_when_the_host_is_unknown_says_so(monkeypatch):
    def unknown(*_, **__):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(target.socket, "getaddrinfo", unknown)
    with pytest.raises(BrokenError, match="cannot resolve"):
        resolve("rtmp://nowhere.example/live/room", allow_remote=True)


@pytest.mark.parametrize("url", ["rtmpt://127.0.0.1/live/x", "rtmp://127.0.0.1", "nonsense"])
def test_resolve_when_it_is_no_address_of_a_stream_is_refused(url):
    with pytest.raises(ConfigError):
        resolve(url, allow_remote=False)


def test_descriptors_when_there_are_too_few_are_raised_or_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1000))
    wanted = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: wanted.append(pair))
    check_descriptors(900)
    assert wanted == [(1000, 1000)]
    with pytest.raises(ConfigError, match="allowed are 1000") as caught:
        check_descriptors(2000)
    assert "ulimit" in caught.value.hint


def test_run_when_the_process_to_watch_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no such process"):
        run_load(plan(server_pid=2**22 + 12345))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"bit_rate": 20_000}, "bit_rate"),
        ({"source": "/no/such/file.flv"}, "cannot read"),
        ({"source": __file__}, "FLV"),
    ],
)
def test_run_when_what_it_is_to_publish_is_wrong_is_refused(fields, what):
    with pytest.raises(ConfigError, match=what):
        run_load(plan(publishers=1, **fields))


@pytest.mark.parametrize(("url", "name"), [("rtmp://127.0.0.1/live/a", "H03"), ("ws://127.0.0.1/live/a.flv", "B05")])
def test_run_when_an_attack_is_on_another_protocol_is_refused(url, name):
    with pytest.raises(ConfigError, match=f"profile {name} attacks"):
        run_load(LoadPlan(url=url, profiles={name: 1}))


def test_run_when_the_address_is_one_of_hls_is_refused():
    with pytest.raises(ConfigError, match="viewers play FLV"):
        run_load(LoadPlan(url="https://127.0.0.1/live/a.m3u8?key=k"))
