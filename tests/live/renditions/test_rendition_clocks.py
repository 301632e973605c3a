"""The clocks of a set's members: tables of encoders, and random ones against what the same pictures should get."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.live.renditions.clocks import SetClock
from flowctl.wire.rtmp.wire import CLOCK_MASK, signed_difference

PICTURE_MS = 40
KEY_MS = 20  # key frames this far apart are the same ones, for a switch


@dataclass
class Encoder:
    """Pictures of one source, one each 40 ms since time 0, as one encoder sends them."""

    name: str
    from_s: float = 0.0  # when it connects
    until_s: float = 20.0
    first_ms: int | None = None  # timestamp of its first picture; None: those of the source
    fast_ppm: float = 0.0  # by how much its clock runs fast
    gop_ms: int = 2000
    key_at_ms: int = 0  # time of the source at which one of its key frames is
    delay_ms: float = 30.0
    late: dict[float, float] = field(default_factory=dict)  # second of the source -> further delay from then on, in ms

    def messages(self, rng):
        """Return (arrival in s, time of the source in ms, timestamp, whether it is a key frame)."""
        begin = round(self.from_s * 1000 / PICTURE_MS) * PICTURE_MS
        arrived = 0.0
        for at in range(begin, round(self.until_s * 1000), PICTURE_MS):
            own = at if self.first_ms is None else self.first_ms + (at - begin) * (1 + self.fast_ppm / 1e6)
            further = next((ms for second, ms in reversed(self.late.items()) if at >= second * 1000), 0.0)
            # In order on each connection, however much one picture is delayed.
            arrived = max(arrived, (at + self.delay_ms + rng.uniform(0, 25) + further) / 1000)
            yield arrived, at, round(own) & CLOCK_MASK, (at - self.key_at_ms) % self.gop_ms == 0


@dataclass
class Mapped:
    source_ms: int
    key: bool
    at: int | None


def run(*encoders, clocks=None, seed=1, leave=True):
    """Return the clocks and what each encoder's pictures were mapped to; one that comes again joins again."""
    clocks = clocks or SetClock()
    rng = random.Random(seed)
    moments = []
    for encoder in encoders:
        messages = list(encoder.messages(rng))
        moments.append((messages[0][0], 0, encoder.name, None))
        moments.extend((message[0], 1, encoder.name, message) for message in messages)
        moments.append((messages[-1][0], 2, encoder.name, None))
    found, members = {}, {}
    for now, what, name, message in sorted(moments, key=lambda moment: moment[:3]):
        if what == 0:
            members[name] = clocks.join(name)
        elif what == 2:
            if leave:
                clocks.leave(name)
        else:
            _, source_ms, timestamp, key = message
            at = members[name].map(timestamp, now, key=key)
            found.setdefault(name, []).append(Mapped(source_ms, key, at))
    return members, found


def shifts(mapped):
    """Return, of each picture that has a place in the set, how far it is from the time of the source."""
    return [signed_difference(picture.at, picture.source_ms) for picture in mapped if picture.at is not None]


def assert_forward(mapped):
    """No member goes back in time."""
    times = [picture.at for picture in mapped if picture.at is not None]
    assert all(signed_difference(later, earlier) > 0 for earlier, later in pairwise(times))


def worst_key_ms(one, other, from_ms):
    """Return the largest distance of the key frames of the same picture since a time of the source."""
    times = {picture.source_ms: picture.at for picture in one if picture.key and picture.at is not None}
    distances = [
        abs(signed_difference(picture.at, times[picture.source_ms]))
        for picture in other
        if picture.key and picture.at is not None and picture.source_ms >= from_ms and picture.source_ms in times
    ]
    assert len(distances) >= 3
    return max(distances)


def test_timestamps_of_the_first_member_are_those_of_the_set():
    members, found = run(Encoder("a", first_ms=123_000))
    assert shifts(found["a"]) == [123_000] * 500
    assert (members["a"].why, members["a"].moves, members["a"].late_ms(20.0)) == ("as they are", 1, 0)


