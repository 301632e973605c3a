"""A viewer's cursor in a log: its queue, refusing and key waits, joining, return to live, ending; in any steps."""

from __future__ import annotations

import pytest
from cursor_kit import ROOMY, Follower, play, scripts
from flow_kit import AUDIO, DISPOSABLE, HEADER, INTER, KEY, LOG, RESTART, Published, frame, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.counts import as_counts, total
from flowctl.core.flow.limits import OFF_MARK
from flowctl.core.flow.policy import BROKEN_MASK, DROPPABLE_MASK, Headroom
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.outgoing.thinning import drop_droppable, thin_to_key_frame
from flowctl.reasons import DropReason
from flowctl.testing import ManualGroup

VIDEO_MASK = 1 << KEY | BROKEN_MASK


# --- the queue ---------------------------------------------------------------------------------------------------


def test_load_when_nothing_is_refused_is_what_lies_ahead():
    follower = Follower()
    assert follower.cursor.load() == (0, 0)
    assert follower.cursor.oldest_at() is None
    assert follower.cursor.caught_up
    follower.publish("K", 100)
    follower.now = 105.0
    follower.publish("II", 50)
    assert follower.cursor.load() == (200, 3)
    assert follower.cursor.oldest_at() == 100.0
    assert follower.take(1) == "K"
    assert follower.cursor.oldest_at() == 105.0
    assert not follower.cursor.caught_up
    assert follower.take() == "II"
    assert follower.cursor.caught_up


def test_age_when_messages_are_older_than_the_viewer_counts_from_its_joining():
    log = StreamLog()
    entry = log.append(b"old", KEY, 92.0)
    cursor = LogCursor(log, now=100.0, start=entry)
    assert cursor.oldest_at() == 100.0
    assert cursor.peek(1, 1) == [(KEY, b"old", 100.0)]


def test_peek_when_bounded_returns_at_most_that():
    follower = Follower(prefix=(b"1" * 10, b"2" * 10, b"3" * 10))
    follower.publish("KIII", 20)
    assert [len(item[1]) for item in follower.cursor.peek(2, OFF_MARK)] == [10, 10]
    assert [len(item[1]) for item in follower.cursor.peek(5, OFF_MARK)] == [10, 10, 10, 20, 20]
    assert [len(item[1]) for item in follower.cursor.peek(99, 11)] == [10, 10]
    assert [len(item[1]) for item in follower.cursor.peek(99, 31)] == [10, 10, 10, 20]
    assert follower.cursor.peek(0, OFF_MARK) == []
    assert follower.cursor.peek(OFF_MARK, 0) == []


def test_take_when_given_part_of_what_was_peeked_moves_just_that_far():
    follower = Follower(prefix=(frame(RESTART, HEADER, 0),))
    follower.publish("KIDAX")
    for letter in "rKIDAX":
        assert follower.take(1) == letter
    assert follower.cursor.caught_up
    with pytest.raises(AssertionError, match="more messages than the log holds"):
        follower.cursor.pass_messages(1)


def test_prefix_when_joining_is_counted_as_offered_and_handed_over_first():
    follower = Follower(prefix=(b"meta", b"codec"))
    assert as_counts(follower.cursor.balance())[0].of(HEADER) == 2
    assert follower.queued == "HH"
    assert follower.cursor.load() == (9, 2)
    follower.cursor.pass_messages(2)
    assert follower.queued == ""
    assert follower.cursor.caught_up


