"""Sets of renditions: viewers change over at key frames, with every sound message once, and nothing lost."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from types import SimpleNamespace

import pytest
from flow_kit import AUDIO, CONTROL, DISPOSABLE, INTER, KEY, check_accounts, check_edges, frame
from set_kit import PICTURES_PER_S, RESTART, SOUND, Connection, Show, choose, media_time, retime

from flowctl.core.fanout.following import FollowPlace
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.policy import KeepAll
from flowctl.core.flow.renditions import FIRST, LineMeter
from flowctl.core.flow.state import SendState
from flowctl.core.outgoing.splice import MediaTimes, Splice, raise_times, splice
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import LocalProtocolError
from flowctl.streamset import SetPlace, StreamSet, _Watch
from flowctl.testing import ManualGroup


def pieces(connection):
    """Return what a viewer received as (origin, class, time), and check that each hop begins with headers and a key."""
    check_accounts(connection.viewer)
    check_edges(connection.viewer)
    frames = connection.viewer.frames
    pictures = [(origin, item) for origin, item, _, _ in frames if origin != SOUND]
    for before, (origin, item) in pairwise(pictures):
        if origin not in (before[0], RESTART):
            assert (before[0], item) == (RESTART, KEY)
    return frames


def sound_times(connection):
    return [number for origin, _, number, _ in pieces(connection) if origin == SOUND]


def picture_times(connection):
    return [number for origin, _, number, _ in pieces(connection) if origin not in (SOUND, RESTART)]


def gapless(times, step):
    return times == list(range(times[0], times[-1] + step, step))


@pytest.fixture
def show():
    show = Show()
    show.run(5.0)
    return show


def test_viewer_when_it_joins_begins_in_the_smallest_and_is_sent_its_cache(show):
    one = show.join()
    show.run(1.0)
    assert one.place.rendition == "360"
    assert {origin for origin, *_ in pieces(one)} == {RESTART, SOUND, b"a"}
    assert gapless(picture_times(one), 40)
    assert gapless(sound_times(one), 20)


def test_viewer_when_another_is_chosen_changes_over_at_the_next_key_frame(show):
    one = show.join()
    show.run(0.5)
    choose(one, "720")
    show.run(0.4)
    assert one.sender.guided
    assert one.place.rendition == "360"
    show.run(2.0)
    assert one.place.rendition == "720"
    assert not one.sender.guided
    assert one.sender.following is show.logs["720"]
    frames = pieces(one)
    assert [origin for origin, item, *_ in frames if item is KEY] == [b"a", b"b"]
    assert gapless(picture_times(one), 40)
    assert gapless(sound_times(one), 20)
    assert [entry.why for entry in one.sender.ledger() if entry.kind is LedgerKind.SWITCH] == [
        "rendition 360 to 720: the test wants it"
    ]
    assert show.set.find("720").fanouts.on(show.group).statistics().members == 1
    assert not show.set.find("360").fanouts.active


def test_order_when_rates_are_not_known_yet_is_by_what_has_come():
    """So a viewer of the first seconds is told of how many renditions its own is one."""
    show = Show()
    one = show.join()
    show.run(0.1)
    assert list(show.set.rates()) == []
    assert show.set.order() == ["360", "720"]
    assert one.renditions.describe(one.sender.host.now()).startswith("rendition 360 of 2 for ")
    show.run(10.0)
    assert show.set.order() == list(show.set.rates()) == ["360", "720"]


def test_view_when_the_set_is_empty_is_refused():
    connection = Connection(ManualGroup())
    with pytest.raises(LocalProtocolError):
        StreamSet().view(connection)
    assert connection.place is None


def test_viewer_when_the_other_key_frame_is_late_waits_for_it_and_misses_nothing(show):
    show.late_s["720"] = 0.2
    one = show.join()
    choose(one, "720")
    show.run(5.0)
    assert one.place.rendition == "720"
    assert [origin for origin, item, *_ in pieces(one) if item is KEY][:2] == [b"a", b"b"]
    assert gapless(picture_times(one), 40)
    assert gapless(sound_times(one), 20)
    assert one.sender.state is SendState.READY
    assert not one.viewer.edges.changes


@pytest.mark.parametrize("late_s", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("first", [13, 30])
def test_viewer_when_key_frames_do_not_meet_changes_over_and_sees_no_picture_before_another(first, late_s):
    show = Show(retime=retime)
    show.groups["720"] = (2 * PICTURES_PER_S, first)
    show.late_s["720"] = late_s
    show.run(5.0)
    one = show.join()
    choose(one, "360")
    show.run(0.5)
    choose(one, "720")
    show.run(4.0)
    assert one.place.rendition == "720"
    times = picture_times(one)
    assert times == sorted(set(times))
    assert max(after - before for before, after in pairwise(times)) <= 80
    assert gapless(sound_times(one), 20)
    choose(one, "360")
    show.run(4.0)
    assert one.place.rendition == "360"
    assert picture_times(one) == sorted(set(picture_times(one)))
    assert gapless(sound_times(one), 20)
    assert show.set.find("360").fanouts.on(show.group).statistics().members == 1


def test_viewer_when_key_frames_do_not_meet_and_cannot_be_retimed_stays():
    show = Show()
    show.groups["720"] = (2 * PICTURES_PER_S, 25)
    show.run(5.0)
    one = show.join()
    choose(one, "720")
    show.run(6.0)
    assert one.place.rendition == "360"
    assert gapless(picture_times(one), 40)


def test_viewer_when_groups_are_unequal_changes_over_where_key_frames_meet():
    show = Show(retime=retime)
    show.groups["720"] = (4 * PICTURES_PER_S, 0)
    show.run(9.0)
    one = show.join()
    choose(one, "720")
    show.run(6.0)
    assert one.place.rendition == "720"
    assert gapless(picture_times(one), 40)


def test_viewer_when_its_rendition_stops_goes_on_in_the_nearest_with_all_the_sound(show):
    show = Show((("180", 20_000), ("360", 60_000), ("720", 150_000)))
    show.run(5.0)
    one = show.join()
    choose(one, "720")
    show.run(3.0)
    assert one.place.rendition == "720"
    show.silent.add("720")
    show.run(8.0)
    assert one.place.rendition == "360"
    assert pieces(one)[-1][0] in (b"b", SOUND)
    assert gapless(sound_times(one), 20)
    assert one.place.book.why == "its rendition has ended"


def test_viewer_when_its_rendition_is_removed_goes_on_at_once(show):
    one = show.join()
    show.run(1.0)
    show.remove("360")
    show.run(2.0)
    assert one.place.rendition == "720"
    times = picture_times(one)
    assert max(after - before for before, after in pairwise(times)) <= 2000
    assert gapless(sound_times(one), 20)


@pytest.mark.parametrize("into_s", [0.1, 1.0, 1.7])
@pytest.mark.parametrize("late_s", [0.0, 0.3])
@pytest.mark.parametrize("first", [0, 13])
def test_viewer_when_its_rendition_is_removed_misses_no_picture(first, late_s, into_s):
    """The other one's group is cached: what that has up to the last picture that was sent goes out at once."""
    show = Show((("180", 20_000), ("360", 60_000), ("720", 150_000)), retime=retime)
    show.groups["360"] = (2 * PICTURES_PER_S, first)
    show.late_s["360"] = late_s
    show.run(5.0)
    one = show.join()
    choose(one, "720")
    show.run(6.0 + into_s)
    assert one.place.rendition == "720"
    show.remove("720")
    show.run(3.0)
    assert one.place.rendition == "360"
    times = picture_times(one)
    assert times == sorted(set(times))
    assert max(after - before for before, after in pairwise(times)) <= 80
    assert gapless(sound_times(one), 20)