@pytest.mark.parametrize("delay_ms", [0, 100, 450])
def test_outputs_of_one_encoder_keep_their_timestamps(delay_ms):
    members, found = run(Encoder("a"), Encoder("b", from_s=3.2, delay_ms=delay_ms))
    assert set(shifts(found["a"])) == set(shifts(found["b"])) == {0}
    assert (members["b"].why, members["b"].moves) == ("as those of a are", 1)


def test_lateness_is_told():
    clocks = SetClock()
    one, other = clocks.join("a"), clocks.join("b")
    for picture in range(100):
        one.map(picture * 40, picture * 0.04)
        other.map(picture * 40, picture * 0.04 + 0.3)
    assert (one.late_ms(4.0), other.late_ms(4.0)) == (0, 300)


@pytest.mark.parametrize("delay_ms", [0, 60, 200])
@pytest.mark.parametrize(("first_ms", "start_s"), [(0, 3.24), (500_000, 3.24), (0, 7.0), (CLOCK_MASK - 3000, 3.24)])
def test_key_frames_of_another_encoder_meet(first_ms, start_s, delay_ms):
    """Its clock is another one: it is measured, and then its key frames are where those of the first are."""
    members, found = run(Encoder("a"), Encoder("b", start_s, first_ms=first_ms, delay_ms=delay_ms))
    assert set(shifts(found["a"])) == {0}
    assert found["b"][0].at is None
    settled = next(picture for picture in found["b"] if picture.at is not None)
    assert settled.key
    assert settled.source_ms <= start_s * 1000 + 4000
    assert worst_key_ms(found["a"], found["b"], 12_000) <= KEY_MS
    assert members["b"].why.startswith("shifted by ")
    assert_forward(found["b"])


def test_member_whose_key_frames_do_not_meet_is_shifted_by_its_arrival():
    members, found = run(Encoder("a"), Encoder("b", 3.24, first_ms=0, key_at_ms=1000, delay_ms=100))
    assert {shift for shift in shifts(found["b"]) if not 40 <= shift <= 100} == set()
    assert members["b"].why.endswith(", by when they arrive")
    assert members["b"].moves == 2  # being measured, shifted


def test_key_frames_that_meet_by_chance_move_nothing():
    """Groups of 2.0 and 2.2 s: the distance of those that come together is another one each time."""
    members, found = run(Encoder("a", until_s=60), Encoder("b", 3.24, 60, first_ms=0, gop_ms=2200))
    assert len(set(shifts(found["b"]))) == 1
    assert members["b"].moves == 2


@pytest.mark.parametrize("fast_ppm", [-100.0, 100.0, 1000.0])
def test_clocks_that_drift_are_held_together_at_key_frames(fast_ppm):
    """In an hour 100 ppm are 0.36 s; no step is larger than a switch bears."""
    until_s = 1200
    encoders = Encoder("a", until_s=until_s), Encoder("b", 1.0, until_s, first_ms=77, fast_ppm=fast_ppm)
    _, found = run(*encoders)
    assert worst_key_ms(found["a"], found["b"], 12_000) <= KEY_MS
    assert_forward(found["b"])
    steps = [abs(later - earlier) for earlier, later in pairwise(shifts(found["b"])[300:])]
    assert 0 < max(steps) <= KEY_MS


def test_drift_without_common_key_frames_is_moved_once_it_is_apart():
    encoders = Encoder("a", until_s=900), Encoder("b", 1.0, 900, first_ms=0, fast_ppm=-3000, gop_ms=2200)
    members, found = run(*encoders)
    assert {shift for shift in shifts(found["b"]) if not -1100 <= shift <= 100} == set()
    assert "they had come to arrive 1.0 s late" in members["b"].why
    assert 3 <= members["b"].moves <= 5
    assert_forward(found["b"])
    assert set(shifts(found["a"])) == {0}


def test_member_that_comes_again_keeps_what_is_still_true():
    """The same encoder connects again, its clock goes on: no measuring."""
    clocks = SetClock()
    first = Encoder("b", 3.24, 20, first_ms=0)
    again = Encoder("b", 22, 30, first_ms=22_000 - 3240)
    members, found = run(Encoder("a", until_s=30), first, again, clocks=clocks)
    assert members["b"].why.endswith(("as before", "as those of a are", "those of a"))
    assert all(picture.at is not None for picture in found["b"] if picture.source_ms >= 22_000)
    assert worst_key_ms(found["a"], found["b"], 10_000) <= KEY_MS
    assert_forward(found["b"])