REFUSING = """
a class that is refused leaves the rest in order
    +KDID refuse:D +DIDA refuse +DI queued=KIIIDDDA load=(88,8) dropped:REFUSED=DD take=KDIDIADI
    waiting_for_key=False plain=True
refused inter frames of which none comes need no key frame
    log:K take refuse:ID waiting_for_key=False +AD refuse +IA take=AIA dropped=D restarts=0
a refused inter frame is waited out for headers and a key frame
    log:K take refuse:ID +IA waiting_for_key=True refuse +IDAKIDA take=AArrKIDA restarts=1
    waiting_for_key=False dropped=IID plain=True
a key frame that nobody polled for ends the wait in its place
    log:K take refuse:ID +I refuse +IA take=A +K take=rrK +I take=I
key frames that alone get through each come with headers
    log:K take refuse:ID +IAKIA poll +IAKIA poll +IAKIA poll take=ArrKAArrKAArrKA restarts=3
key frames that come to a blocked viewer replace each other
    log:K refuse:ID +IACKIA replace +IACKIA replace +IACKIA replace +IACKIA replace queued=CCCCHHKA
    refuse take=CCCCrrKA waiting_for_key=True +IKI take=rrKI
key frames that are refused too end no wait
    log:K take hold +IKIAHC poll refuse +IAK take=HCArrK dropped:HELD=KIIA
key frames with nothing lost between them bring no headers again
    log:K refuse:ID +KKIKKK take=KKrrKKK refuse +I take=I restarts=1
a refused key frame that nobody looked at is stepped over like others
    log:K refuse:KID +IAKIA take=AA restarts=0
a wait without a key frame ends after ten seconds and is counted
    log:K take refuse:ID +I refuse after:9.9 +IA poll=False after:0.1 poll=True take=Arr
    +ID oldest_s=0.0 take=ID key_waits_expired=1 restarts=0 plain=True
a wait in long groups lasts two of them
    log:K after:20 +K take refuse:ID +I refuse after:39.9 poll=False after:0.2 poll=True
a wait under a policy that refuses inter frames does not expire
    log:K take refuse:ID +I after:60 poll=False +I take= refuse +I poll=False take=
    after:10 poll=True key_waits_expired=1
a wait keeps its beginning when the queue is thinned meanwhile
    +KI*1000 thin:100,9 after:3 +A drop refuse:D refuse after:3 +A drop refuse:D refuse after:3 +A drop refuse:D refuse
    +IA take= after:1 poll=True +IA take=rrIA
sound alone needs no key frame
    log:AA refuse:ID +AA waiting_for_key=False refuse take=AA plain=True
video that begins while it is refused is waited for
    log:A refuse:KID +KIA refuse +IKI take=ArrKI
refused key frames break references although inter frames are not refused
    log:K take refuse:K +IK refuse +IKI take=rrKI
a joiner between key frames gets sound and then headers and a key frame
    log:KIA wait waiting_for_key=True +IADKIA take=ArrKIA dropped:KEY_WAIT=ID
a key frame that has come is handed over with headers before the end
    log:KI wait +IAKI finish +KI take=ArrKI caught_up=True
what comes behind a key frame that has come, and is not looked at yet, is counted as queued and never as dropped
    log:K take +A refuse:ID +ID refuse +KIID dropped=ID queued=KIIDA load=(55,5) poll=True dropped=ID
the end ends a wait for a key frame
    log:KI wait +I waiting_for_key=True finish waiting_for_key=False
"""

THINNING = """
the first key frame from which on all fits is skipped to
    +KIAIKIAKIA thin:66,99 queued=HHKKIIAA take=rrKIAKIA dropped:THINNED=KIIA restarts=1 plain=True
what fits stays
    +KIIKIA thin take=KIIKIA
messages count
    +KIIKIA thin:9999,3 take=rrKIA
of a newest group that is too large its key frame and sound stay
    +KIA +K*50 +IAXIAD*50 thin:150,99 queued=HHKAA +IDXA +KIX take=rrKAAArrKIX restarts=2
a key frame that is too large alone is waited for again
    +K*5000 +IAC thin:1000,99 queued=C waiting_for_key=True +IAXKI take=CrrKI dropped:KEY_WAIT=IAX
nothing is waited for where nothing was queued as a message in flight may be what reached the limit
    log:KI take thin:-1,0 +IA take=IA dropped=
sound that is queued alone goes without a wait
    log:KI take +AAA thin:11,99 +IA take=IA dropped=AAA
a viewer that waits for a key frame goes on to wait for the same
    log:K take refuse:ID +IAA thin:11,99 queued= +IA refuse +IAKIA take=rrKIA
an awaited key frame that has come is one to skip to
    log:K take refuse:ID +IAA refuse +KI thin:50,99 take=rrKI dropped:THINNED=AA
a key frame that is skipped to again has no headers twice
    +KIKI thin:22,99 thin:22,99 thin:22,99 take=rrKI restarts=1
refusals that begin later in the queue are tightened too
    +KIAK +I*100 refuse:X +IAX*100 refuse +IDX*100 thin:150,9 queued=HHKA take=rrKA +IKI take=rrKI
sound without video loses the oldest and keeps headers
    +HAAAAA thin:9999,2 take=HAA dropped:THINNED=AAA plain=True
sound without video that fits stays
    +AAA thin:33,3 take=AAA
control messages of what is skipped are kept
    +KICAIKI thin:9999,5 take=CrrKI
frames that go with the sound of a viewer of sound alone are waited for afterwards
    log:K +IIA refuse:KID thin:9999,0 refuse +IA take= +KI take=rrKI
dropping what may be dropped supersedes headers where frames are lost
    +KHICADX drop queued=C dropped:REQUESTED=HKIDAX +IAKI take=CArrKI
dropping what may be dropped keeps headers where no frame is lost
    log:KI take +AHDXC drop +IA take=HCIA
the way back to live leads to the newest key frame
    log:K +IAKAIKAI live=True take=rrKAI dropped:RETURNED=KIIAA
the way back to live leads nowhere from an empty queue
    log:K live=False take= dropped=
the way back to live needs a key frame ahead
    log:K +IDA live=False take=IDA dropped=
the way back to live is not for a viewer that is held
    log:K +IAKI hold +KIA live:9999,1=False take=IAKI
the way back to live ends joining
    log:KI join +AKI live=True joining_to=None take=rrKI
the way back to live hands over control messages between
    log:K +ICACKI live=True take=CCrrKI
the way back to live leaves what fits of sound alone
    log:A +AAAA live:9999,4=False live:9999,2=True take=AA dropped:RETURNED=AA
"""