def test_viewer_when_its_rendition_is_removed_and_its_line_is_slow_waits_for_the_next_group(monkeypatch):
    """What the group has by then would keep it behind for longer than it waits, and is not looked through."""
    monkeypatch.setattr("flowctl.streamset.raise_times", None)
    show = Show((("360", 60_000), ("720", 150_000)), retime=retime)
    show.run(5.0)
    one = show.join()
    choose(one, "360")
    monkeypatch.setattr(LineMeter, "evidence", lambda self, now: None)
    show.run(2.2)
    last_ms = (show.pictures["360"] - 1) * 40
    show.remove("360")
    show.run(0.5)
    assert one.place.rendition == "720"
    assert picture_times(one)[-1] == last_ms
    show.run(2.0)
    assert next(at for at in picture_times(one) if at > last_ms) == 8000
    assert gapless(sound_times(one), 20)


@pytest.mark.parametrize(("late_s", "pictures", "seconds"), [(0.0, 3, 0.1), (0.3, 5, 0.4)])
def test_viewer_when_its_rendition_is_removed_hears_what_another_has_before_its_first_key_frame(
    late_s, pictures, seconds
):
    """That one was put a moment before."""
    show = Show((("360", 60_000), ("720", 150_000)), retime=retime)
    show.run(5.0)
    one = show.join()
    choose(one, "720")
    show.run(3.0)
    show.remove("360")
    show.late_s["360"], show.groups["360"] = late_s, (2 * PICTURES_PER_S, show.pictures["720"] + pictures)
    show.pictures["360"] = show.pictures["720"]
    show.put("360")
    show.run(seconds)
    show.remove("720")
    show.run(2.0)
    assert one.place.rendition == "360"
    assert gapless(sound_times(one), 20)


