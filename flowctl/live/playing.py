"""What a live connection does on the message stream on which it plays: it waits, follows the log, pauses and mutes.

A player follows the log of its stream (`Stream.join`) behind the replies of the wire session. It is told that the
publisher went or came by the log, so that the notice stands at its place between the frames; a player that has left
the log, paused, is told by the wire session.
"""

from __future__ import annotations

from typing import Final

import structlog

from flowctl.connection import Connection
from flowctl.errors import LimitExceededError
from flowctl.fanout.following import FollowPlace
from flowctl.flow.counts import NO_COUNTS, Counts, total
from flowctl.flow.ledger import LedgerEntry
from flowctl.flow.limits import Limits
from flowctl.flow.policy import LIVE_POLICIES, DropPolicy, Thin, Verdict
from flowctl.flow.state import MessageClass, SendState
from flowctl.live.config import LiveConfig
from flowctl.live.hub import Hub, Viewer, line_fields
from flowctl.live.oversight.episodes import Episode
from flowctl.live.settings.levels import Role
from flowctl.live.stream import StartPlace, Stream
from flowctl.live.wirelog import WireLog
from flowctl.reasons import DropReason
from flowctl.rtmp import events as rtmp_events
from flowctl.rtmp.server.session import ServerSession
from flowctl.rtmp.server.states import StreamState
from flowctl.server.totals import FlowTotals, totals_of

_log: Final = structlog.get_logger("flowctl.live")
_VIDEO: Final = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE})


class Muted:
    """Another policy, with audio or video refused in every state (receiveAudio, receiveVideo).

    Args:
        policy: what decides about the rest.
        audio: whether audio is wanted.
        video: whether video is wanted.
    """

    def __init__(self, policy: DropPolicy, *, audio: bool, video: bool) -> None:
        self.policy = policy
        self.audio = audio
        self.video = video

    def decide(self, state: SendState, message_class: MessageClass) -> Verdict:
        """Drop what is switched off; leave the rest to the policy."""
        if (message_class is MessageClass.AUDIO and not self.audio) or (message_class in _VIDEO and not self.video):
            return Verdict.DROP
        return self.policy.decide(state, message_class)

    def thin(self, state: SendState) -> Thin:
        """Leave it to the policy."""
        return self.policy.thin(state)

    def patience(self, message_class: MessageClass) -> float:
        """Leave it to the policy."""
        return self.policy.patience(message_class)


def figures_of(connection: Connection) -> FlowTotals:
    """Return what a connection was sent and spared so far."""
    return totals_of(connection.sender.statistics(), connection.receiver.statistics())