def test_member_that_begins_anew_is_measured_anew():
    again = Encoder("b", 22, 40, first_ms=0)
    members, found = run(Encoder("a", until_s=40), Encoder("b", until_s=20), again)
    assert next(picture.at for picture in found["b"] if picture.source_ms >= 22_000) is None
    assert worst_key_ms(found["a"], found["b"], 30_000) <= KEY_MS
    assert "shifted by +22" in members["b"].why or "shifted by +21.9" in members["b"].why
    assert_forward(found["b"])


def test_set_goes_on_after_all_members_have_gone():
    """All outputs of an encoder that was started again have one shift at once, and time has gone on."""
    encoders = [Encoder(name, until_s=20) for name in "abc"]
    again = [Encoder(name, 50 + 0.4 * place, 60, first_ms=round(400 * place)) for place, name in enumerate("bca")]
    members, found = run(*encoders, *again)
    for name in "abc":
        assert_forward(found[name])
        (shift,) = {signed_difference(p.at, p.source_ms) for p in found[name] if p.source_ms >= 50_000}
        assert abs(shift) <= 60
    assert worst_key_ms(found["a"], found["b"], 50_000) == 0
    assert worst_key_ms(found["c"], found["b"], 50_000) == 0
    assert members["b"].why.endswith(", to go on where the set was")
    assert members["a"].why.endswith(", as those of b are")


def test_delay_that_passes_moves_nothing():
    members, found = run(Encoder("a", until_s=60), Encoder("b", until_s=60, late={20: 5000, 25: 0}))
    assert set(shifts(found["b"])) == {0}
    assert members["b"].moves == 1


@pytest.mark.parametrize("late", ["a", "b"])
def test_member_that_stays_late_is_moved_up_at_a_key_frame(late):
    """Whichever it is, and no other moves. Its clock may be wrong: its key frames are not those of the others."""
    late_one = {"late": {20: 5000}, "key_at_ms": 1000}
    members, found = run(*(Encoder(name, until_s=60, **(late_one if name == late else {})) for name in "abc"))
    for name in "abc":
        assert_forward(found[name])
        if name != late:
            assert set(shifts(found[name])) == {0}
    last = shifts(found[late])[-1]
    assert 4900 <= last <= 5100
    assert members[late].why == f"shifted by {last / 1000:+.3f} s, they had come to arrive {last / 1000:.1f} s late"
    step = next(place for place, shift in enumerate(shifts(found[late])) if shift)
    assert found[late][step].key


def test_member_that_stays_late_keeps_its_timestamps_where_its_key_frames_say_that_they_are_right():
    members, found = run(Encoder("a", until_s=60), Encoder("b", until_s=60, late={20: 5000}))
    assert set(shifts(found["a"])) == set(shifts(found["b"])) == {0}
    assert members["b"].moves == 1


def test_clocks_that_agree_roughly_are_told_apart_by_their_key_frames():
    """Started 0.44 s after the other, from 0: taken for one clock until two key frames have come."""
    members, found = run(Encoder("a"), Encoder("b", 0.52, first_ms=77))
    assert shifts(found["b"])[0] == 77 - 520
    assert worst_key_ms(found["a"], found["b"], 5000) <= KEY_MS
    assert members["b"].why == "shifted by +0.443 s, their key frames came 0.443 s before those of a"
    assert_forward(found["b"])


def test_broken_clock_of_three_moves_no_other():
    members, found = run(
        *(Encoder(name, until_s=120) for name in "ab"), Encoder("c", 0, 120, 0, 20_000, key_at_ms=1000)
    )
    assert set(shifts(found["a"])) == set(shifts(found["b"])) == {0}
    assert max(shifts(found["c"])) <= 1500
    assert_forward(found["c"])
    assert "early" in members["c"].why or "shifted by -" in members["c"].why


