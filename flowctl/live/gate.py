"""The gate of a live server: its settings and hooks decide who may connect, publish and play.

Plays that are fetched file by file, as HLS is, are visits: who was allowed one goes on with it for as long as it asks.
A player of HLS makes a request for each segment and, every few seconds, for the playlist. Were each of them a play,
hooks would be asked about thousands, and a token that expires would end a viewer in the middle. So the first request
begins a visit, which is one play for the gate: the same client that brings the same proof for the same stream is not
asked about again, until it has asked for nothing for a while. Networks that may not play are refused at each request.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import structlog

from flowctl.core.loop.faults import ErrorHook, log_error
from flowctl.core.text.addresses import address_key, address_of
from flowctl.core.text.printable import printable
from flowctl.core.text.watchfile import WatchedFile
from flowctl.live.access.passes import Passes
from flowctl.live.access.request import UNDECIDED, LiveRequest, Question, Refusal, RequestKind, Why
from flowctl.live.access.rules import StreamAccess
from flowctl.live.access.webhooks import FETCH_S, WebHooks
from flowctl.live.access.webtokens import WebTokenKey
from flowctl.live.config import LiveConfig
from flowctl.live.hooks import HookRunner
from flowctl.live.settings.levels import Role

_log: Final = structlog.get_logger("flowctl.live")
_ROLES: Final[dict[RequestKind, Role | None]] = {"connect": None, "publish": Role.PUBLISHER, "play": Role.VIEWER}
_LOG_IN: Final = Refusal("A user and a password are needed.", Why.UNAUTHORIZED)
_OF_A_COMMAND: Final = Refusal("This name is for what the server makes itself.", guess=False)
_HOOK_SPARE_S: Final = 1.0
"""Time beyond that of the hooks, so that their own refusal comes before the gate's timeout."""

_Answer = Callable[[Question, Refusal | None], None]
_Step = Callable[[_Answer], Question | Refusal | None]
"""Asks one of those that decide: returns its answer, or a question that is answered later."""

IDLE_S: Final = 60.0
"""Time without a request after which a visit is over: players ask for the playlist once per segment, 30 s at most."""
_VISIT_LOOK_S: Final = 5.0
_MOST_VISITS: Final = 16_384
_MOST_VISITS_OF_ADDRESS: Final = 256
"""Visits of one address. Beyond it each request is asked about on its own: who invents queries slows only itself."""

_VisitKey = tuple[str, str, bytes]


class _Summary(NamedTuple):
    """What all levels of a configuration have for deciding."""

    config: LiveConfig
    told: bool  # whether HTTP hooks are told of ends
    timeout_s: float  # longest time of HTTP hooks and of reading keys anew; 0: there are none
    files: dict[str, WatchedFile]  # that proofs are checked with, by what they are
    sets: tuple[WebTokenKey, ...]  # sets of keys that are fetched