class Playing:
    """The message stream on which the peer plays; one per connection. Its connection's thread.

    Args:
        viewer: as the hub knows it.
        rtmp: the wire session.
        hub: which `viewer` has entered for `stream`.
        stream_id: message stream id.
        stream: the stream.
        wire: its log for that message stream id, joined.

    Attributes:
        stream_id: as above.
        stream: as above.
        began_at: time in seconds.
        before: the connection's figures when it began.
        waits_until: when waiting for a publisher is given up. None: it is published, or the wait has no limit.
        paused: at the player's word.
    """

    __slots__ = (
        *("_audio", "_connection", "_episode", "_hub", "_own_limits", "_rtmp", "_video", "_viewer"),
        *("_wire", "began_at", "before", "paused", "stream", "stream_id", "waits_until"),
    )

    def __init__(
        self,
        viewer: Viewer,
        rtmp: ServerSession,
        hub: Hub,
        stream_id: int,
        stream: Stream,
        wire: WireLog,
    ) -> None:
        self._viewer = viewer
        self._connection = viewer.connection
        self._rtmp = rtmp
        self._hub = hub
        self._wire = wire
        self._audio = self._video = True  # whether the player wants them
        self._episode: Episode | None = None  # most viewers have no trouble at all
        self._own_limits = False  # whether its Sender's limits are those of this stream
        self.stream_id = stream_id
        self.stream = stream
        self.began_at = self._connection.now()
        self.before = figures_of(self._connection).baseline()
        self.waits_until: float | None = None
        self.paused = False

    # -- begin and wait

    def begin(self) -> StartPlace:
        """Accept the play, or let it wait for a publisher; return from where to `follow` behind the replies."""
        self.put_settings()
        # In this order: what ends the stream after the look stands in the log that the player then follows.
        place = self.stream.start_place(self._wire)
        waiting = self.stream.ended
        if waiting:
            self._rtmp.play_waiting(self.stream_id)
            self._wait()
        else:
            self._rtmp.accept_play(self.stream_id)
            self._tell_start()
        return place

    def follow(self, place: StartPlace) -> None:
        """Follow the log from `place` on, with the GOP cache if there is one."""
        start, prefix, wait = place
        FollowPlace(self._connection, self._wire.fanouts, start=start, prefix=prefix, wait_for_key=wait)

    def stream_ended(self) -> None:
        """Wait from now on, if the publisher has gone for good: the hub's word may be outdated by now."""
        if self.stream.ended:
            self._note_end()
            self._wait()

    def stream_published(self) -> None:
        """Play again, if the stream is published still."""
        if not self.stream.ended:
            self.waits_until = None
            self._note_end()  # where the stream was back before `stream_ended` ran: the log has told the player
            self._note_begin()

    def _wait(self) -> None:
        wait_s = self._settings.rtmp.limits.player_wait_s
        self.waits_until = self._connection.now() + wait_s if wait_s else None

    def _note_end(self) -> None:
        """Let it wait from now on; one that has left the log, paused, is told here, others by the log."""
        if self._rtmp.stream_state(self.stream_id) is StreamState.PLAYING:
            self._rtmp.unpublish_notify(self.stream_id, send=self._connection.place is None)

    def _note_begin(self) -> None:
        """Let it play from now on if it waits; it is told as in `_note_end`."""
        if self._rtmp.stream_state(self.stream_id) is StreamState.WAITING:
            self._rtmp.publish_notify(self.stream_id, send=self._connection.place is None)
        if self._rtmp.stream_state(self.stream_id) is StreamState.PLAYING:
            self._tell_start()

    def _tell_start(self) -> None:
        for observer in self._hub.observers:
            observer.play_started(self._connection, self.stream.name, self._connection.now())

    # -- what is due

    @property
    def quiet_at(self) -> float | None:
        """When its episode of trouble ends if nothing happens until then. None: there is none, or it goes on."""
        return None if self._episode is None else self._episode.quiet_at

    def check_quiet(self, now: float) -> None:
        """End the episode of trouble, if it is over."""
        if self._episode is not None:
            self._episode.check(now)

    def check_wait(self, now: float) -> None:
        """Give up waiting for a publisher when the time is over.

        Raises:
            LimitExceededError: it is.
        """
        if self.waits_until is not None and now >= self.waits_until:
            limit_s = self._settings.rtmp.limits.player_wait_s
            self._rtmp.limit_status(self.stream_id, "player_wait_s", limit_s, limit_s)
            raise LimitExceededError(
                "player_wait_s", limit_s, limit_s, f"nobody published {self.stream.name} within {limit_s:g} s"
            )

    # -- at the player's word

    def obey(self, event: rtmp_events.PauseRequested | rtmp_events.ReceiveAudio | rtmp_events.ReceiveVideo) -> None:
        """Do what the player asks for."""
        match event:
            case rtmp_events.PauseRequested():
                self._pause(pause=event.pause)
            case rtmp_events.ReceiveAudio():
                self._mute(audio=event.enabled, video=self._video)
            case rtmp_events.ReceiveVideo():
                self._mute(audio=self._audio, video=event.enabled)

    def _pause(self, *, pause: bool) -> None:
        """Stop delivery, or go on at the live edge: a live stream has no place to go back to."""
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

    def _leave_log(self) -> None:
        """Stop following the log; what it was still to tell the player, the wire session tells it."""
        place, sender = self._connection.place, self._connection.sender
        if place is None:
            return
        before = sender.statistics().dropped.get(DropReason.UNFOLLOWED, NO_COUNTS).of(MessageClass.CONTROL)
        place.end()
        lost = sender.statistics().dropped.get(DropReason.UNFOLLOWED, NO_COUNTS).of(MessageClass.CONTROL) - before
        # Begin and end take turns, so an even number of lost ones changes nothing. Where the hub's own word has not
        # come yet, it will be sent, for there is no log any more.
        published = self._rtmp.stream_state(self.stream_id) is StreamState.PLAYING
        if lost % 2 and published is self._wire.published:
            self._rtmp.repeat_notify(self.stream_id)

    def _mute(self, *, audio: bool, video: bool) -> None:
        self._audio, self._video = audio, video
        policy = self._stream_policy()
        if self._muted:
            policy = Muted(policy, audio=self._audio, video=self._video)
        self._connection.sender.set_policy(policy)

    @property
    def _muted(self) -> bool:
        return not (self._audio and self._video)

    # -- what is set for those who play the stream

    @property
    def _settings(self) -> LiveConfig:
        return self._hub.config.at(self.stream.name, Role.VIEWER)

    def _stream_policy(self) -> DropPolicy:
        return LIVE_POLICIES[self._settings.policy]

    def put_settings(self, limits: Limits | None = None) -> None:
        """Put in force what is set for viewers of the stream.

        Args:
            limits: the server's, which have just been changed. None: its Sender has them already.
        """
        mine, sender = self._settings, self._connection.sender
        if mine.limits != self._hub.config.limits:
            self._own_limits, limits = True, mine.limits
        elif self._own_limits:
            self._own_limits, limits = False, mine.limits
        if limits is not None and limits != sender.limits:
            sender.set_limits(limits)
        if not self._muted and sender.policy is not LIVE_POLICIES[mine.policy]:
            sender.set_policy(LIVE_POLICIES[mine.policy])

    def _leave_settings(self) -> None:
        usual, sender = self._hub.config, self._connection.sender
        if self._own_limits:
            sender.set_limits(usual.limits)
        if self._muted or sender.policy is not LIVE_POLICIES[usual.policy]:  # what is muted is so for this play
            sender.set_policy(LIVE_POLICIES[usual.policy])

    # -- trouble and the end

    def ledger_entry(self, entry: LedgerEntry) -> None:
        """Log trouble, once per episode."""
        if self._episode is None:
            fields = line_fields(self._connection, self.stream.name)
            self._episode = Episode(fields, self._connection.sender.why, self._dropped)
        self._episode.take(entry, closed=self._connection.sender.closed)

    def _dropped(self) -> Counts:
        """Return what was dropped for this viewer, for its episodes; not what it left itself."""
        dropped = self._connection.sender.statistics().dropped
        return total(counts for reason, counts in dropped.items() if reason is not DropReason.UNFOLLOWED)

    def end(self, why: str) -> None:
        """Leave the log, the stream and its settings, and log what became of it."""
        connection = self._connection
        if connection.place is not None:
            connection.place.end()
        self._leave_settings()
        # Also out of what waits to be sent to it: what it was offered of the stream is settled when it leaves.
        self.stream.leave(self._wire)
        self._hub.leave(self.stream, self._viewer, figures_of(connection).settled() - self.before)
        if self._episode is not None:
            self._episode.end(connection.now(), None)
        statistics = connection.sender.statistics()
        _log.info(
            "play ended",
            **line_fields(connection, self.stream.name),
            why=why,
            after_s=round(connection.now() - self.began_at, 1),
            sent=statistics.sent.by_name(),
            dropped={reason.value: counts.by_name() for reason, counts in statistics.dropped.items()} or 0,
            changes=statistics.transitions,
            longest_stall_s=round(statistics.longest_stall_s, 2),
        )
