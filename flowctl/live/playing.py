"""A play of a live connection: it waits for its stream, follows the log, pauses and mutes.

A player follows the log of its stream (`Stream.join`) behind the replies of its session. It is told that the publisher
went or came by the log, so that the notice stands at its place between the frames; a player that has left the log,
paused, is told by the session.

Where the stream is one of several renditions, a player has a seat in the set of them (`RenditionSet`) instead, whose
logs tell it of the end. It has none while there is no picture yet to begin with.

`ViewerSession` is what a session that plays is to hub, oversight, records and operators, whatever protocol its peer
speaks: what a slow one's input does, its figures, what is set for its stream, what is told of its end. The session of a
protocol derives from it and adds the protocol.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import structlog

from flowctl.connection import Session
from flowctl.core.fanout.following import FollowPlace
from flowctl.core.flow.counts import NO_COUNTS, Counts, total
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import LIVE_POLICIES, DropPolicy, Thin, Verdict
from flowctl.core.flow.state import VIDEO_CLASSES, MessageClass, SendState, StateChange
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.episodes import VIEWER_SLOW, Episode, EpisodeWords
from flowctl.core.text.addresses import address_of
from flowctl.errors import LimitExceededError, LocalProtocolError
from flowctl.live.access.request import LiveRequest, Why
from flowctl.live.config import LiveConfig
from flowctl.live.hub import Hub, line_fields
from flowctl.live.renditions.renditionset import RenditionSet, Seat
from flowctl.live.settings.levels import Role
from flowctl.live.strays import SILENT, STRAY_ENDS
from flowctl.live.stream import StartPlace, Stream
from flowctl.log import redact_text
from flowctl.reasons import CloseReason, DropReason
from flowctl.wire.streams.wirelog import WireLog

_NO_WORD: Final = re.compile(r"[^A-Za-z]+")
_SAID_CHARS: Final = 60
_log: Final = structlog.get_logger("flowctl.live")
_FLOW: Final = "flow control"
CONTROL_LANE: Final = "control_lane"
"""Name of the limits on the control lane of a Sender, `control_bytes` and `control_messages` of its settings. A peer
that exceeds them makes the server answer, and does not read the answers."""
_SWITCH_LINES, _SWITCH_LINE_S = 10, 20.0
"""Switches of a viewer that are logged at once, and the time for each further one: that of a step up. A publisher whose
renditions come and go could have all its viewers change over several times a second; records and figures have all."""
_CONTROL_BYTES_PER_S: Final = 16 * 1024
"""Input that a viewer at its soft limit or above may still send: far more than its acknowledgements, pongs and close
take, so that they are seen, and too little to make the server work."""


@dataclass(frozen=True, slots=True)
class Muted:
    """Another policy, with audio or video refused in every state (receiveAudio, receiveVideo)."""

    policy: DropPolicy
    audio: bool
    video: bool

    def decide(self, state: SendState, message_class: MessageClass) -> Verdict:
        if (message_class is MessageClass.AUDIO and not self.audio) or (
            message_class in VIDEO_CLASSES and not self.video
        ):
            return Verdict.DROP
        return self.policy.decide(state, message_class)

    def thin(self, state: SendState) -> Thin:
        return self.policy.thin(state)

    def patience(self, message_class: MessageClass) -> float:
        return self.policy.patience(message_class)


class Wants(NamedTuple):
    """What a player asks of a stream that is one of several renditions."""

    tracks: bool = False  # it takes all tracks of a publication, and so what is published in the stream itself
    track: int | None = None  # that track alone
    codecs: frozenset[str] = frozenset()  # of pictures, which it says that it takes


RENDITIONS: Final = Wants()


def track_of(query: Mapping[str, str]) -> int | None:
    """Return the track that the query of an address asks for, as ``?track=1``. None: none, or no number of one."""
    text = query.get("track", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 4 else None


class PlayWords:
    """Messages of a play to its player in its protocol; this base sends none."""

    __slots__ = ()
    trouble: EpisodeWords = VIEWER_SLOW  # what the log says of a player that is slow
    place: str = ""  # address that it is at, where the log is to name more than its peer

    def begin(self, *, send: bool) -> None:
        """It plays from now on; not `send`: the log tells the player."""

    def wait(self, *, send: bool) -> None:
        """It waits for a publisher from now on; not `send`: the log tells the player."""

    def repeat(self) -> None:
        """Tell the player once more which of the two it is."""

    def fail(self, why: str) -> None:
        """Tell the player why the connection is about to end."""


class Playing:
    """The stream that the peer plays; one per connection. Its connection's thread."""

    __slots__ = (
        *("_begun", "_connection", "_episode", "_hub", "_seat", "_viewer", "_wants", "_wire", "_words", "audio"),
        *("began_at", "paused", "stream", "video", "waiting", "waits_until"),
    )

    def __init__(
        self,
        viewer: ViewerSession,
        words: PlayWords,
        hub: Hub,
        stream: Stream,
        wire: WireLog,
        wants: Wants = RENDITIONS,
    ) -> None:
        self._viewer = viewer
        self._connection = viewer.connection
        self._words = words
        self._hub = hub
        self._wire = wire
        self._wants = wants
        self._seat: Seat | None = None  # its place among renditions. None: it has none, or follows `_wire`.
        self.audio = self.video = True  # whether the player wants them
        self._episode: Episode | None = None  # most viewers have no trouble at all
        self.stream = stream
        self._begun = False  # whether it follows, or is to as soon as there is something
        self.waiting = True  # whether it waits for a publisher
        self.began_at = self._connection.now()
        # when waiting for a publisher is given up. None: it is published, or the wait has no limit.
        self.waits_until: float | None = None
        self.paused = False

    # -- begin and wait

    def begin(self) -> StartPlace:
        self._viewer.put_settings()
        # In this order: what ends the stream after the look stands in the log that the player then follows.
        place = self.stream.start_place(self._wire)
        self.waiting = self.stream.ended
        if self.waiting:
            self._words.wait(send=True)
            self._wait()
        else:
            self._words.begin(send=True)
            self._tell_start()
        return place

    def follow(self, place: StartPlace, since: float | None = None) -> None:
        """Follow the stream from `place`, or take a seat among its renditions if there are any.

        What it gets of these begins with the last key frame, or with the first one from `since` on, in seconds.
        """
        self._begun = True
        renditions = self._renditions
        if renditions is not None and not renditions.sound_alone and not self._over:
            track = self._wants.track if renditions.of_tracks and not renditions.ladder else None
            self._seat = renditions.view(
                self._connection, self._wire.wire_format, track=track, codecs=self._wants.codecs, since=since
            )
            if self._seat is not None:
                self.waits_until = None
            elif track is not None and self.waits_until is None:  # it may come; a mistake must not wait for ever
                self._wait()
                _log.info("track not there", **line_fields(self._connection, self.stream.name), track=track)
            return
        if self._wire.frozen:
            self._wire = self.stream.rejoin_tracks(self._wire)
            place = self.stream.start_place(self._wire)
        start, prefix, wait = place
        FollowPlace(self._connection, self._wire.fanouts, start=start, prefix=prefix, wait_for_key=wait)

    @property
    def log(self) -> StreamLog:
        """The log that it follows, or is to follow, where it has no seat."""
        return self._wire.log

    def rejoin(self) -> StartPlace:
        """Take the log of the publication that there is now, or comes next; return where a viewer starts in it."""
        self._wire = self.stream.rejoin(self._wire)
        return self.stream.start_place(self._wire)

    def reserve(self) -> Callable[[], None] | None:
        """Have what renditions there are keep what it is to `follow` later; what is returned gives that up."""
        found = self._renditions
        return None if found is None else found.begin_format(self._wire.wire_format)

    @property
    def _renditions(self) -> RenditionSet | None:
        """The set that it has a place in. None: the player gets all that is published in the stream."""
        found = self._hub.renditions.find(self.stream)
        wants = self._wants
        if found is None or (wants.tracks and not (wants.track is not None and found.of_tracks)):
            return None
        return found

    @property
    def may_find_seat(self) -> bool:
        """Whether there are renditions, and it is not known yet that they are sound alone."""
        renditions = self._renditions
        return renditions is not None and not renditions.sound_alone

    def renditions_changed(self) -> None:
        """Find a place anew, if there is none here any more; a player that waits does so when it is published."""
        if self._begun and not (self.paused or self.waiting or self._sits_well() or self._hears_end()):
            self._leave_log()
            self.follow(self.stream.start_place(self._wire))

    def _hears_end(self) -> bool:
        """Whether its set ends because the publication does, so that its seat is where it hears of that."""
        seat, publisher = self._seat, self.stream.publisher
        return seat is not None and (publisher is None or (publisher is seat.renditions and self._renditions is None))

    @property
    def _over(self) -> bool:
        """Whether its log has ended for good: it gets what is left there, and no part of what follows."""
        return self._seat is None and self._wire.wire_format.ends and self._wire.log.ended

    def _sits_well(self) -> bool:
        if self._over:
            return True
        renditions, seat = self._renditions, self._seat
        if renditions is None or renditions.sound_alone:
            return seat is None and self._connection.place is not None and not self._wire.frozen
        return seat is not None and seat.renditions is renditions and not seat.ended

    def stream_ended(self) -> None:
        """Wait from now on, if the publisher has gone for good: the hub's word may be outdated by now."""
        if self.stream.ended:
            self._note_end()
            self._wait()

    def stream_published(self) -> None:
        if not self.stream.ended:
            self.waits_until = None
            self._note_end()  # where the stream was back before `stream_ended` ran: the log has told the player
            told = None
            if self._begun and not (self.paused or self._sits_well()):  # what it follows tells it no beginning
                told = self._leave_log()
            self._note_begin(told=told)
            if self._begun and self._connection.place is None and not self.paused:
                self.follow(self.stream.start_place(self._wire))

    def _wait(self) -> None:
        wait_s = self.settings.rtmp.limits.player_wait_s
        self.waits_until = self._connection.now() + wait_s if wait_s else None

    def _note_end(self) -> None:
        """Let the viewer wait from now on; one that is paused is told here, others by the log."""
        if not self.waiting:
            self.waiting = True
            self._words.wait(send=self._connection.place is None)

    def _note_begin(self, *, told: bool | None = None) -> None:
        """Let it play from now on if it waits; it is told as in `_note_end`, unless the log that it left has `told`."""
        if self.waiting:
            self.waiting = False
            self._words.begin(send=self._connection.place is None and not told)
        self._tell_start()

    def _tell_start(self) -> None:
        for observer in self._hub.observers:
            observer.play_started(self._connection, self.stream.name, self._connection.now())

    # -- what is due

    @property
    def quiet_at(self) -> float | None:
        """Time at which its episode of trouble ends if nothing happens, or is told of again. None: neither."""
        return None if self._episode is None else self._episode.due_at

    def check_quiet(self, now: float) -> None:
        if self._episode is not None:
            self._episode.check(now)

    def check_wait(self, now: float) -> None:
        if self.waits_until is not None and now >= self.waits_until:
            limit_s = self.settings.rtmp.limits.player_wait_s
            what = "" if self.waiting else f"track {self._wants.track} of "
            text = f"nobody published {what}{self.stream.name} within {limit_s:g} s"
            self._words.fail(text)
            raise LimitExceededError("player_wait_s", limit_s, limit_s, text)

    # -- at the player's word

    def pause(self, *, pause: bool) -> None:
        if self.paused == pause:
            return
        self.paused = pause
        if not pause:
            place = self.stream.start_place(self._wire)
            if self.stream.ended:
                self._note_end()  # the log's word about it is before the place
            else:
                self._note_begin()
            self.follow(place)
        elif self._connection.place is not None:
            self._leave_log()

    def _leave_log(self) -> bool | None:
        """Stop following the log; what it was still to tell the player, the wire session tells it.

        Returns whether the player has heard from it that the stream is published; None: there was no log.
        """
        place, sender = self._connection.place, self._connection.sender
        if place is None:
            return None
        before = sender.statistics().dropped.get(DropReason.UNFOLLOWED, NO_COUNTS).of(MessageClass.CONTROL)
        place.end()
        published = not self._wire.log.ended
        if self._seat is not None:
            published = self._seat.published
            self._seat.leave()
            self._seat = None
        lost = sender.statistics().dropped.get(DropReason.UNFOLLOWED, NO_COUNTS).of(MessageClass.CONTROL) - before
        # Begin and end take turns, so an even number of lost ones changes nothing. Where the hub's own word has not
        # come yet, it will be sent, for there is no log any more.
        if lost % 2 and published is not self.waiting:
            self._words.repeat()
        return published is not bool(lost % 2)

    def mute(self, *, audio: bool | None = None, video: bool | None = None) -> None:
        self.audio = self.audio if audio is None else audio
        self.video = self.video if video is None else video
        self._viewer.put_policy()

    # -- what is set for those who play the stream

    @property
    def settings(self) -> LiveConfig:
        return self._hub.config.at(self.stream.name, Role.VIEWER)

    def settings_changed(self) -> None:
        if self.waiting:
            self._wait()

    # -- trouble and the end

    def ledger_entry(self, entry: LedgerEntry) -> None:
        fields = line_fields(self._connection, self.stream.name)
        if entry.kind is LedgerKind.SWITCH:
            book, play_s = self._connection.renditions, self._connection.now() - self.began_at
            if book is not None and book.ups + book.downs <= _SWITCH_LINES + play_s / _SWITCH_LINE_S:
                _log.info("rendition switched", **fields, why=entry.why, after_s=round(entry.duration_s, 1))
            return
        if self._episode is None:
            more = {"to": self._words.place} if self._words.place else {}
            connection, words = self._connection, self._words.trouble
            self._episode = Episode(
                fields | more, connection.why, self._dropped, words, connection.core.host.shared_stall
            )
        self._episode.note_entry(entry, closed=self._connection.sender.closed)

    def _dropped(self) -> Counts:
        """Return the drops of this viewer, for its episodes; not those that it asked for itself."""
        dropped = self._connection.sender.statistics().dropped
        return total(counts for reason, counts in dropped.items() if reason is not DropReason.UNFOLLOWED)

    def end(self, why: str) -> None:
        connection = self._connection
        if connection.place is not None:
            connection.place.end()
        if self._seat is not None:
            self._seat.leave()
        # Also out of what waits to be sent to it: what it was offered of the stream is settled when it leaves.
        self.stream.leave(self._wire)
        self._hub.leave(self.stream, self._viewer)
        if self._episode is not None:
            self._episode.end(connection.now(), silent=True)
        statistics, book, now = connection.sender.statistics(), connection.renditions, connection.now()
        _log.info(
            "play ended",
            **line_fields(connection, self.stream.name),
            why=why,
            after_s=round(now - self.began_at, 1),
            sent=statistics.sent.by_name(),
            dropped={reason.value: counts.by_name() for reason, counts in statistics.dropped.items()} or 0,
            changes=statistics.transitions,
            longest_stall_s=round(statistics.longest_stall_s, 2),
            **({} if book is None else {"renditions_s": {name: round(s, 1) for name, s in book.seconds(now).items()}}),
        )