def test_member_that_is_early_by_much_is_out_until_its_time_comes():
    """It would have to go back; no picture of it is squeezed between others for that."""
    encoders = Encoder("a", until_s=90), Encoder("b", until_s=90), Encoder("c", 0, 90, 0, 1_000_000, key_at_ms=1000)
    _, found = run(*encoders)
    times = [picture.at for picture in found["c"] if picture.at is not None]
    assert min(later - earlier for earlier, later in pairwise(times)) >= PICTURE_MS
    assert None in [picture.at for picture in found["c"]]


def test_member_that_repeats_its_last_pictures_goes_on_forward():
    """It connects again and sends what it does not know to have arrived: in steps of 1 ms, until its time comes."""
    clocks = SetClock()
    member = clocks.join("a")
    before = [member.map(picture * 40, picture * 0.04) for picture in range(100)]
    clocks.leave("a")
    member = clocks.join("a")
    after = [member.map(picture * 40, 4.1) for picture in range(92, 100)]
    after += [member.map(picture * 40, picture * 0.04) for picture in range(103, 110)]
    assert before[-1] == 3960
    assert after == [*range(3961, 3969), *(picture * 40 for picture in range(103, 110))]


def test_one_delayed_picture_says_nothing_of_a_clock():
    """Not even when it is the first in 10 s of which leads are taken anew."""
    clocks = SetClock()
    one, other = clocks.join("a"), clocks.join("b")
    for picture in range(1000):
        now = picture * 0.04
        one.map(picture * 40, now)
        other.map(picture * 40, now if picture % 250 else now + picture / 250 * 0.008)
        assert other.late_ms(now) == 0


def test_member_that_fell_silent_is_followed_no_more():
    """It has not left, but it shows no key frames: the others are held together by their own."""
    encoders = Encoder("a"), Encoder("b", 1, 150, 0, 500), Encoder("c", 1, 150, 0, -500)
    _, found = run(*encoders, leave=False)
    assert worst_key_ms(found["b"], found["c"], 40_000) <= KEY_MS


@pytest.mark.parametrize("jump_ms", [-100_000, -5000, 5000, 1_000_000_000])
def test_clock_that_jumps_is_measured_anew(jump_ms):
    clocks = SetClock()
    one, other = clocks.join("a"), clocks.join("b")
    found = []
    for picture in range(750):
        now, key = picture * 0.04, picture % 50 == 0
        one.map(200_000 + picture * 40, now, key=key)
        own = 200_000 + picture * 40 + (jump_ms if picture >= 310 else 0)
        found.append(Mapped(picture * 40, key, other.map(own & CLOCK_MASK, now + 0.03, key=key)))
    assert {picture.at is None for picture in found[310:349]} == {True}
    assert found[310].source_ms == 12_400
    assert [shift for shift in shifts(found[400:]) if abs(shift - 200_000) > KEY_MS] == []
    assert_forward(found)
    assert other.why == f"shifted by {-jump_ms / 1000:+.3f} s, their key frames came 0.030 s behind those of a"
    assert other.moves == 4


def test_clock_of_the_only_member_goes_on_at_once_when_it_jumps():
    clocks = SetClock()
    member = clocks.join("a")
    times = [member.map(5000 + picture * 40, picture * 0.04) for picture in range(100)]
    times += [member.map(picture * 40, 4 + picture * 0.04) for picture in range(100)]
    assert times == [5000 + picture * 40 for picture in range(200)]
    assert member.why == "shifted by +9.000 s, to go on where the set was"


def test_times_wrap_and_so_does_a_member_that_comes_later():
    start = CLOCK_MASK - 5000
    _, found = run(Encoder("a", first_ms=start), Encoder("b", 10, first_ms=4999 - 0))
    assert found["a"][126].at == 126 * 40 - 5001
    assert found["b"][0].at == found["a"][250].at == 4999
    assert worst_key_ms(found["a"], found["b"], 10_000) == 0


def test_headers_get_the_time_of_what_was_mapped_last():
    member = SetClock().join("a")
    member.map(CLOCK_MASK, 1.0)
    member.map(39, 1.04)
    assert member.last_ms == 39