LATENESS = """
all that arrives in time is handed over
    log:K +IIIAII*100 in_time:10000=IIIAII dropped=
the first late picture goes with the rest of its group
    log:K +IIIAII*100 in_time:500=IIIAI dropped:LATE=I dropped=I
what is too old goes whatever the rate
    log:K +IIAII*100 after:1.5 in_time:10000=A dropped:LATE=IIII
a key frame without a newer one goes out and what follows it is late
    log:K +IIAKI*100 after:1.5 in_time:10000=ArrK dropped:LATE=III
a key frame with a newer one is left out with its headers
    log:K +IIKIKI*100 after:1.5 in_time:10000=rrK dropped:LATE=HHKIIII
disposable frames are late at half of the target and the rest of the group after them
    log:K +DIDI*100 in_time:250=DI dropped:LATE=ID
late disposable frames are left out alone
    log:K +IDIDI*100 after:0.6 in_time:10000=III dropped:LATE=DD late=2 pictures=(5,2)
a group that was cut ends at the next key frame with its headers
    log:K +II*100 after:1.5 in_time:10000= +IAI in_time:10000=A +KII in_time:10000=rrKII dropped:LATE=IIII plain=True
sound waits longer than pictures
    log:K +IAA*100 after:1.5 in_time:10000=AA
the oldest sound goes last
    log:K +IA*100 after:2.5 +A in_time:10000=A dropped:LATE=IA
sound stays where no picture could give way to it
    log:K +A*100 after:9 in_time:10000=A
headers and control messages always go
    log:K +CHII*100 after:5 in_time:10000=CH
a joiner is not judged
    log:K +II*100 after:5 join in_time:10000=II
pictures are counted up to the place and for a viewer that wants them
    log:K +IDAII*100 after:0.6 in_time:10000=IAII pictures=(4,1) refuse:KI pictures=(0,0)
a cut is not given up for 17 s without a key frame as between those of cameras
    log:K +II*100 after:1.5 in_time:10000= +II after:17 poll +II in_time:10000= +KI in_time:10000=rrKI
a queue behind which all is held is not cut
    log:K +IIA*100 after:1.5 +KIIA hold +II in_time:10000=IIAKIIA
a queue behind which key and inter frames are refused is not cut
    log:K +IIA*100 after:1.5 +KIIA refuse:KI +II in_time:10000=IIAKIIA
what a cut takes is late whatever else is refused meanwhile
    log:K +IAI*100 after:1.5 refuse:A +AIA in_time:10000=A dropped:LATE=III dropped:REFUSED=AA hold +XAI refuse +AIK
    in_time:10000=ArrK dropped:LATE=IIIII dropped:HELD=AX dropped=IIIIIAAAX plain=True
leading pictures after a cut are left out but not those of a group that follows a whole one
    log:K +II*100 after:1.5 in_time:10000= +AkidAdIDIkidI in_time:10000=ArrKAIDIKIDI
    dropped:LATE=II dropped:KEY_WAIT=IDD plain=True
leading pictures that come one by one are left out and their viewer is served alone until then
    log:K +I*100 after:1.5 in_time:10000= +k in_time:10000=rrK plain=False +i in_time:10000= +d in_time:10000=
    +A in_time:10000=A +d in_time:10000= plain=False +I in_time:10000=I plain=True
leading pictures of a key frame that is thinned to are left out
    log:K +IIIkidI*100 thin:9999,5 in_time:10000=rrKI
leading pictures of a key frame that is live are left out
    log:K +IIIkidI*100 live:9999,5=True in_time:10000=rrKI
leading pictures of two key frames in a row do not come back
    log:K +I*100 after:1.5 in_time:10000= +kiI poll refuse:I +II refuse +kdI poll in_time:10000=rrKIrrKI
"""


