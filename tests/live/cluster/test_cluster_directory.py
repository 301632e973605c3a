"""Who has a name, over several workers: the rules, with times by hand."""

import pytest

from flowctl.errors import BusyError, LimitExceededError
from flowctl.live.cluster.names.desk import REFUSED, NamesDesk
from flowctl.live.cluster.names.directory import Directory, Holder, Notice, NoticeKind
from flowctl.live.config import LiveConfig, SecondPublisher
from flowctl.live.namebook import ClaimVerdict, NameRules, Owner
from flowctl.live.settings.levels import Level
from flowctl.testing import ManualClock

ROOM = "live/room"
ANN, BOB = Owner("192.0.2.1"), Owner("192.0.2.2")
FIRST, SECOND = Holder(1, 11), Holder(2, 21)


def verdict(directory, holder, owner=ANN, now=0.0, name=ROOM, **more):
    """Return what becomes of a claim; of one that is refused, the limit or `REFUSED`."""
    directory.expire(now)
    try:
        return directory.claim(name, holder, owner, **more).verdict
    except LimitExceededError as error:
        return error.limit
    except BusyError:
        return REFUSED


def make(policy=SecondPublisher.REFUSE):
    return Directory(lambda name: NameRules(policy, 3.0, 8))


def where(worker, value, *, keep=False):
    return Notice(worker, NoticeKind.WHERE, ROOM, value, keep)


def test_name_when_free_is_granted_and_told_to_the_workers_that_view_it():
    directory = make()
    assert directory.view(ROOM, 2) == [where(2, 0)]
    decision = directory.claim(ROOM, FIRST, ANN)
    assert (decision.verdict, list(decision.notices)) == (ClaimVerdict.GRANTED, [where(2, 1)])


def test_worker_when_it_views_what_is_published_is_told_where():
    directory = make()
    assert verdict(directory, FIRST) is ClaimVerdict.GRANTED
    assert directory.view(ROOM, 2) == [where(2, 1)]


def test_second_publisher_when_policy_is_replace_ends_the_first():
    directory = make(SecondPublisher.REPLACE)
    verdict(directory, FIRST)
    directory.view(ROOM, 3)
    decision = directory.claim(ROOM, SECOND, BOB)
    assert decision.verdict is ClaimVerdict.GRANTED
    assert list(decision.notices) == [Notice(1, NoticeKind.REVOKED, ROOM, 11), where(3, 2)]
    assert directory.release(ROOM, FIRST, 0.0, grace=True) == []
    assert directory.published() == {ROOM: 2}


def test_second_publisher_when_policy_is_standby_has_its_turn_in_its_worker():
    directory = make(SecondPublisher.STANDBY)
    verdict(directory, FIRST)
    directory.view(ROOM, 3)
    assert verdict(directory, SECOND, BOB) is ClaimVerdict.STANDS_BY
    assert directory.release(ROOM, FIRST, 0.0, grace=True) == [Notice(2, NoticeKind.TURN, ROOM, 21), where(3, 2)]


def test_owner_when_back_within_the_grace_time_gets_the_name_in_another_worker():
    directory = make()
    verdict(directory, FIRST)
    directory.view(ROOM, 3)
    assert directory.release(ROOM, FIRST, 1.0, grace=True) == []
    assert verdict(directory, SECOND, BOB, 2.0) is REFUSED
    assert list(directory.claim(ROOM, SECOND, ANN).notices) == [where(3, 2)]


def test_name_when_its_owner_stays_away_is_free_and_the_stream_ends():
    directory = make()
    verdict(directory, FIRST)
    directory.view(ROOM, 3)
    directory.release(ROOM, FIRST, 1.0, grace=True)
    assert directory.expire(3.9) == []
    assert directory.expire(4.0) == [where(3, 0)]
    assert verdict(directory, SECOND, BOB, 4.0) is ClaimVerdict.GRANTED


def test_owner_when_its_publisher_has_fallen_silent_takes_its_place():
    directory = make()
    verdict(directory, FIRST)
    asked = directory.claim(ROOM, SECOND, ANN)
    assert (asked.verdict, asked.holder) == (ClaimVerdict.ASK, FIRST)
    assert verdict(directory, SECOND, silent=False) is REFUSED
    assert verdict(directory, SECOND, silent=True) is ClaimVerdict.GRANTED


