"""The sets of a server, and which stream is a member of which.

The hub says of each stream whose publisher comes, goes, or has gone for good that it is to be looked at; what it is
then, not what was said, decides. Looks come from any thread; one thread at a time does them all, so that none waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

import structlog

from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import BusyError, LimitExceededError
from flowctl.live.config import LiveConfig
from flowctl.live.renditions.feeds import MemberFeed, TrackFeed
from flowctl.live.renditions.renditionset import SOURCE, Rendition, RenditionSet
from flowctl.live.settings.renditions import RenditionNames, guess_suffix, guessed_setting
from flowctl.live.stream import Stream, StreamFeed

_log: Final = structlog.get_logger("flowctl.live")
_TELL_S: Final = 0.25
"""Shortest time between two words to all viewers of a set that they may have to find a place anew."""
_MOST_TAKEN: Final = 256
"""Names of sets that are remembered because somebody else publishes there, or a stream is of somebody else."""


class _Membership(NamedTuple):
    """A stream in a set."""

    renditions: RenditionSet
    rendition: Rendition


class RenditionSets:
    """The sets of one server. Any thread.

    Args:
        config: gives the settings in force.
        clock: gives the time in seconds.
        streams: the streams of the hub.
        may_join: tells whether a stream is of the publisher of a set, as far as names are kept from others.
        is_alone: tells whether who publishes a stream may not publish the set of which it would be a member.
        publish: publishes a set under its name, whose first member a stream is; raises BusyError where
            another one has the name.
        unpublish: ends that.
        call_later: calls a function after some seconds, on any thread.
        tell: tells the viewers of a stream that they may have to find a place anew.
    """

    def __init__(
        self,
        config: Callable[[], LiveConfig],
        clock: Callable[[], float],
        streams: Callable[[], Iterable[Stream]],
        *,
        may_join: Callable[[RenditionSet, str], bool],
        is_alone: Callable[[Stream], bool],
        publish: Callable[[str, RenditionSet, Stream], Stream],
        unpublish: Callable[[Stream, RenditionSet], None],
        call_later: Callable[..., Any],
        tell: Callable[[Stream], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._streams = streams
        self._may_join = may_join
        self._is_alone = is_alone
        self._publish = publish
        self._unpublish = unpublish
        self._call_later = call_later
        self._tell = tell
        self._due: deque[Callable[[], Any]] = deque()  # what is still to be done
        self._turn = OwnedLock()  # of the thread that does it; nobody waits for it
        self._by_name: dict[str, RenditionSet] = {}  # changed in a turn, or by the publisher of tracks
        self._members: dict[Stream, _Membership] = {}  # changed in a turn
        self._hinted: set[str] = set()  # names of sets that there could be; changed in a turn
        self._taken: dict[str, None] = {}  # faces that streams are not members of; changed in a turn

    def find(self, face: Stream) -> RenditionSet | None:
        """Return the set behind a stream. None: there is none."""
        found = self._by_name.get(face.name)
        return found if found is not None and found.face is face else None

    # -- tracks

    def of_tracks(self, face: Stream) -> StreamFeed | None:
        """Return the feed of a publication that has several video tracks. None: they are no set. Under its lock."""
        if not self._config().at(face.name).renditions.tracks:
            return None
        renditions = self._make(face.name, of_tracks=True)
        renditions.show(face)
        self._by_name[face.name] = renditions
        self._changed(renditions, 0.0)
        return TrackFeed(renditions)

    def _make(self, name: str, *, of_tracks: bool, ladder: bool = False, smallest: int | None = None) -> RenditionSet:
        return RenditionSet(
            name,
            lambda: self._config().at(name),
            self._changed,
            smallest=smallest,
            of_tracks=of_tracks,
            ladder=ladder,
        )

    def _changed(self, renditions: RenditionSet, after_s: float) -> None:
        """Tell the viewers of a set soon, but not each time where that is often. Any thread, under locks of streams."""
        if after_s:
            self._call_later(after_s, self._changed, renditions, 0.0)
        elif not renditions.untold:
            renditions.untold = True
            wait_s = renditions.told_at + _TELL_S - self._clock()
            self._call_later(max(0.0, wait_s), self._tell_viewers, renditions)

    def _tell_viewers(self, renditions: RenditionSet) -> None:
        renditions.untold, renditions.told_at = False, self._clock()
        if renditions.face is not None:
            self._tell(renditions.face)

    # -- streams by suffix

    def look(self, stream: Stream) -> None:
        """Look at what has become of a stream of the hub."""
        self._do(partial(self._look, stream))

    def _do(self, step: Callable[[], Any]) -> None:
        self._due.append(step)
        while self._due and not self._turn.owned() and self._turn.acquire(blocking=False):
            try:
                while self._due:
                    self._due.popleft()()
            finally:
                self._turn.release()

    def _look(self, stream: Stream) -> None:
        publisher, known = stream.publisher, self._members.get(stream)
        if (
            known is not None
            and known.rendition.expected
            and self._by_name.get(known.renditions.name) is not known.renditions
        ):
            self._leave(stream, known)  # of a publication that has ended
            known = None
        if stream.ended:
            if known is not None:
                self._leave(stream, known)
            if (found := self.find(stream)) is not None and found.of_tracks:
                self._end(found)
            if stream.name in self._taken:
                del self._taken[stream.name]
                for other in self._streams():
                    if other.publisher is not None and self.face_of(other.name) == stream.name:
                        self._enter(other)
        elif publisher is None:
            if known is not None:
                known.renditions.withdraw(known.rendition, self._clock(), gone=False)
        elif known is not None and known.rendition.takeovers != stream.takeovers:
            known.rendition.takeovers = stream.takeovers
            known.renditions.restart(known.rendition)
            if self._is_alone(stream):
                self._leave(stream, known)
        elif known is None and not isinstance(publisher, RenditionSet):
            self._enter(stream)

    def face_of(self, name: str) -> str:
        """Return the set of which a stream is a member by its name; empty: of none. Any thread."""
        member = self._config().at(name).renditions.member(name)
        return "" if member is None else member.face

    def _enter(self, stream: Stream) -> None:
        member = self._config().at(stream.name).renditions.member(stream.name)
        if member is None or stream in self._members:
            if member is None:
                self._enter_ladder(stream)
                self._hint_at_set(stream)
            return
        if self._is_alone(stream):
            return
        now = self._clock()
        renditions = self._by_name.get(member.face)
        if renditions is None or renditions.of_tracks:
            renditions = self._begin(member.face, stream)
        if renditions is None:
            return
        if not self._may_join(renditions, stream.name):
            self._note_taken(member.face, f"{stream.name} is of another publisher")
            return
        rendition = renditions.add(member.rendition, member.rank, now)
        if rendition is None:
            return
        rendition.takeovers = stream.takeovers
        self._members[stream] = _Membership(renditions, rendition)
        stream.set_feed(MemberFeed(renditions, rendition), now)

    def _hint_at_set(self, stream: Stream) -> None:
        """Say once of names that look like those of a set which setting makes them one."""
        config, suffix = self._config(), guess_suffix(stream.name)
        face = stream.name.removesuffix(suffix)
        if not suffix or face in self._hinted or config.at(stream.name).renditions != RenditionNames():
            return
        near = [item for item in self._streams() if item.name.startswith(face)]  # first: there may be thousands
        published = {item.name for item in near if item.publisher and config.made_from(item.name) is None}
        suffixes = {found for name in published if (found := guess_suffix(name)) and name == face + found}
        if (setting := guessed_setting(suffixes)) is not None and len(self._hinted) < _MOST_TAKEN:
            self._hinted.add(face)
            hint = f'renditions = "{setting}" lets viewers of {face} have the one that their line carries'
            _log.info("streams look like renditions of one", stream=face, names=sorted(suffixes), hint=hint)

    def _enter_ladder(self, stream: Stream) -> None:
        """Make a set of a publication that may have steps, or enter a step into that of its publication."""
        config, now = self._config(), self._clock()
        if (found := config.step_of(stream.name)) is not None:
            source, step, rank = found
            renditions = self._by_name.get(source)
            if stream in self._members or renditions is None or not renditions.ladder:
                return
            rendition = renditions.add(step.name, rank, now, expected=step.bytes_per_s)
            if rendition is not None:
                rendition.takeovers = stream.takeovers
                self._members[stream] = _Membership(renditions, rendition)
                stream.set_feed(MemberFeed(renditions, rendition), now)
        elif config.has_ladder(stream.name) and stream.feed is None and stream.name not in self._by_name:
            renditions = self._make(stream.name, of_tracks=True, ladder=True)
            renditions.show(stream)
            rendition = renditions.add(SOURCE, 0, now)
            self._by_name[stream.name] = renditions
            if rendition is not None:
                stream.set_feed(MemberFeed(renditions, rendition), now)
            self._changed(renditions, 0.0)

    def _begin(self, name: str, first: Stream) -> RenditionSet | None:
        """Publish a set under its name. None: somebody publishes there, and has the name."""
        suffixes = self._config().at(first.name).renditions.suffixes
        renditions = self._make(name, of_tracks=False, smallest=len(suffixes) - 1)
        renditions.on_replaced = partial(self._do, partial(self._replaced, renditions))
        try:
            face = self._publish(name, renditions, first)
        except (BusyError, LimitExceededError) as error:
            self._note_taken(name, str(error))
            return None
        renditions.show(face)
        self._by_name[name] = renditions
        return renditions

    def _note_taken(self, name: str, why: str) -> None:
        """Look again at streams that are no members of a set once what is published under its name has ended."""
        if name not in self._taken:
            while len(self._taken) >= _MOST_TAKEN:
                del self._taken[next(iter(self._taken))]
            self._taken[name] = None
            _log.warning("no member of a set of renditions", stream=name, why=why)

    def _leave(self, stream: Stream, known: _Membership) -> None:
        now = self._clock()
        del self._members[stream]
        stream.set_feed(None, now)
        others = (item.renditions is known.renditions for item in self._members.values())
        if known.rendition.expected or any(others):
            known.renditions.withdraw(known.rendition, now, gone=True)
        else:  # viewers stay in it for the words of the end
            self._dissolve(known.renditions)

    def _replaced(self, renditions: RenditionSet) -> None:
        """Somebody publishes under the name of a set."""
        self._note_taken(renditions.name, "somebody publishes under its name")
        for stream, known in list(self._members.items()):
            if known.renditions is renditions:
                del self._members[stream]
                stream.set_feed(None, self._clock())
        self._dissolve(renditions)

    def _dissolve(self, renditions: RenditionSet) -> None:
        self._end(renditions)
        if renditions.face is not None:
            self._unpublish(renditions.face, renditions)

    def _end(self, renditions: RenditionSet) -> None:
        if self._by_name.get(renditions.name) is renditions:
            del self._by_name[renditions.name]
        renditions.end()
        self._changed(renditions, 0.0)
