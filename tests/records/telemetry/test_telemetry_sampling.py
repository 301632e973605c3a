"""Samples of crowds: who is sampled with its squad and who by itself, and rounds that become columns together."""

from __future__ import annotations

from fanout_kit import kept
from recorded_kit import RecordedWorld, audio, config, inter, key
from telemetry_kit import read

from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.streamlog import CacheLimits
from flowctl.live.records.round import Round
from flowctl.records.telemetry.sampling import NOTHING, Identities, SampleBlock, SampledCondition, SharedRows
from flowctl.records.telemetry.schema import FLOW_SAMPLES

__all__ = ["kept"]  # a fixture

OWN = bytes((2, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0, 0, 1))
USE = ("play", "live", "room")


def crowd(world, count=40):
    publisher = world.publisher()
    players = [world.player(address=f"192.0.2.{number + 10}") for number in range(count)]
    for _ in range(3):
        stream(world, publisher)
        world.sample()
    return publisher, players


def stream(world, publisher):
    for number in range(4):
        publisher.video(number * 40, inter(b"i", 100) if number else key(b"k", 100))
        world.run(0.05)


def asked(monkeypatch):
    seen = []
    ask = Round._sample_sender

    def note(self, connection, record, book):
        seen.append(connection)
        ask(self, connection, record, book)

    monkeypatch.setattr(Round, "_sample_sender", note)
    return seen


def test_squad_when_one_member_moves_by_itself_asks_that_one_only(tmp_path, monkeypatch):
    world = RecordedWorld(tmp_path)
    publisher, players = crowd(world)
    stream(world, publisher)
    own = players[7].connection
    own.sender.send(OWN, MessageClass.CONTROL)
    world.run(0.1)
    seen = asked(monkeypatch)
    rows = [row for row in world.sample() if row["role"] == "play"]
    assert [connection for connection in seen if connection is not publisher.connection] == [own]
    assert len(rows) == len({row["conn_id"] for row in rows}) == 40
    control = {row["conn_id"]: row["sent_messages_control"] for row in rows}
    assert {conn_id for conn_id, count in control.items() if count} == {world.events.conn_id(own.number)}
    seen.clear()
    for _ in range(2):
        stream(world, publisher)
        rows = [row for row in world.sample() if row["role"] == "play"]
        assert len({row["conn_id"] for row in rows}) == len(rows) == 40
        assert {row["sent_messages_key"] for row in rows} == {1}
    assert own not in seen
    assert not any(squad.odd for squad in world.sampler._squads.values())


def test_member_when_it_leaves_its_squad_is_in_no_later_run(tmp_path):
    world = RecordedWorld(tmp_path)
    publisher, players = crowd(world)
    conn_id = world.events.conn_id(players[3].connection.number)
    players[3].leave()
    world.sample()
    stream(world, publisher)
    rows = world.sample()
    assert conn_id not in {row["conn_id"] for row in rows}
    assert sum(row["role"] == "play" for row in rows) == 39


def block(ts_us, first, count):
    """Return a block with a run of `count` connections, the second asked for its kernel's figures, and a row."""
    made = SampleBlock(ts_us)
    run = SharedRows((ts_us, *USE, *SampledCondition(1000.0), *NOTHING))
    run.add(first, "192.0.2.1", 1)
    run.add_crowd(Identities(list(range(first + 1, first + count)), ["192.0.2.2"] * (count - 1), [None] * (count - 1)))
    run.kernel[1] = (55, 66)
    made.add_run(run)
    condition = SampledCondition(500.0, state="SOFT_LIMIT", rtt_us=77, unsent_bytes=88)
    made.add_row((first + count, "192.0.2.3", 3, *USE), condition, (9, *NOTHING[1:]), ts_us + 1)
    return made


def test_blocks_when_absorbed_have_the_rows_of_each_in_order(tmp_path):
    names = [name for name in FLOW_SAMPLES.names if name not in {"node", "seq"}]

    def rows(made):
        columns = [column.to_pylist() for column in made.arrays()]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    apart = [*rows(block(1_000_000, 10, 4)), *rows(block(2_000_000, 20, 3))]
    together = block(1_000_000, 10, 4)
    assert together.absorb(block(2_000_000, 20, 3))
    assert rows(together) == apart
    assert [row["conn_id"] for row in apart] == [10, 11, 12, 13, 14, 20, 21, 22, 23]
    assert [row["rtt_us"] for row in apart] == [None, 55, None, None, 77, None, 55, None, 77]
    assert [row["sent_bytes"] for row in apart] == [0, 0, 0, 0, 9, 0, 0, 0, 9]
    assert not together.absorb(object())


def test_writer_when_given_blocks_makes_columns_of_them_with_the_file(tmp_path):
    world = RecordedWorld(tmp_path)
    writer = world.recorder._writers[FLOW_SAMPLES.name]
    writer.add_block(block(1_000_000, 10, 4))
    writer.add_block(block(2_000_000, 20, 3))
    assert (writer.books.waiting_rows, writer.books.written_rows) == (9, 0)
    assert writer.finish()
    rows = read(tmp_path, FLOW_SAMPLES.name)
    assert [row["conn_id"] for row in rows] == [10, 11, 12, 13, 14, 20, 21, 22, 23]
    assert len({row["seq"] for row in rows}) == 9
    assert writer.books.written_rows == 9


def test_writer_when_a_block_does_not_fit_loses_that_and_nothing_else(tmp_path):
    world = RecordedWorld(tmp_path)
    writer = world.recorder._writers[FLOW_SAMPLES.name]
    wrong = SampleBlock(1_500_000)
    wrong.add_row((1, "192.0.2.3", "no port", *USE), SampledCondition(1.0), NOTHING)
    writer.add_block(wrong)
    assert writer.finish()
    assert writer.books.refused_rows == 1
    writer.add_block(block(2_000_000, 20, 3))
    assert writer.finish()
    assert [row["conn_id"] for row in read(tmp_path, FLOW_SAMPLES.name)] == [20, 21, 22, 23]
    assert writer.books.waiting_rows == 0


def test_log_when_viewers_are_sampled_and_have_gone_is_let_go(tmp_path, kept):
    """Between two samples too, of which the second never comes where sampling fails."""
    world = RecordedWorld(tmp_path, config(cache=CacheLimits(size_bytes=0)))
    publisher, players = crowd(world, 5)
    for player in players[1:]:
        player.leave()
    world.sample()
    players[0].leave()
    for number in range(3000):
        publisher.send(publisher.session.send_tag(8, number * 40, audio(b"a")), run=False)
        if not number % 10:
            world.run(0.05)
    assert kept() < 1000