def test_viewer_that_is_behind_is_led_to_nothing_from_before_a_time_in_which_a_rendition_was_away():
    """Nobody has the sound of that time any more, so places in the log before it say nothing of what was heard."""
    show = Show((("360", 60_000), ("720", 150_000), ("180", 20_000)))
    show.remove("180")
    show.run(5.0)
    one = show.join(policy=KeepAll(), limits=NO_LIMITS)
    choose(one, "720")
    show.run(2.5)
    back = show.logs["360"]
    show.remove("360")
    show.run(3.0)
    one.viewer.give(0)
    show.run(0.4)
    show.put("180")
    show.remove("720")
    show.put("360", back)
    show.run(0.3)
    assert one.place.rendition == "360"
    one.viewer.give(None)
    show.run(3.0)
    assert sound_times(one) == sorted(set(sound_times(one)))


def test_viewer_that_is_behind_when_its_rendition_is_removed_goes_on_where_it_is():
    show = Show((("360", 60_000), ("720", 150_000)), retime=retime)
    show.run(5.0)
    one = show.join(policy=KeepAll(), limits=NO_LIMITS)
    choose(one, "720")
    show.run(3.5)
    one.viewer.give(0)
    show.run(0.4)
    show.remove("720")
    show.run(0.3)
    assert one.place.rendition == "360"
    one.viewer.give(None)
    show.run(3.0)
    times = picture_times(one)
    assert times == sorted(set(times))
    assert max(after - before for before, after in pairwise(times)) <= 80
    assert gapless(sound_times(one), 20)


def test_viewer_when_its_rendition_is_removed_on_the_way_to_another_says_why_it_left(show):
    one = show.join()
    choose(one, "")
    show.run(1.2)
    choose(one, "720")
    show.run(0.4)
    assert one.sender.guided
    one.place.looks._decided_at = show.group.clock() + 0.1  # so lately that the rule is not asked again
    show.remove("360")
    show.run(0.5)
    assert (one.place.rendition, one.place.book.why) == ("720", "its rendition has ended")


def test_viewer_that_is_behind_hears_all_when_the_nearest_was_put_after_what_it_waits_for(show):
    one = show.join(policy=KeepAll(), limits=NO_LIMITS)
    show.run(1.0)
    one.viewer.give(0)
    show.remove("720")
    show.put("720")
    show.run(2.5)
    show.remove("360")
    show.run(0.5)
    assert one.place.rendition == "720"
    one.viewer.give(None)
    show.run(3.0)
    assert gapless(sound_times(one), 20)


def test_viewer_when_a_rendition_ends_right_after_it_was_entered_hears_the_sound_that_was_on_its_way(show):
    show.late_s["720"] = 0.2
    one = show.join(policy=KeepAll(), limits=NO_LIMITS)
    choose(one, "720")
    while not one.sender.guided or one.viewer.sender.account().entry.message_class is not KEY:
        show.run(0.02)
    one.viewer.give(0)
    while one.place.rendition != "720":
        show.run(0.02)
    show.remove("720")
    show.run(0.5)
    assert one.place.rendition == "360"
    one.viewer.give(None)
    show.run(3.0)
    assert gapless(sound_times(one), 20)


def test_viewers_when_all_renditions_stop_stay_where_they_are(show):
    one = show.join()
    show.silent.update(show.rates)
    show.run(20.0)
    assert (one.place.rendition, one.place.book.ups + one.place.book.downs) == ("360", 0)