@pytest.mark.parametrize("script", scripts(REFUSING + THINNING + LATENESS))
def test_cursor_in_a_script_says_what_it_must(script):
    play(script)


# --- refusing ----------------------------------------------------------------------------------------------------


def test_refuse_when_the_same_again_opens_no_second_gate():
    follower = Follower()
    follower.publish("KI")
    for _ in range(5):
        follower.publish("D")
        follower.cursor.refuse(1 << MessageClass.DISPOSABLE, DropReason.REFUSED, follower.now)
    assert len(follower.cursor.refusals.ahead) == 1
    follower.publish("II")
    follower.cursor.refuse(1 << MessageClass.AUDIO, DropReason.REFUSED, follower.now)
    assert len(follower.cursor.refusals.ahead) == 2
    assert follower.take() == "KIDII"


# --- joining -----------------------------------------------------------------------------------------------------


def test_joining_when_it_lasts_refuses_nothing_and_counts_nothing_against_limits():
    log = StreamLog()
    key = log.append(b"k" * 100, KEY, 99.0, restart=(b"meta", b"codec"))
    log.append(b"i" * 50, INTER, 99.5)
    cursor = LogCursor(log, now=100.0, start=key, prefix=key.gop.restart)
    assert cursor.load() == (159, 4)
    assert cursor.counted(0.0) == (0, 0, None)
    cursor.refuse(BROKEN_MASK, DropReason.REFUSED, 100.0)
    log.append(b"i" * 50, INTER, 101.0)
    assert cursor.load() == (209, 5)
    assert cursor.counted(0.0) == (50, 1, 101.0)
    assert not cursor.plain
    cursor.pass_messages(3)
    assert cursor.load() == (100, 2)
    assert cursor.counted(0.0) == (50, 1, 101.0)
    assert not cursor.cache_taken
    cursor.pass_messages(1)
    assert cursor.counted(0.0) == (50, 1, 101.0)
    assert cursor.cache_taken
    cursor.end_joining(DropReason.REFUSED, 101.0)
    log.append(b"i" * 50, INTER, 101.0)
    assert cursor.load() == (50, 1)


# --- leaving and ending ------------------------------------------------------------------------------------------


def test_finish_when_called_ends_at_what_was_published():
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("IA")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.cursor.finish(follower.now)
    follower.publish("IAKI")
    assert follower.cursor.poll(follower.now + 60) is False
    follower.cursor.refuse(DROPPABLE_MASK, DropReason.REFUSED, follower.now)
    thin_to_key_frame(follower.cursor, ROOMY, follower.now)
    follower.cursor.finish(follower.now)
    accepted, dropped, queued = as_counts(follower.cursor.balance())
    assert accepted.total_messages == 2
    assert queued.total_messages + total(dropped.values()).total_messages == 2
    follower.take()
    assert follower.cursor.caught_up


@pytest.mark.parametrize("state", ["plain", "copies", "gates", "wait", "expired", "joining", "finished"])
def test_drop_everything_in_any_state_leaves_nothing_uncounted(state):
    follower = Follower("K")
    if state == "joining":
        follower.cursor.joining_to = follower.log.tail
    if state in ("gates", "wait", "expired"):
        follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
        follower.publish("IA")
    if state in ("wait", "expired"):
        follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
        follower.take()
    if state == "expired":
        follower.cursor.poll(follower.now + 20)
    if state == "copies":
        follower.publish("ICKI")
        thin_to_key_frame(follower.cursor, Headroom(22, 2, 0, 0), follower.now)
    follower.publish("CHIA")
    if state == "finished":
        follower.cursor.finish(follower.now)
    follower.cursor.drop_everything(DropReason.UNFOLLOWED)
    taken = len(follower.got)
    follower.publish("CHKIA")
    accepted, dropped, queued = as_counts(follower.cursor.balance())
    assert queued.total_messages == 0
    assert accepted.total_messages == taken + total(dropped.values()).total_messages
    assert follower.cursor.load() == (0, 0)