def refusal_word(why: Why, by: str) -> str:
    """Return why a request was refused, in the word of records: ``auth``, ``no stream``, ``undecided``, or `by`."""
    return {Why.UNAUTHORIZED: "auth", Why.NOT_FOUND: "no stream", Why.UNAVAILABLE: "undecided"}.get(why, by)


class ViewerSession(Session):
    """A session that may play a stream."""

    __slots__ = (
        *("_config", "_hub", "_limit_hit", "_own_limits", "_own_times", "_played", "_playing", "_policy_name"),
        *("harmless", "refusal", "user_agent"),
    )

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._config = hub.config
        self._playing: Playing | None = None
        self._played: LiveRequest | None = None  # what it plays. None: nobody is told of its end
        self._limit_hit: str | None = None
        # Of its Sender: limits and times of its stream and role, if it has any, and the policy without what is muted.
        self._own_limits: Limits | None = None
        self._own_times = False
        self._policy_name = hub.config.policy
        # why its last request to play or publish was refused, in a word of records. None: none was.
        self.refusal: str | None = None
        self.user_agent = ""
        # whether a connection that ends so says nothing against its peer: it was let in, could not be decided about, or
        # is what a page can have a browser open
        self.harmless = False

    @property
    def stray(self) -> str:
        """Why it is a connection of a probe or a scanner; empty: it was let in, or has asked for something."""
        return "" if self.connection.receiver.bytes_in else SILENT

    @property
    def role(self) -> str:
        return "" if self._playing is None else "viewer"

    def behaves(self) -> bool:
        """Return whether it plays: a connection that does not begin in time, or breaks a limit, is ended anyway."""
        return self._playing is not None

    def streams(self) -> list[str]:
        playing = self._playing
        return [] if playing is None else [playing.stream.name]

    def ask_to_reconnect(self) -> None:
        """Ask the peer to connect again: the server is going down. Without words for it, a play goes on to its end."""

    def record_columns(self, now: float) -> dict[str, Any]:
        del now
        return {"refusal": self.refusal}

    # -- what the hub asks for

    @property
    def peer(self) -> tuple[str, int]:
        return self.connection.peer

    @property
    def number(self) -> int:
        return self.connection.number

    def on_thread(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call on the connection's thread, soon; not at all once the connection is over.

        Where too many calls wait already, this viewer would miss what it has to know: it ends, and not who calls.
        """
        try:
            self.connection.call_soon(callback, *args)
        except LocalProtocolError as error:
            self.connection.core.handler_failed("on_thread", error)
            self.connection.close(CloseReason.INTERNAL, str(error))

    def stream_ended(self, stream: Stream) -> None:
        if self._playing is not None and self._playing.stream is stream:
            self._playing.stream_ended()

    def stream_published(self, stream: Stream) -> None:
        if self._playing is not None and self._playing.stream is stream:
            self._playing.stream_published()

    def renditions_changed(self, stream: Stream) -> None:
        if self._playing is not None and self._playing.stream is stream:
            self._playing.renditions_changed()

    def server_stops(self) -> None:
        """The server stops, and the queue goes out: the last moment to say so. RTMP has asked to reconnect."""

    # -- limits and trouble

    def work_exceeded(self, error: LimitExceededError, *, ends: bool) -> None:
        """Count and log that an episode begins in which this peer takes too much of the thread, or note its end."""
        self._tell_limit(error.limit, error.value, error.maximum)
        if ends:
            self._limit_hit = error.limit
            return
        self._hub.limit_hit(error.limit)
        peer, work_s = address_of(self.peer), round(self.connection.work.work_s, 3)
        fields = {"limit": error.limit, "value": round(error.value, 3), "maximum": error.maximum, "work_s": work_s}
        _log.warning("input slowed", peer=peer, connection=self.number, **fields)

    def _ended_by(self, error: LimitExceededError) -> None:
        self._limit_hit = error.limit
        self._tell_limit(error.limit, error.value, error.maximum)

    def _tell_limit(self, limit: str, value: float | None, maximum: float | None) -> None:
        for observer in self._hub.observers:
            observer.limit_hit(self.connection, limit, value, maximum, self.connection.now())

    def send_state_changed(self, state: SendState, change: StateChange) -> None:
        """Pause input at SOFT_LIMIT and above: a peer that does not read makes no work. Under the Sender's lock."""
        connection = self.connection
        if state >= SendState.SOFT_LIMIT and change.old < SendState.SOFT_LIMIT:
            connection.pause_input(_FLOW, "soft limit", control_bytes=_CONTROL_BYTES_PER_S)
        elif state < SendState.SOFT_LIMIT <= change.old:
            connection.resume_input(_FLOW)

    def ledger_entry(self, entry: LedgerEntry) -> None:
        for observer in self._hub.observers:
            observer.ledger_entry(self.connection, entry)
        if self._playing is not None and entry.kind is not LedgerKind.CLOSE:
            self._playing.ledger_entry(entry)

    # -- what its level sets, and the end

    @property
    def _settings(self) -> LiveConfig:
        """Return the settings of its role in its stream, where it has one."""
        return self._hub.config if self._playing is None else self._playing.settings

    def put_settings(self, limits: Limits | None = None, *, changed: bool = False) -> None:
        """Put in force what is set for it; `limits`: those that the server was given just now, `changed`: all it has.

        Its own limits, those of its stream and role, are put back where they end; what somebody has set for this
        connection meanwhile stays.
        """
        usual, mine, sender = self._hub.config, self._settings, self.connection.sender
        own = mine.limits if mine.limits != usual.limits else None
        if own is not None and (limits is not None or own != self._own_limits):
            limits = own
        elif own is None and limits is None and sender.limits == self._own_limits:
            limits = usual.limits
        if limits is not None and limits != sender.limits:
            sender.set_limits(limits)
        own_times = mine.sender != usual.sender
        if (changed or own_times or self._own_times) and mine.sender != sender.settings:
            sender.set_settings(mine.sender)
        self._own_limits, self._own_times = own, own_times
        if changed or mine.policy != self._policy_name:
            self._policy_name = mine.policy
            self.put_policy()
        if changed and self._playing is not None:
            self._playing.settings_changed()

    def put_policy(self) -> None:
        """Let the Sender decide by its policy, with what its player has muted."""
        policy, playing = LIVE_POLICIES[self._policy_name], self._playing
        if playing is not None and not (playing.audio and playing.video):
            policy = Muted(policy, playing.audio, playing.video)
        self.connection.sender.set_policy(policy)

    def _end_playing(self, why: str) -> None:
        playing, self._playing = self._playing, None
        if playing is not None:
            playing.end(why)
            if not (playing.audio and playing.video):  # muting is for this play alone
                self.put_policy()
            self.put_settings()
        played, self._played = self._played, None
        if played is not None:
            self._hub.gate.note_end(played, why)

    def closed(self, reason: CloseReason, details: str) -> None:
        connection = self.connection
        details = redact_text(details)  # the words of an error may quote the peer
        if reason is CloseReason.LIMIT_HIT and self._limit_hit is None:
            # Of all limits this one is the Sender's: the wire session knows nothing of it.
            self._limit_hit = CONTROL_LANE
            self._tell_limit(CONTROL_LANE, None, None)
        if connection.secure and not connection.receiver.bytes_in:
            self.harmless = True  # a browser that does not trust the certificate leaves without a word
        if self._limit_hit is not None:
            self._hub.limit_hit(self._limit_hit)
        self._end_playing(f"{reason.value}: {details}" if details else reason.value)
        counted = False
        if reason in STRAY_ENDS and self._limit_hit is None and (stray := self.stray):
            if reason is CloseReason.PROTOCOL_ERROR:  # each that breaks it in another way is told of
                stray = f"{stray}: {_NO_WORD.sub(' ', details)[:_SAID_CHARS].strip()}"
            counted = not self._hub.strays.is_first(connection.peer[0], self.protocol, stray)
        if not counted:
            _log.info(
                "connection closed",
                connection=connection.number,
                peer=address_of(connection.peer),
                reason=reason.value,
                details=details,
                **({} if self._limit_hit is None else {"limit": self._limit_hit}),
                after_s=round(connection.now() - connection.opened_at, 1),
                work_s=round(connection.work.work_s, 3),
            )
        for observer in self._hub.observers:
            if observer.hears_of_strays or not counted:
                observer.closed(connection, reason, details, self._limit_hit)

    def _refused(self, what: str, stream: str, error: LimitExceededError) -> None:
        self.refusal = "limit"
        self._hub.refused(what, self.connection, stream, error)

    def _fields(self, stream: str) -> dict[str, Any]:
        return line_fields(self.connection, stream)