def test_viewer_when_its_rendition_is_removed_after_all_pictures_have_stopped_goes_on_hearing(show):
    one = show.join()
    show.silent.update(show.rates)
    show.run(10.0)
    show.remove("360")
    show.run(2.0)
    assert one.place.rendition == "720"
    assert gapless(sound_times(one), 20)
    assert sound_times(one)[-1] >= 16_900


def test_viewer_when_its_rendition_and_the_set_end_in_one_instant_hears_of_the_end(show):
    """What it would go on in has told its viewers of the end already, and its key frames are forgotten."""
    one = show.join()
    show.run(1.0)
    one.viewer.give(0)
    show.run(0.1)
    logs = list(show.logs.values())
    show.remove("360")
    for log in logs:
        log.ended = True
        log.append(b"the end", CONTROL, show.group.clock())
        log.drop_cache()
        log.keep_keys(0)
    show.group.run(1.0)
    assert one.place.rendition == "360"
    one.viewer.give(None)
    show.group.run(1.0)
    assert bytes(one.viewer.peer.received).count(b"the end") == 1


def test_viewer_that_waited_before_a_picture_and_is_told_of_key_frames_alone_gets_all_that_waited(show):
    one = Connection(show.group, settings=SenderSettings(turn_messages=7))
    fanouts = show.set.find("360").fanouts
    FollowPlace(one, fanouts, start=fanouts.log.cached)
    show.run(0.1)
    guide = SimpleNamespace(choose_log=lambda _key: inf)
    one.sender.set_guide(guide, everywhere=True)
    show.run(0.3)
    assert one.sender.load().messages > 14
    one.sender.set_guide(guide)
    show.group.run(0.1)
    assert one.sender.load().messages == 0


def test_place_when_it_ends_forgets_the_viewer(show):
    one = show.join()
    show.run(1.0)
    one.place.end()
    show.run(1.0)
    assert (one.place, one.sender.following, one.renditions.name) == (None, None, "")
    assert not show.set.find("360").fanouts.active
    assert not show.set._watches


def grow(log, letters, origin=b"a"):
    """Append pictures 40 ms apart and sound: `L` is a picture that refers to the group before, as may follow a `K`."""
    for number, letter in enumerate(letters):
        item = {"K": KEY, "I": INTER, "L": DISPOSABLE, "S": AUDIO}[letter]
        log.append(frame(origin, item, number * 40), item, 1.0, leading=letter in "KL")


def test_splice_when_two_groups_lie_before_sound_that_was_heard_keeps_both_key_frames():
    left, entered = StreamLog("360"), StreamLog("720")
    entered.keep_keys(8.0)
    grow(left, "KI")
    grow(entered, "KLIKLISI")
    found = splice(left.cached, entered.keys[0], 1)
    assert [item for item, _, _ in found.prefix] == [KEY, INTER, KEY, INTER]
    assert found.start.sequence == 7


def test_pictures_whose_times_are_raised_are_none_that_refer_to_a_group_before():
    left, entered = StreamLog("360"), StreamLog("720")
    entered.keep_keys(8.0)
    grow(left, "KIIIII")
    grow(entered, "KLISIII")
    found = raise_times(splice(left.cached, entered.keys[0], 0), 90, MediaTimes(media_time, media_time, retime))
    assert [item for item, _, _ in found.prefix] == [KEY, INTER, AUDIO]
    assert [media_time(wire) > 90 for item, wire, _ in found.prefix if item is not AUDIO] == [True, True]
    assert found.start.sequence == 4


