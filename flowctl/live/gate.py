"""The gate of a live server: what its settings and hooks say about who may connect, publish and play."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from flowctl.core.loop.faults import ErrorHook, log_error
from flowctl.live.access.request import UNDECIDED, LiveRequest, Question, Refusal, RequestKind, Why
from flowctl.live.access.rules import StreamAccess
from flowctl.live.access.webhooks import WebHooks
from flowctl.live.config import LiveConfig
from flowctl.live.hooks import HookRunner
from flowctl.live.settings.levels import Role

_ROLES: Final[dict[RequestKind, Role | None]] = {"connect": None, "publish": Role.PUBLISHER, "play": Role.VIEWER}
_LOG_IN: Final = Refusal("A user and a password are needed.", Why.UNAUTHORIZED)
_SPARE_S: Final = 1.0
"""Beyond the time of the hooks, so that their own word about it comes first."""

_Answer = Callable[[Question, Refusal | None], None]
_Step = Callable[[_Answer], Question | Refusal | None]
"""Asks one of those that decide: what it answers at once, or a question that it answers later."""


class _Known(NamedTuple):
    """What all levels of a configuration come to: what is told of, and the longest time of HTTP hooks, 0 without."""

    config: LiveConfig
    told: bool
    timeout_s: float


class AccessGate:
    """Asked before anybody connects, publishes or plays, over RTMP and HTTP alike; any thread may call its methods.

    Attributes:
        decide_s: how long a question may be under way; who asks gives up then, with `TOO_SLOW`
    """

    def __init__(self, config: Callable[[], LiveConfig], now: Callable[[], float] = time.time) -> None:
        self._config: Final = config
        self._now: Final = now
        self._lock = threading.Lock()
        self._web: WebHooks | None = None  # made for the first question or news; guarded by _lock
        self._stopped = False  # guarded by _lock
        self._known: _Known | None = None  # replaced as a whole
        self.hooks: HookRunner | None = None  # set before the first connection
        # told of faults of our own
        self.on_error: ErrorHook = log_error  # likewise

    @property
    def decide_s(self) -> float:
        """See above."""
        return self._summary().timeout_s + (0.0 if self.hooks is None else self.hooks.decide_s)

    def stop(self, deadline_s: float) -> None:
        """Tell the HTTP hooks what is still to be told, for at most `deadline_s` seconds; then end their thread."""
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

    def _summary(self) -> _Known:
        config, known = self._config(), self._known
        if known is None or known.config is not config:
            levels = [level.values for level in config.levels]
            times = [float(values.get("access.hook_timeout_s", 0.0)) for values in levels]

            def given(name: str) -> bool:
                return bool(getattr(config.access, name)) or any(values.get(f"access.{name}") for values in levels)

            asks = any(map(given, ("on_connect", "on_publish", "on_play")))
            timeout_s = max([config.access.hook_timeout_s, *times]) + _SPARE_S if asks else 0.0
            known = self._known = _Known(config, given("on_end"), timeout_s)
        return known

    def access(self, request: LiveRequest) -> StreamAccess:
        name = f"{request.stream}/" if request.kind == "connect" else request.stream
        return self._config().at(name, _ROLES[request.kind]).access

    def check(self, request: LiveRequest) -> Refusal | None:
        return self._log_in(request) or self.access(request).check(request, self._now())

    def ask(self, request: LiveRequest, answer: _Answer) -> Question | Refusal | None:
        """Ask whether `request` is allowed. None: it is; a refusal: it is not; a question: that is being decided."""
        missed = _missed_connect(request)
        asked = [request] if missed is None else [missed, request]
        return _ask_each(Question(answer), (step for item in asked for step in self._steps(item)))

    def _steps(self, request: LiveRequest) -> Iterator[_Step]:
        """Yield what is asked, one after the other: each must allow it."""
        yield lambda _: self.check(request)
        # The application first, which costs less; what a web server was asked about, it takes for begun.
        if (hooks := self.hooks) is not None and hooks.decides[request.kind]:
            yield lambda answer: hooks.ask(request, answer)
        access = self.access(request)
        if access.asked(request.kind):
            web = self._web_hooks()
            yield lambda answer: UNDECIDED if web is None else web.ask(access, request, answer)

    def refuses_network(self, request: LiveRequest) -> Refusal | None:
        """Refuse who comes from where this is not allowed; None: it is. For requests that go on with what was."""
        return self.access(request).check_network(request)

    def identity(self, request: LiveRequest) -> str | None:
        """Return the publisher that a token names; None: no token does. See `StreamAccess.identity`."""
        return self.access(request).identity(request, self._now())

    def minds(self, request: LiveRequest) -> bool:
        access, hooks = self.access(request), self.hooks
        return bool(
            (request.kind == "play" and access.play_auth)
            or access.asked(request.kind)
            or self._config().rtmp.credentials is not None
            or (hooks is not None and hooks.decides[request.kind])
            or self.hears(request.kind)
        )

    def _log_in(self, request: LiveRequest) -> Refusal | None:
        """Refuse who comes over HTTP without a password where RTMP, whose sessions see to that, asks for one."""
        credentials = self._config().rtmp.credentials
        if credentials is None or request.protocol == "rtmp" or request.user is not None:
            return None
        given = (request.url.password or "").encode("utf-8", "surrogatepass")
        known = credentials.get(request.url.user or "")
        same = hmac.compare_digest((known or "").encode("utf-8", "surrogatepass"), given)
        return None if same and known else _LOG_IN

    def hears(self, kind: RequestKind) -> bool:
        return self._summary().told or (self.hooks is not None and kind in self.hooks.hears)

    def check_news(self, request: LiveRequest) -> None:
        """See whether one more publication of this address can be told of; raises like `HookRunner.check_news`."""
        if self.hooks is not None:
            self.hooks.check_news(request)

    def began(self, request: LiveRequest) -> None:
        if self.hooks is not None:
            self.hooks.began(request)

    def over(self, request: LiveRequest, why: str, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        if self.hooks is not None:
            self.hooks.over(request, why)
        access = self.access(request)
        if access.on_end and (web := self._web_hooks()) is not None:
            figures = {"send_bytes": sent_bytes, "recv_bytes": received_bytes} if request.kind == "connect" else {}
            web.tell(access, request, **figures)


def _ask_each(question: Question, steps: Iterator[_Step]) -> Question | Refusal | None:
    """Take steps until one refuses, or has to be waited for: then it goes on from there, on the thread that answers."""

    def go_on(_: Question, refusal: Refusal | None) -> None:
        if refusal is None and not question.cancelled:
            found = _ask_each(question, steps)
            if found is question:
                return
            refusal = None if isinstance(found, Question) else found
        question.tell(refusal)

    for step in steps:
        found = step(go_on)
        if isinstance(found, Question):
            question.under = found
            return question
        if found is not None:
            return found
    return None


def _missed_connect(request: LiveRequest) -> LiveRequest | None:
    """Return the connection that nobody was asked about: to an application that is named with a stream alone.

    A client may connect to one application and then ask for ``/other/stream``, or give all of it as the stream's name.
    """
    application = request.stream.partition("/")[0]
    if request.kind == "connect" or not request.connected or application == request.connected:
        return None
    return replace(request, kind="connect", url=replace(request.url, app=application, stream=""))
