"""What is in force by command, for workers that are started later."""

from __future__ import annotations

from datetime import UTC, datetime

from flowctl.control.operations import BY_NAME, read_arguments
from flowctl.core.server.bans import Ban
from flowctl.live.bans.kept import KeptBans
from flowctl.live.bans.store import BanStore
from flowctl.live.cluster.workers.inforce import InForce

SHOWN = {"soft": "1MiB,100,2s", "hard": "2MiB,200,4s", "low": "0,0,0", "target_delay": "auto"}


def asked_of(name, **given):
    """Return the values of an operation's arguments."""
    return read_arguments(name, BY_NAME[name].arguments, given)


def ban(in_force, network, until="2100-01-01T00:00:00Z", *, in_file=False):
    """Note a ban."""
    asked = {**asked_of("ban", network=network), "expires": until}
    in_force.note("ban", asked, {"in_file": in_file, "expires": until})


def test_in_force_when_bans_are_not_in_the_file_has_them_until_they_are_lifted():
    """A ban that is only in memory is for later workers, one that the file has is not; a lifted one is for nobody."""
    in_force = InForce()
    ban(in_force, "192.0.2.1/32")
    ban(in_force, "192.0.2.2/32", in_file=True)
    ban(in_force, "192.0.2.3/32")
    in_force.note("unban", asked_of("unban", network="192.0.2.3"), {"lifted": []})
    assert [ban["cidr"] for ban in in_force.page()] == ["192.0.2.1/32"]
    ban(in_force, "192.0.2.1/32", in_file=True)  # the file could be written this time
    assert in_force.page() == []


def test_in_force_when_a_network_is_written_in_two_ways_knows_that_it_is_one():
    """An IPv4 address may be banned as IPv6 has it, and let in again as what it is."""
    in_force = InForce()
    ban(in_force, asked_of("ban", network="::ffff:192.0.2.1")["network"])
    assert len(in_force.page()) == 1
    in_force.note("unban", asked_of("unban", network="192.0.2.1"), {"lifted": []})
    assert in_force.page() == []


def test_in_force_when_bans_have_ended_forgets_them():
    """What has ended is kept no longer than until the next ban."""
    in_force = InForce(wall=lambda: 2e9)
    ban(in_force, "192.0.2.1/32", until="2001-01-01T00:00:00Z")
    ban(in_force, "192.0.2.2/32", until=None)
    assert [ban["cidr"] for ban in in_force.page()] == ["192.0.2.2/32"]


def test_in_force_when_limits_were_set_has_them_until_the_file_changes(tmp_path):
    """Limits by command last until the limits file says something else; to be shown, or of one connection, are none."""
    file = tmp_path / "limits.toml"
    file.write_text("soft = '1MiB'\n")
    in_force = InForce(file)
    in_force.note("limits", asked_of("limits"), SHOWN)
    in_force.note("limits", asked_of("limits", connection=7, soft="1MiB,1,1s"), SHOWN | {"was": ""})
    assert in_force.orders() == []
    in_force.note("limits", asked_of("limits", soft="1MiB,100,2s", origin="me"), SHOWN | {"was": ""})
    assert in_force.orders() == [("limits", SHOWN | {"connection": None, "origin": "me"})]
    file.write_text("soft = '2MiB'\n")
    assert in_force.orders() == []


def test_in_force_when_there_are_more_bans_than_a_page_gives_each_once():
    """A worker asks for page after page, by the last ban that it has."""
    in_force = InForce()
    for number in range(7):
        ban(in_force, f"192.0.2.{number}/32")
    found, page = [], in_force.page(most=3)
    while page:
        found += [item["cidr"] for item in page]
        page = in_force.page(f"{page[-1]['cidr']} ban", most=3)
    assert sorted(found) == [f"192.0.2.{number}/32" for number in range(7)]
    assert len(found) == 7


def test_in_force_when_there_is_a_store_has_bans_in_the_next_life(tmp_path):
    """The supervisor keeps what was asked of all workers, and says so in the answer; what was lifted is gone."""
    path = tmp_path / "bans.sqlite"
    in_force = InForce(kept=KeptBans(BanStore(path)))
    asked = {**asked_of("ban", network="192.0.2.1", reason="rude"), "expires": None}
    said = in_force.note("ban", asked, {"in_file": False, "expires": None, "reason": "rude", "source": "command"})
    assert said == {"in_store": True, "kept": "in the ban store, and after a restart too"}
    ban(in_force, "192.0.2.2/32")
    in_force.note("unban", asked_of("unban", network="192.0.2.2"), {"lifted": []})
    in_force.close()
    in_force = InForce(kept=KeptBans(BanStore(path)))
    assert [(item["cidr"], item["reason"], item["source"]) for item in in_force.page()] == [
        ("192.0.2.1/32", "rude", "command")
    ]
    in_force.close()


def test_in_force_when_a_penalty_follows_a_longer_ban_keeps_the_longer_one():
    """What a command has set for a year is not over after the ten minutes of a penalty for the same."""
    in_force = InForce()
    ban(in_force, "192.0.2.1/32", until="2100-01-01T00:00:00Z")
    in_force.punish([Ban(cidr="192.0.2.1/32", expires=datetime(2099, 1, 1, tzinfo=UTC), source="penalty")])
    assert [ban["expires"] for ban in in_force.page()] == ["2100-01-01T00:00:00Z"]