def test_pictures_whose_times_are_raised_are_shown_in_order_behind_what_is_still_to_be_shown():
    """In the order of H.264 with two B-frames: the last picture that was sent is shown 120 ms after it was decoded."""
    log = StreamLog("360")
    log.keep_keys(8.0)
    ahead_ms = [80, 120, 0, 0, 120, 0, 0] * 5

    def shown_at(wire):
        return times[wire] if wire in times else media_time(wire) + ahead_ms[media_time(wire) // 40]

    def put(wire, at_ms, shown_ms):
        made = retime(wire, at_ms, shown_ms)
        times[made] = shown_ms
        return made

    times = {}
    grow(log, "K" + "I" * 34)
    sent_ms = 400
    found = raise_times(Splice((), log.keys[0]), sent_ms, MediaTimes(media_time, shown_at, put), in_order=True)
    decoded = [media_time(wire) for _, wire, _ in found.prefix]
    assert decoded == sorted(set(decoded))
    assert decoded[0] == sent_ms + 1
    own = [number * 40 + ahead for number, ahead in enumerate(ahead_ms)][: len(decoded)]
    shown = [shown_at(wire) for _, wire, _ in found.prefix]
    assert all(after >= before for before, after in zip(decoded, shown, strict=True))
    in_order = [at for _, at in sorted(zip(own, shown, strict=True))]
    assert in_order == sorted(in_order)
    assert in_order[0] > sent_ms + 120
    assert media_time(found.start.wire) > in_order[-1] - 120
    assert found.start.sequence < 20


def test_key_frames_that_do_not_meet_are_compared_with_few():
    """A publisher of key frames each 100 ms had each viewer that might change over compare 64 of them with 64."""
    looked_at = []
    show = StreamSet(time_of=lambda wire: looked_at.append(wire) or media_time(wire))
    logs = {name: StreamLog(name) for name in ("360", "720")}
    for name, log in logs.items():
        show.put(name, log)
    for number in range(64):
        for late_ms, log in enumerate(logs.values()):
            log.append(frame(b"a", KEY, number * 100 + 50 * late_ms), KEY, number / 10)
    left, entered = (show.find(name) for name in logs)
    key = left.log.keys[-1]
    assert show.meet(key, left, entered, 6.31) is None
    assert show.meet(left.log.keys[-2], left, entered, 6.31) is None
    assert 0 < len(looked_at) < 64


def test_looks_when_each_picture_is_a_key_frame_are_no_closer_together_than_usual(show, monkeypatch):
    """A publisher of key frames alone had all viewers below the largest rendition looked at 40 times a second."""
    show.groups = dict.fromkeys(show.groups, (1, 0))
    looks, rounds = [], []
    look, look_round = SetPlace.look, _Watch._look
    monkeypatch.setattr(SetPlace, "look", lambda self, *given: looks.append(self) or look(self, *given))
    monkeypatch.setattr(_Watch, "_look", lambda self: rounds.append(self) or look_round(self))
    viewers = [show.join() for _ in range(20)]
    for one in viewers:
        choose(one, "360")
    show.run(1.0)
    looks.clear()
    rounds.clear()
    show.run(2.0)
    assert 20 * 2 <= len(looks) <= 20 * 10


def test_looks_that_are_due_together_are_made_in_one_round(monkeypatch):
    show = Show()
    places = [show.join().place for _ in range(20)]
    watch = show.set.watch(show.group)
    rounds, look_round = [], _Watch._look
    monkeypatch.setattr(_Watch, "_look", lambda self: rounds.append(self) or look_round(self))
    show.group.run(0.001)
    for number, place in enumerate(places):
        place.looks.next_at = show.group.clock() + 0.1 + number / 5000
    rounds.clear()
    for _ in range(200):
        show.group.run(0.001)
    assert watch._places
    assert 1 <= len(rounds) <= 20


def test_viewer_whose_line_is_known_to_carry_no_more_is_told_so(show):
    one = show.join()
    show.run(0.5)
    assert one.renditions.why == FIRST
    one.rule.why_not_up = "the line has carried 0.7 Mbit/s"
    show.run(0.5)
    assert one.renditions.why == "the line has carried 0.7 Mbit/s"


@pytest.mark.parametrize("same", [True, False], ids=["same log", "new log"])
@pytest.mark.parametrize("other", ["going", "silent"])
@pytest.mark.parametrize(("joined_s", "away_s"), [(1.0, 0.0), (1.0, 0.02), (1.98, 0.1), (1.98, 0.24)])
def test_viewer_when_its_rendition_is_removed_and_put_again_at_once_hears_all(show, joined_s, away_s, other, same):
    """Before anyone looks at it: neither log has what came meanwhile."""
    one = show.join()
    behind = show.join(policy=KeepAll(), limits=NO_LIMITS)
    choose(one, "")
    choose(behind, "")
    if other == "silent":
        show.run(1.0)
        show.silent.add("720")
        show.run(6.0)
    show.run(joined_s)
    assert one.place.rendition == "360"
    behind.viewer.give(0)
    log = show.logs["360"]
    show.remove("360")
    show.run(away_s)
    show.put("360", log if same else None)
    show.run(5.0)
    behind.viewer.drain()
    for viewer in (one, behind):
        assert gapless(sound_times(viewer), 20)
        assert sound_times(viewer)[-1] >= show.sound * 20 - 40


@pytest.mark.parametrize("same", [True, False], ids=["same log", "new log"])
def test_viewer_when_the_only_rendition_is_put_again_hears_all(same):
    show = Show((("360", 60_000),))
    show.run(5.0)
    one = show.join()
    show.run(1.0)
    log = show.logs["360"]
    show.remove("360")
    show.put("360", log if same else None)
    show.run(10.0)
    assert gapless(sound_times(one), 20)
    assert sound_times(one)[-1] >= show.sound * 20 - 40
    assert not show.set._starts, "they hold all that came since"


def test_viewer_of_the_largest_when_another_log_takes_its_place_goes_on(show):
    """Also where that has been published for a while, so that the largest has the same name as before."""
    one = show.join()
    choose(one, "720")
    show.run(3.0)
    assert one.place.rendition == "720"
    other = StreamLog("other")
    show.logs["spare"], show.rates["spare"] = other, 150_000
    show.groups["spare"], show.pictures["spare"], show.late_s["spare"] = show.groups["720"], show.pictures["720"], 0.0
    show.run(10.0)
    choose(one, "")
    show.run(1.0)
    del show.logs["spare"]
    show.put("720", other)
    show.run(5.0)
    assert one.sender.following in (other, show.logs["360"])
    assert gapless(sound_times(one), 20)


def serve_line(show, connection, bytes_per_s, seconds):
    """Publish for a while, with a viewer whose line takes so much."""
    for _ in range(round(seconds * 10)):
        connection.viewer.give(round(bytes_per_s / 10))
        show.run(0.1)


def test_viewer_when_the_set_says_where_to_begin_begins_there_while_that_goes_on(show):
    show.set.begins_in = "720"
    show.run(3)
    assert show.join().place.rendition == "720"
    show.silent.add("720")
    show.run(8)
    assert show.join().place.rendition == "360"


def test_lines_when_they_do_not_carry_the_largest_rendition_are_told_of_until_their_viewers_leave():
    show = Show((("720", 150_000),))
    show.set.begins_in = "720"
    show.run(6)
    good, short = show.join(), show.join()
    assert show.set.carried(show.group.clock()) == []
    serve_line(show, short, 75_000, 6)
    (carried,) = show.set.carried(show.group.clock())
    assert carried is not None
    assert carried < 0.9 * show.set.rates()["720"]
    short.place.end()
    assert show.set.carried(show.group.clock()) == []
    show.run(5)
    assert good.place.rendition == "720"


def test_lines_when_nobody_asks_are_not_noted():
    show = Show((("720", 150_000),))
    show.run(6)
    short = show.join()
    serve_line(show, short, 75_000, 6)
    assert show.set.carried(show.group.clock()) == []


@pytest.mark.parametrize(("evidence", "told"), [(100_000.0, [100_000.0]), (1e9, []), (None, [66_940.0])])
def test_line_when_its_viewer_is_in_a_smaller_rendition_says_what_it_carries(show, monkeypatch, evidence, told):
    """One that carries the largest needs nothing: its viewer goes up."""
    monkeypatch.setattr(LineMeter, "evidence", lambda self, now: evidence)
    show.set.begins_in = "720"
    show.run(6)
    viewer = show.join()
    show.run(0.5)
    choose(viewer, "360")
    show.run(5)
    assert viewer.place.rendition == "360"
    assert show.set.carried(show.group.clock()) == pytest.approx(told, rel=0.05)


def test_rendition_when_its_rate_is_expected_may_be_chosen_before_it_is_measured():
    show = Show((("720", 150_000),))
    show.run(6)
    show.rates["360"] = 60_000
    for table, value in ((show.groups, (2 * PICTURES_PER_S, 0)), (show.late_s, 0.0), (show.pictures, 150)):
        table["360"] = value
    show.logs["360"] = StreamLog("360")
    show.set.put("360", show.logs["360"], expected=55_000.0)
    show.run(0.1)
    assert show.set.rates()["360"] == 55_000.0
    show.run(10)
    assert show.set.rates()["360"] != 55_000.0