class AccessGate:
    """Decides who may connect, publish or play, over RTMP and HTTP alike; any thread may call its methods."""

    def __init__(self, config: Callable[[], LiveConfig], now: Callable[[], float] = time.time) -> None:
        self._config: Final = config
        self._now: Final = now
        self._lock = threading.Lock()
        self._web: WebHooks | None = None  # made for the first question or news; guarded by _lock
        self._stopped = False  # guarded by _lock
        self._cached_summary: _Summary | None = None  # replaced as a whole
        self.passes: Final = Passes()  # of the commands that the server runs
        self.hooks: HookRunner | None = None  # set before the first connection
        # Has the files of keys read that have changed, elsewhere, and is told when that is done; set likewise.
        self.read_files: Callable[[Callable[[], None]], None] | None = None
        self.on_error: ErrorHook = log_error  # told of faults of our own; set before the first connection

    @property
    def decide_s(self) -> float:
        """Time that a question may take; then the session gives up with `TOO_SLOW`."""
        return self._summary().timeout_s + (0.0 if self.hooks is None else self.hooks.decide_s)

    def stop(self, deadline_s: float) -> None:
        """Send the HTTP hooks the news that wait, for at most `deadline_s` seconds; then end their thread."""
        with self._lock:
            web, self._web, self._stopped = self._web, None, True
        if web is not None:
            web.stop(deadline_s)

    def _web_hooks(self) -> WebHooks | None:
        with self._lock:
            if self._web is None and not self._stopped:
                self._web = WebHooks(self.on_error)
                self._web.start()
            return self._web

    def _summary(self) -> _Summary:
        config, summary = self._config(), self._cached_summary
        if summary is None or summary.config is not config:
            levels = [level.values for level in config.levels]
            times = [float(values.get("access.hook_timeout_s", 0.0)) for values in levels]

            def is_set(name: str) -> bool:
                return bool(getattr(config.access, name)) or any(values.get(f"access.{name}") for values in levels)

            asks = any(map(is_set, ("on_connect", "on_publish", "on_play")))
            timeout_s = max([config.access.hook_timeout_s, *times]) + _HOOK_SPARE_S if asks else 0.0
            files, sets = _sources_of(config)
            for key in sets:  # read anew with the settings, of a level: what was fetched for it stays in force
                for old in () if summary is None else summary.sets:
                    if old == key and old is not key:
                        key.inherit(old)
            timeout_s += FETCH_S + _HOOK_SPARE_S if files or sets else 0.0
            summary = self._cached_summary = _Summary(config, is_set("on_end"), timeout_s, files, sets)
        return summary

    @property
    def files(self) -> dict[str, WatchedFile]:
        """The files that proofs are checked with, by what they are."""
        return self._summary().files

    def fetch_due(self) -> None:
        """Have the sets of keys fetched again that it is time for; to be called now and then, by any thread."""
        for key in self._summary().sets:
            if time.monotonic() >= key.due_at and (web := self._web_hooks()) is not None:
                key.due_at = time.monotonic() + FETCH_S  # or sooner, once it has come
                web.fetch(key, lambda: None)

    def access(self, request: LiveRequest) -> StreamAccess:
        name = f"{request.stream}/" if request.kind == "connect" else request.stream
        if request.kind == "play" and (step := self._config().step_of(name)) is not None:
            name = step[0]  # a smaller size of a stream is for those that the stream is for
        return self._config().at(name, _ROLES[request.kind]).access

    def check(self, request: LiveRequest) -> Refusal | None:
        """Refuse a request by the settings alone, without waiting; None: they allow it.

        A set of keys that it would have taken is fetched for the next one.
        """
        self._fetch_set(request, lambda *_: None)
        return self._log_in(request) or self.access(request).check(request, self._now())

    def ask(self, request: LiveRequest, answer: _Answer) -> Question | Refusal | None:
        """Ask whether `request` is allowed. None: it is; a refusal: it is not; a question: that is being decided."""
        if request.kind != "connect" and self.passes.source(request) is not None:
            return None
        if request.kind == "publish" and self._config().made_from(request.stream) is not None:
            return _OF_A_COMMAND
        missed = _missed_connect(request)
        asked = [request] if missed is None else [missed, request]
        return _ask_each(Question(answer), (step for item in asked for step in self._steps(item)))

    def ask_face(self, request: LiveRequest, answer: _Answer) -> Question | Refusal | None:
        """Ask whether who publishes a rendition may publish the set, too, as `ask` does."""
        if not request.face or self.passes.source(request) is not None:
            return None
        face, hooks = request.of_face(), self.hooks
        if self.access(face).open_to_all("publish") and not (hooks is not None and hooks.decides["publish"]):
            return self.check(face)  # some networks may be denied
        return self.ask(face, answer)

    def _steps(self, request: LiveRequest) -> Iterator[_Step]:
        """Yield the steps of the decision in order: each must allow the request."""
        yield lambda answer: self._refresh_files(request, answer)
        yield lambda answer: self._fetch_set(request, answer)
        yield lambda _: self.check(request)
        # The application first, which costs less; what a web server was asked about, it takes for begun.
        if (hooks := self.hooks) is not None and hooks.decides[request.kind]:
            yield lambda answer: hooks.ask(request, answer)
        access = self.access(request)
        if access.asked(request.kind):
            web = self._web_hooks()
            yield lambda answer: UNDECIDED if web is None else web.ask(access, request, answer)

    def _refresh_files(self, request: LiveRequest, answer: _Answer) -> Question | None:
        """Have the files of keys read before the decision where they have changed: what a command made is in force."""
        if request.kind == "connect" or self.read_files is None:
            return None
        if not any(file.changed() for file in self.access(request).files.values()):
            return None
        question = Question(answer)
        self.read_files(lambda: question.tell(None))
        return question

    def _fetch_set(self, request: LiveRequest, answer: _Answer) -> Question | None:
        """Have a set of keys fetched before the decision where the token names a key that is not in it."""
        if request.kind == "connect" or (key := self.access(request).wants_fetch(request, time.monotonic())) is None:
            return None
        question = Question(answer)
        if (web := self._web_hooks()) is None:
            return None
        web.fetch(key, lambda: question.tell(None))
        return question

    def refuses_network(self, request: LiveRequest) -> Refusal | None:
        """Refuse a client of a network that is not allowed; None: it is. For requests that continue something."""
        return self.access(request).check_network(request)

    def identity(self, request: LiveRequest) -> str | None:
        """Return the publisher that a token names; None: no token does. See `StreamAccess.identity`."""
        return self.access(request).identity(request, self._now())

    def needs_visit(self, request: LiveRequest) -> bool:
        access, hooks = self.access(request), self.hooks
        return bool(
            (request.kind == "play" and access.play_auth)
            or access.asked(request.kind)
            or self._config().rtmp.credentials is not None
            or (hooks is not None and hooks.decides[request.kind])
            or self.tells_of(request.kind)
        )

    def _log_in(self, request: LiveRequest) -> Refusal | None:
        """Refuse a client of HTTP without a password where RTMP, whose sessions check it, asks for one."""
        credentials = self._config().rtmp.credentials
        if credentials is None or request.protocol == "rtmp" or request.user is not None:
            return None
        given = (request.url.password or "").encode("utf-8", "surrogatepass")
        password = credentials.get(request.url.user or "")
        same = hmac.compare_digest((password or "").encode("utf-8", "surrogatepass"), given)
        return None if same and password else _LOG_IN

    def tells_of(self, kind: RequestKind) -> bool:
        return self._summary().told or (self.hooks is not None and kind in self.hooks.told_kinds)

    def check_news(self, request: LiveRequest) -> None:
        """Check that one more publication of this address can be told of; raises like `HookRunner.check_news`."""
        if self.hooks is not None:
            self.hooks.check_news(request)

    def note_begin(self, request: LiveRequest) -> None:
        if self.hooks is not None:
            self.hooks.note_begin(request)

    def note_end(self, request: LiveRequest, why: str, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        if self.hooks is not None:
            self.hooks.note_end(request, why)
        if request.kind == "connect":
            self.note_close(request, sent_bytes, received_bytes)
        else:
            self._tell(self.access(request), request)

    def note_face_end(self, request: LiveRequest) -> None:
        """Tell the HTTP hooks that what was allowed by `ask_face` is over."""
        if request.face and self.passes.source(request) is None:
            self._tell(self.access(request.of_face()), request.of_face())

    def note_close(self, request: LiveRequest, sent_bytes: int, received_bytes: int) -> None:
        """Tell the HTTP hooks how much went over the connection of `request`: to connect, or to play over HTTP."""
        figures = {"send_bytes": sent_bytes, "recv_bytes": received_bytes}
        self._tell(self.access(request), replace(request, kind="connect"), **figures)

    def _tell(self, access: StreamAccess, request: LiveRequest, **figures: int) -> None:
        if access.on_end and (web := self._web_hooks()) is not None:
            web.tell(access, request, **figures)


def _sources_of(config: LiveConfig) -> tuple[dict[str, WatchedFile], tuple[WebTokenKey, ...]]:
    """Return the files and the fetched sets that proofs are checked with, on all levels."""
    files, keys = config.access.files, [config.access.jwt_key]
    for level in config.levels:
        own: dict[str, Any] = {
            name: level.values.get(f"access.{name}") for name in ("keys", "token_secrets", "jwt_key")
        }
        access = StreamAccess(**own)
        files |= {f"{name}_{len(files)}" if name in files else name: file for name, file in access.files.items()}
        keys.append(access.jwt_key)
    return files, tuple(key for key in keys if key is not None and key.is_fetched)


def _ask_each(question: Question, steps: Iterator[_Step]) -> Question | Refusal | None:
    """Take steps until one refuses or asks a question; its answer goes on from there, on the thread that answers."""

    def resume(_: Question, refusal: Refusal | None) -> None:
        if refusal is None and not question.cancelled:
            answer = _ask_each(question, steps)
            if answer is question:
                return
            refusal = None if isinstance(answer, Question) else answer
        question.tell(refusal)

    for step in steps:
        answer = step(resume)
        if isinstance(answer, Question):
            question.under = answer
            return question
        if answer is not None:
            return answer
    return None


def _missed_connect(request: LiveRequest) -> LiveRequest | None:
    """Return the connect that was not asked about: that to the application of a stream of another application.

    A client may connect to one application and then ask for ``/other/stream``, or give all of it as the stream's name.
    """
    application = request.stream.partition("/")[0]
    if request.kind == "connect" or not request.connected or application == request.connected:
        return None
    return replace(request, kind="connect", url=replace(request.url, app=application, stream=""))


class _Visit(NamedTuple):
    request: LiveRequest
    asked_at: float
    sent_bytes: int = 0


class Visits:
    """The visits of a server. Any thread may call its methods."""

    def __init__(self, gate: AccessGate, clock: Callable[[], float], call_later: Callable[..., Any]) -> None:
        self._gate: Final = gate
        self._clock: Final = clock
        self._call_later: Final = call_later
        self._lock = threading.Lock()
        self._visits: OrderedDict[_VisitKey, _Visit] = OrderedDict()  # who asked longest ago first; guarded by _lock
        self._counts: dict[str, int] = {}  # by address or network; guarded by _lock
        self._looking = False  # guarded by _lock
        self._stopped = False  # guarded by _lock

    def __len__(self) -> int:
        with self._lock:
            return len(self._visits)

    def prolong(self, request: LiveRequest) -> bool:
        """Return whether a request belongs to a visit, which it prolongs; then the gate need not be asked."""
        key, now = _key(request), self._clock()
        with self._lock:
            visit = self._visits.get(key)
            if visit is None or now - visit.asked_at >= IDLE_S:
                return False
            self._visits[key] = visit._replace(asked_at=now)
            self._visits.move_to_end(key)
        return True

    def count(self, request: LiveRequest, sent_bytes: int) -> None:
        """Count what was sent in answer to a request, which may belong to a visit."""
        key = _key(request)
        with self._lock:
            if (visit := self._visits.get(key)) is not None:
                self._visits[key] = visit._replace(sent_bytes=visit.sent_bytes + sent_bytes)

    def begin(self, request: LiveRequest) -> None:
        """Begin a visit with a request that was allowed, unless it belongs to one, or none is needed."""
        if not self._gate.needs_visit(request):
            return
        self._end_idle()
        key, network = _key(request), address_key(request.peer[0])
        with self._lock:
            count = self._counts.get(network, 0)
            full = count >= _MOST_VISITS_OF_ADDRESS or len(self._visits) >= _MOST_VISITS
            if self._stopped or full or key in self._visits:
                return
            self._counts[network] = count + 1
            self._visits[key] = _Visit(request, self._clock())
            look, self._looking = not self._looking, True
        _log.info("play started", **_fields(request), agent=request.user_agent)
        self._gate.note_begin(request)
        if look:
            self._call_later(_VISIT_LOOK_S, self._end_idle_in_turn)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            gone = [self._forget_locked(key) for key in tuple(self._visits)]
        self._note_ends(gone, "the server stops")

    def _end_idle_in_turn(self) -> None:
        self._end_idle()
        with self._lock:
            look = self._looking = bool(self._visits)
        if look:
            self._call_later(_VISIT_LOOK_S, self._end_idle_in_turn)

    def _end_idle(self) -> None:
        now, gone = self._clock(), []
        with self._lock:
            while self._visits:
                key, visit = next(iter(self._visits.items()))
                if now - visit.asked_at < IDLE_S:
                    break
                gone.append(self._forget_locked(key))
        self._note_ends(gone, f"it asked for nothing for {IDLE_S:g} s")

    def _forget_locked(self, key: _VisitKey) -> _Visit:
        visit = self._visits.pop(key)
        network = address_key(visit.request.peer[0])
        count = self._counts.pop(network) - 1
        if count:
            self._counts[network] = count
        return visit

    def _note_ends(self, gone: list[_Visit], why: str) -> None:
        for request, _, sent_bytes in gone:
            _log.info("play ended", **_fields(request), reason=why)
            self._gate.note_end(request, why)
            self._gate.note_close(request, sent_bytes, 0)


def _fields(request: LiveRequest) -> dict[str, Any]:
    stream = printable(request.stream)
    return {"stream": stream, "peer": address_of(request.peer), "connection": request.connection, "protocol": "hls"}


def _key(request: LiveRequest) -> _VisitKey:
    """Return what all requests of a visit have in common: client, stream, and all that it may be let in for."""
    url, digest = request.url, hashlib.sha256()
    for text in (url.raw_query, url.user, url.password, request.bearer, request.user_agent):
        octets = (text or "").encode("utf-8", "surrogatepass")
        digest.update(len(octets).to_bytes(4, "big") + octets)
    return request.peer[0], request.stream, digest.digest()