def test_worker_when_killed_frees_its_names_and_keeps_them_for_their_owners():
    directory = make()
    verdict(directory, FIRST)
    directory.view(ROOM, 3)
    assert directory.worker_gone(1, 1.0) == [where(3, 0, keep=True)]
    assert verdict(directory, SECOND, BOB, 2.0) is REFUSED
    assert verdict(directory, SECOND, ANN, 2.0) is ClaimVerdict.GRANTED


def test_worker_when_killed_while_a_name_is_kept_there_sends_nobody_there_any_more():
    directory = make()
    verdict(directory, FIRST)
    directory.view(ROOM, 3)
    directory.release(ROOM, FIRST, 0.5, grace=True)
    assert directory.worker_gone(1, 1.0) == [where(3, 0, keep=True)]
    assert directory.view(ROOM, 2) == [where(2, 0, keep=True)]


def test_names_when_levels_differ_follow_the_rules_of_their_application():
    values = {"second_publisher": SecondPublisher.REPLACE, "return_grace_s": 1.0, "publishers_per_address": 1}
    config = LiveConfig(return_grace_s=9.0, levels=(Level(application="desk", values=values),))
    directory = NamesDesk(config, lambda *_: None).directory
    for name, expected in (("desk/a", ClaimVerdict.GRANTED), (ROOM, REFUSED)):
        assert verdict(directory, FIRST, name=name) is ClaimVerdict.GRANTED
        assert verdict(directory, SECOND, BOB, name=name) is expected
    assert verdict(directory, Holder(2, 22), BOB, name="desk/b") == "publishers_per_address"
    directory.release(ROOM, FIRST, 0.0, grace=True)
    directory.release("desk/a", SECOND, 0.0, grace=True)
    assert verdict(directory, FIRST, now=1.5, name="desk/a") is ClaimVerdict.GRANTED
    assert verdict(directory, SECOND, BOB, 2.0, name=ROOM) is REFUSED


@pytest.mark.parametrize("end", ["release", "worker"])
def test_directory_when_all_have_left_is_empty(end):
    directory = make(SecondPublisher.STANDBY)
    verdict(directory, FIRST)
    verdict(directory, SECOND, BOB)
    directory.view(ROOM, 1)
    if end == "worker":
        directory.worker_gone(1, 0.0)
        directory.worker_gone(2, 0.0)
    else:
        directory.unview(ROOM, 1)
        directory.release(ROOM, FIRST, 0.0, grace=True)
        directory.release(ROOM, SECOND, 0.0, grace=True)
    directory.expire(10.0)
    book = directory._book
    assert (len(directory), book._published_from, book._kept_for, book._kept) == (0, {}, {}, {})
    assert (directory._viewers, directory._shown) == ({}, {})


def test_worker_when_it_ends_has_no_part_in_names_that_have_gone():
    """A publisher that broke off there, came back elsewhere and left is no business of its first worker any more."""
    directory = make()
    verdict(directory, FIRST)
    directory.release(ROOM, FIRST, 1.0, grace=True)
    verdict(directory, SECOND, now=2.0)
    directory.release(ROOM, SECOND, 3.0, grace=False)
    verdict(directory, FIRST._replace(number=12), now=4.0, name="live/other")
    assert len(directory) == 1
    directory.worker_gone(1, 5.0)
    assert directory.published() == {}


def test_word_about_a_publisher_when_another_has_the_name_by_then_decides_nothing():
    """Its owner has published from a third worker meanwhile: that one is asked about, and keeps the name."""
    sent, clock = [], ManualClock()
    desk = NamesDesk(LiveConfig(), lambda worker, values: sent.append((worker, values["tell"])), clock)
    owner = {"address": "192.0.2.1", "user": None, "key": ""}

    def claim(worker, number):
        desk.asked(worker, {"ask": "claim", "name": ROOM, "claim": number, "number": number} | owner)

    claim(1, 11)
    claim(2, 21)
    desk.asked(1, {"ask": "release", "name": ROOM, "claim": 11, "number": 11, "grace": False})
    claim(3, 31)
    desk.asked(1, {"ask": "silent", "name": ROOM, "claim": 21, "worker": 2, "silent": True})
    assert sent == [(1, "claim"), (1, "silent?"), (3, "claim"), (3, "silent?")]
    desk.asked(3, {"ask": "silent", "name": ROOM, "claim": 21, "worker": 2, "silent": False})
    assert sent[4:] == [(2, "claim")]
    assert desk.directory.published() == {ROOM: 3}