@st.composite
def sets(draw):
    """Encoders of one source with key frames at the same pictures, on clocks of their own, that come and go."""
    found = []
    gop_ms = draw(st.sampled_from([1000, 2000, 4000]))
    for name in "abc"[: draw(st.integers(2, 3))]:
        at = 0.0
        for _ in range(draw(st.integers(1, 3))):
            at += draw(st.sampled_from([0.0, 0.52, 3.24, 17.0])) if found else 0.0
            until = at + draw(st.sampled_from([5.0, 20.0, 40.0]))
            first_ms = draw(st.sampled_from([None, 0, 77, 10_000_000, CLOCK_MASK - 10_000, 1 << 31]))
            fast_ppm = draw(st.sampled_from([0.0, 100.0, -100.0]))
            delay_ms = draw(st.sampled_from([0.0, 50.0, 180.0]))
            found.append(Encoder(name, at, until, first_ms, fast_ppm, gop_ms, delay_ms=delay_ms))
            at = until + 0.3
    return found


@given(sets(), st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_random_sets_hold_together(encoders, seed):
    """Each member goes forward only, is late by no more than its delay, and has its key frames where the others do."""
    _, found = run(*encoders, seed=seed)
    pictures = {}
    for name, mapped in found.items():
        assert_forward(mapped)
        begins = {e.from_s for e in encoders if e.name == name}
        for picture in mapped:
            settled = picture.source_ms / 1000 - max(b for b in begins if b * 1000 <= picture.source_ms + PICTURE_MS)
            if picture.key and picture.at is not None and settled > 13:
                pictures.setdefault(picture.source_ms, []).append(picture.at)
    for times in pictures.values():
        assert all(abs(signed_difference(at, times[0])) <= KEY_MS for at in times)


@st.composite
def odd_sets(draw):
    """Encoders that agree in nothing, whose lines stall."""
    found = []
    for name in "abcd"[: draw(st.integers(2, 4))]:
        at = 0.0
        for _ in range(draw(st.integers(1, 3))):
            at += draw(st.sampled_from([0.0, 0.3, 3.24, 17.0]))
            until = at + draw(st.sampled_from([5.0, 20.0, 60.0]))
            stalls = draw(st.sampled_from([{}, {at + 3: 1500, at + 8: 0}, {at + 3: 5000, at + 13: 200}, {at: 700}]))
            gop_ms, key_at_ms = draw(st.sampled_from([(1000, 0), (2000, 0), (2000, 1000), (2200, 0), (4000, 0)]))
            fast_ppm = draw(st.sampled_from([0.0, -100.0, 2000.0]))
            first_ms = draw(st.sampled_from([None, 0, 10_000_000, CLOCK_MASK - 10_000]))
            delay_ms = draw(st.sampled_from([0.0, 400.0]))
            found.append(Encoder(name, at, until, first_ms, fast_ppm, gop_ms, key_at_ms, delay_ms, stalls))
            at = until + 6.0  # what waits of one connection is not sent when the next one has begun
    return found


@given(odd_sets(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_no_member_goes_back_or_stays_out(encoders, seed):
    """Time goes on, and each member gets its place in some seconds, whatever the others do."""
    _, found = run(*encoders, seed=seed)
    for encoder in encoders:
        assert_forward(found[encoder.name])
        out = longest = 0
        for picture in found[encoder.name]:
            if encoder.from_s * 1000 <= picture.source_ms < encoder.until_s * 1000:
                out = out + PICTURE_MS if picture.at is None else 0
                longest = max(longest, out)
        # Measured, to the next key frame, and until the time of its last picture comes.
        assert longest <= 1500 + 4000 + 5500


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, CLOCK_MASK), st.floats(0, 3), st.booleans(), st.booleans()),
        max_size=60,
    )
)
@settings(max_examples=300, deadline=None)
def test_any_timestamps_are_borne(messages):
    """Whatever comes, times stay in 32 bits and words say how it is."""
    clocks = SetClock()
    members = {name: clocks.join(name) for name in "abc"}
    now = 0.0
    for member, timestamp, passed, key, again in messages:
        now += passed
        name = "abc"[member]
        if again:
            clocks.leave(name)
            members[name] = clocks.join(name)
        at = members[name].map(timestamp, now, key=key)
        assert at is None or 0 <= at <= CLOCK_MASK
        assert members[name].why
        assert isinstance(members[name].late_ms(now), int)