NO_DISPOSABLE = 1 << DISPOSABLE
KEY_FRAMES = NO_DISPOSABLE | 1 << INTER
SOUND = KEY_FRAMES | 1 << KEY


class Reader:
    """A cursor at the start of a log, past joining, and what was taken from it."""

    def __init__(self, **options):
        self.group = ManualGroup()
        self.published = Published(self.group)
        self.cursor = LogCursor(self.published.log, now=self.group.now(), **options)
        self.cursor.end_joining(DropReason.REFUSED, self.group.now())
        self.taken = []

    @property
    def now(self):
        return self.group.now()

    def take(self, count=1000, budget=1 << 40):
        """Take up to `count` messages as far as `peek` goes, and check load and accounts on the way."""
        self.check()
        while count and (items := self.cursor.peek(count, budget)):
            self.cursor.pass_messages(len(items))
            self.taken += [wire for _, wire, _ in items]
            count -= len(items)
            self.check()
        return self.text()

    def text(self):
        """What was taken: number of each message of the log, R for a restart message."""
        frames, rest = parse(b"".join(self.taken))
        assert not rest
        return [number if origin == LOG else "R" for origin, _, number, _ in frames if origin in (LOG, RESTART)]

    def check(self):
        accepted, dropped, queued = as_counts(self.cursor.balance())
        lost = total(dropped.values())
        sent = accepted - lost - queued
        assert sent.total_messages == len(self.taken)
        assert sent.total_bytes == sum(map(len, self.taken))
        assert min(queued.messages) >= 0
        size, messages = self.cursor.load()
        assert (queued.total_bytes, queued.total_messages) == (size, messages)


def mask(*classes):
    return sum(1 << item for item in classes)


def test_refuse_when_policy_changes_on_the_way_counts_each_stretch():
    reader = Reader()
    reader.published.script("DA")
    reader.cursor.refuse(mask(DISPOSABLE), DropReason.REFUSED, reader.now)
    reader.published.script("DA")
    reader.cursor.refuse(mask(DISPOSABLE, AUDIO), DropReason.HELD, reader.now)
    reader.published.script("DAX")
    reader.cursor.refuse(0, DropReason.REFUSED, reader.now)
    reader.published.script("DA")
    assert reader.cursor.load()[1] == 6
    assert reader.take() == [0, 1, 3, 6, 7, 8]
    dropped = as_counts(reader.cursor.balance())[1]
    assert {reason: counts.by_name() for reason, counts in dropped.items()} == {
        DropReason.REFUSED: {"disposable": 1},
        DropReason.HELD: {"disposable": 1, "audio": 1},
    }
    assert reader.cursor.plain is True


@given(
    st.lists(
        st.one_of(
            st.text("CHKIDAX", min_size=1, max_size=6).map(lambda text: ("script", text)),
            st.sampled_from([0, mask(DISPOSABLE), mask(INTER, DISPOSABLE), mask(KEY, INTER, DISPOSABLE)]).map(
                lambda value: ("refuse", value)
            ),
            st.integers(1, 5).map(lambda count: ("take", count)),
            st.integers(0, 8).map(lambda count: ("thin", count)),
            st.just(("drop", 0)),
        ),
        max_size=30,
    )
)
@settings(max_examples=150, deadline=None)
def test_cursor_over_random_histories_when_read_in_any_steps_gives_the_same(history):
    readers = [(Reader(), 1 << 40), (Reader(), 1)]
    for action, value in history:
        for reader, budget in readers:
            cursor = reader.cursor
            if action == "script":
                reader.published.script(value)
            elif action == "refuse":
                cursor.refuse(value, DropReason.REFUSED, reader.now)
            elif action == "take":
                reader.take(value, budget)
            elif action == "thin":
                thin_to_key_frame(cursor, Headroom(1 << 40, value, 0.0, 0), reader.now)
            else:
                drop_droppable(cursor, DropReason.REQUESTED, reader.now)
            reader.check()
    texts = [reader.take(1000, budget) for reader, budget in readers]
    assert texts[0] == texts[1]
    numbers = [item for item in texts[0] if item != "R"]
    assert numbers == sorted(set(numbers))
