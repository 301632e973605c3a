"""Hooks of an application in a live server: they decide who may connect, publish and play, and get news and frames.

How it works. None of it runs on a thread of the server. A question (`may_publish`, `may_play`...) goes to a loop of the
hooks' own, or to the application's if it names one, when it is a coroutine function, and to a worker thread when it is
a plain one; the connection that asks is not read meanwhile, and all others go on. Where questions wait for a worker,
addresses take turns, so that one that asks much waits for itself. What is told (`published`, `frame`,
`ended`) goes through one bounded queue to one thread, in order. A hook that nobody overrides costs nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from flowctl.core.flow.state import MessageClass
from flowctl.core.loop.faults import ErrorHook, report
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.loop.thread import LoopThread
from flowctl.core.text.addresses import address_key
from flowctl.core.text.fieldtypes import check_type
from flowctl.errors import ConfigError, LimitExceededError, LocalProtocolError
from flowctl.live.access.request import UNDECIDED, LiveRequest, Question, Refusal, RequestKind
from flowctl.live.access.turns import FairQueue, Turns

_LEAST_STOP_S: Final = 0.1
_MOST_WORKERS: Final = 32
"""Threads for plain functions that decide. More questions wait for one, addresses in turn."""
_MOST_COROUTINES: Final = 1000
"""Coroutines that decide at a time. More questions wait, addresses in turn."""
_MOST_ASKING: Final = 4096
_MOST_ASKING_OF_ADDRESS: Final = 256
"""Questions of all addresses, and of one, that wait for a coroutine; more are refused at once."""
_QUEUE_BYTES: Final = 32 * 1024 * 1024
"""Frames that may wait for `frame`: half a minute of a stream of 8 Mbit/s, while its recorder's disk stands still."""
_ITEM_BYTES: Final = 512
"""Memory charged for each call that waits, beside its payload."""

_MOST_NEWS: Final = 32
"""Publications of one address that wait to be told to the application: four times as many as it may have at once."""

_MOST_WAITING: Final = 10_000
"""Calls that wait while the application is busy; beyond it those about viewers and connections are left out."""

_NEWS: Final[dict[RequestKind, tuple[str, str]]] = {
    "connect": ("", "closed"),
    "publish": ("published", "ended"),
    "play": ("played", "stopped"),
}
"""Methods that tell that something has begun and that it has ended, by kind of request."""


class LiveFrame(NamedTuple):
    """A message of a stream, as its viewers get it.

    Args:
        message_class: header, key frame, other frame, audio or data.
        type_id: RTMP message type, which is the tag type of FLV: 8 audio, 9 video, 18 data.
        timestamp_ms: on the stream's own timeline, 0..2^32-1; it goes on when a publisher comes back.
        lost_count: messages of the stream that were left out just before this one, because `frame` was too slow.
    """

    stream: str
    message_class: MessageClass
    type_id: int
    timestamp_ms: int
    payload: bytes
    lost_count: int = 0


class LiveHooks:
    """Derive from it and override what is needed; each method may be a coroutine function.

    `may_connect`, `may_publish` and `may_play` decide: None lets the client in, a text refuses it and is what the
    client is told; a `Refusal` also says what kind of refusal it is. A hook that raises, returns anything else or takes
    longer than `decide_s` refuses; a coroutine is cancelled then. Only the connection itself waits for its call, calls
    for several connections overlap.

    The others tell: one call after the other, in order, on a thread of their own, where they may block without slowing
    the server. Hooks that cannot keep up with the frames miss some, see `LiveFrame.lost_count`; where thousands of
    viewers come and go faster than they are told of, some calls of `played`, `stopped` and `closed` are left out.

    Attributes:
        decide_s: time that a decision may take, in seconds; more than 0.
    """

    decide_s: float = 5.0

    def may_connect(self, request: LiveRequest) -> Awaitable[Refusal | str | None] | Refusal | str | None:
        """Decide whether a client of RTMP may connect. The default lets everybody."""
        del request
        return None

    def may_publish(self, request: LiveRequest) -> Awaitable[Refusal | str | None] | Refusal | str | None:
        """Decide whether a client may publish. The default lets everybody."""
        del request
        return None

    def may_play(self, request: LiveRequest) -> Awaitable[Refusal | str | None] | Refusal | str | None:
        """Decide whether a client may play, or wait for the stream. The default lets everybody."""
        del request
        return None

    def published(self, request: LiveRequest) -> Awaitable[None] | None:
        """A client publishes now (or stands by, where the server lets several do so)."""

    def ended(self, request: LiveRequest, why: str) -> Awaitable[None] | None:
        """The publication has ended; `why` is as in the log. Comes behind its last frame."""

    def unwritten(self, request: LiveRequest, what: str, why: str) -> Awaitable[None] | None:
        """A publication is not recorded, or not written as HLS, though settings ask for it; `what`: "record" or "hls".

        `why` is as in the log; empty: it is written again.
        """

    def played(self, request: LiveRequest) -> Awaitable[None] | None:
        """A client plays now, or waits for the stream."""

    def stopped(self, request: LiveRequest, why: str) -> Awaitable[None] | None:
        """The play has ended; `why` is as in the log."""

    def closed(self, request: LiveRequest, why: str) -> Awaitable[None] | None:
        """A connection that was let in is over; `request` is what `may_connect` was asked."""

    def frame(self, frame: LiveFrame) -> Awaitable[None] | None:
        """Take a message of any stream: headers first, then as they are published."""


class HookRunner:
    """Calls the hooks of one server on threads that are not the server's; any thread may call its methods."""

    def __init__(self, hooks: LiveHooks, on_error: ErrorHook, loop: asyncio.AbstractEventLoop | None = None) -> None:
        # The class itself would do until the first question, and then refuse everybody.
        check_type("hooks", hooks, LiveHooks)
        self._hooks: Final = hooks
        self._on_error: Final = on_error
        self._own: LoopThread | None = None  # made by `start`, if there is no loop of the application's
        self._loop = loop
        self._questions: Final[queue.SimpleQueue[bool]] = queue.SimpleQueue()  # True: one waits; False: end
        self._news: Final[queue.SimpleQueue[tuple[int, str, tuple[Any, ...]] | None]] = queue.SimpleQueue()
        self._teller = threading.Thread(target=self._tell_all, name="flowctl-hooks-news", daemon=True)
        self._lock = OwnedLock()
        self._waiting: FairQueue[Callable[[], None]] = FairQueue()  # questions, by address; guarded by _lock
        self._turns: Final = Turns(_MOST_COROUTINES, _MOST_ASKING, _MOST_ASKING_OF_ADDRESS)  # the loop's thread
        self._workers = 0  # threads for plain functions; guarded by _lock
        self._asked = 0  # questions that are with them or wait for one; guarded by _lock
        self._queued_bytes = 0  # size of what waits in _news; guarded by _lock
        self._untold: dict[str, int] = {}  # calls of `published` in _news, by address; guarded by _lock
        self._waiting_count = 0  # news in _news; guarded by _lock
        self._left_out = False  # whether some were since there were few; guarded by _lock
        # Those that publish, by connection and stream, where `unwritten` is wanted; guarded by _lock
        self._publishing: dict[tuple[int, str], LiveRequest] = {}
        self._tells_unwritten: Final = _overridden(hooks, "unwritten")
        self._lost_frames: dict[str, int] = {}  # by stream, since the last frame that was taken; guarded by _lock
        # whether there is a question to ask, by kind
        self.decides: Final = {kind: _overridden(hooks, f"may_{kind}") for kind in _NEWS}
        # takes (stream, class, type, timestamp, payload) of each message. None: nobody wants them.
        self.tap: Final = self._queue_frame if _overridden(hooks, "frame") else None
        self.decide_s: Final = hooks.decide_s
        # the kinds of which beginnings or ends are told
        self.told_kinds: Final = {
            kind for kind, names in _NEWS.items() if any(_overridden(hooks, name) for name in names if name)
        } | ({"publish"} if self._tells_unwritten else set())

    def start(self) -> None:
        if self._loop is None:
            self._own = LoopThread("flowctl-hooks", asyncio.new_event_loop(), lambda: None, self._on_error)
            self._loop = self._own.loop
            self._own.start()
        self._teller.start()

    def stop(self, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        self._news.put(None)
        if self._teller.ident is not None:
            self._teller.join(max(0.0, deadline_s))
        with self._lock:
            workers = self._workers
        for _ in range(workers):
            self._questions.put(False)
        if self._own is not None:
            with suppress(RuntimeError):
                self._own.loop.call_soon_threadsafe(self._own.stop)
            self._own.join(max(_LEAST_STOP_S, end - time.monotonic()))

    # -- questions

    def ask(self, request: LiveRequest, answer: Callable[[Question, Refusal | None], None]) -> Question:
        question = Question(answer)
        hook = getattr(self._hooks, f"may_{request.kind}")
        if inspect.iscoroutinefunction(hook):
            self._run(self._decide(lambda: hook(request), request, question), question)
        else:
            self._work(address_key(request.peer[0]), lambda: self._decide_plain(hook, request, question))
        return question

    def _run(self, decision: Coroutine[Any, Any, None], question: Question) -> None:
        try:
            self._schedule(decision)
        except RuntimeError as error:  # the application's loop is closed
            decision.close()
            report(self._on_error, "a hook", error)
            question.tell(UNDECIDED)

    def _schedule(self, work: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        if self._loop is None:
            raise RuntimeError("the hooks have no loop before start")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _decide(self, call: Callable[[], Awaitable[object]], request: LiveRequest, question: Question) -> None:
        refusal: Refusal | None = UNDECIDED
        try:
            async with asyncio.timeout(self.decide_s) as limit:
                await self._turns.acquire(address_key(request.peer[0]))
                try:
                    if not question.cancelled:  # withdrawn while it waited
                        refusal = _refusal(await call(), request.kind)
                finally:
                    self._turns.release()
        except asyncio.CancelledError:
            pass  # the loop ends
        except BaseException as error:  # noqa: BLE001 - whatever it is, the answer is no, and nobody else's matter
            if limit.expired() and isinstance(error, TimeoutError):
                return  # who asked gives up by himself
            report(self._on_error, f"hook may_{request.kind}", error)
        question.tell(refusal)

    async def _decide_awaitable(self, decision: Awaitable[object], request: LiveRequest, question: Question) -> None:
        """Decide by the awaitable that a plain function has returned; a coroutine is closed when the wait has ended."""
        try:
            await self._decide(lambda: decision, request, question)
        finally:
            if inspect.iscoroutine(decision):
                decision.close()

    def _decide_plain(self, hook: Callable[[LiveRequest], object], request: LiveRequest, question: Question) -> None:
        if question.cancelled:
            return  # withdrawn while it waited
        try:
            decision = hook(request)
            if inspect.isawaitable(decision):
                self._run(self._decide_awaitable(decision, request, question), question)
                return
            refusal = _refusal(decision, request.kind)
        except BaseException as error:  # noqa: BLE001 - as above
            report(self._on_error, f"hook may_{request.kind}", error)
            refusal = UNDECIDED
        question.tell(refusal)

    def _work(self, key: str, job: Callable[[], None]) -> None:
        """Have a worker do `job` of the address `key`; there is one for each that is under way, up to a number."""
        with self._lock:
            self._asked += 1
            self._waiting.put(key, job)
            new = self._asked > self._workers < _MOST_WORKERS
            self._workers += new
        self._questions.put(True)
        if new:
            threading.Thread(target=self._worker, name="flowctl-hooks-worker", daemon=True).start()

    def _worker(self) -> None:
        while self._questions.get():
            try:
                with self._lock:
                    job = self._waiting.pop()
                job()
            except BaseException as error:  # noqa: BLE001 - the server is stopping; the next question has its worker
                report(self._on_error, "the answer of a hook", error)
            with self._lock:
                self._asked -= 1

    # -- news

    def check_news(self, request: LiveRequest) -> None:
        """See whether the application can be told of one more publication of this address.

        What begins and ends faster than the application listens would delay the news of all others, and the frames.
        """
        with self._lock:
            count = self._untold.get(address_key(request.peer[0]), 0)
        if count >= _MOST_NEWS:
            raise LimitExceededError("hook_news", count + 1, _MOST_NEWS)

    def note_begin(self, request: LiveRequest) -> None:
        name = _NEWS[request.kind][0]
        if name and request.kind in self.told_kinds:
            if request.kind == "publish":
                with self._lock:
                    key = address_key(request.peer[0])
                    self._untold[key] = self._untold.get(key, 0) + 1
                    if self._tells_unwritten:
                        self._publishing[request.connection, request.stream] = request
            self._queue_news(name, request)

    def _forget_untold(self, request: LiveRequest) -> None:
        with self._lock:
            key = address_key(request.peer[0])
            count = self._untold.pop(key) - 1
            if count:
                self._untold[key] = count

    def note_end(self, request: LiveRequest, why: str) -> None:
        if request.kind in self.told_kinds:
            with self._lock:
                self._publishing.pop((request.connection, request.stream), None)
            self._queue_news(_NEWS[request.kind][1], request, why)

    def note_unwritten(self, connection: int, stream: str, what: str, why: str) -> None:
        with self._lock:
            request = self._publishing.get((connection, stream))
        if request is not None:
            self._queue_news("unwritten", request, what, why)

    def _queue_news(self, name: str, request: LiveRequest, *more: Any) -> None:
        with self._lock:
            # How many publications wait to be told of is limited already, see `check_news`.
            full = self._waiting_count >= _MOST_WAITING and (request.kind != "publish" or name == "unwritten")
            first, self._left_out = full and not self._left_out, full or self._left_out
            if not full:
                self._waiting_count += 1
                self._queued_bytes += _ITEM_BYTES
        if not full:
            self._news.put((_ITEM_BYTES, name, (request, *more)))
        elif first:
            error = LimitExceededError("hook_news", _MOST_WAITING + 1, _MOST_WAITING)
            report(self._on_error, f"hook {name}, and others that are left out", error)

    def _queue_frame(
        self, stream: str, message_class: MessageClass, type_id: int, timestamp: int, payload: bytes
    ) -> None:
        size = len(payload) + _ITEM_BYTES
        with self._lock:
            if self._queued_bytes + size > _QUEUE_BYTES:
                self._lost_frames[stream] = self._lost_frames.get(stream, 0) + 1
                return
            self._queued_bytes += size
            lost = self._lost_frames.pop(stream, 0) if self._lost_frames else 0
        self._news.put((size, "frame", (LiveFrame(stream, message_class, type_id, timestamp, payload, lost),)))

    def _tell_all(self) -> None:
        while (item := self._news.get()) is not None:
            size_bytes, name, args = item
            with self._lock:
                self._queued_bytes -= size_bytes
                if name != "frame":
                    self._waiting_count -= 1
                    self._left_out &= self._waiting_count > _MOST_WAITING // 2
            try:
                told = getattr(self._hooks, name)(*args)
                if inspect.isawaitable(told):
                    self._schedule(_await_result(told)).result()
            except BaseException as error:  # noqa: BLE001 - the next one is told all the same
                report(self._on_error, f"hook {name}", error)
            if name == "published":
                self._forget_untold(args[0])


def load_hooks(text: str) -> LiveHooks:
    """Return an object of the class that ``package.module:Name`` names, in the present folder or what is installed."""
    make = find_hooks(text)
    try:
        made = make()
    except Exception as error:
        raise _unusable_error(text, error) from error
    if not isinstance(made, LiveHooks):
        raise ConfigError(f"hooks {text!r} are no LiveHooks", hint="derive the class from flowctl.live.LiveHooks")
    return made


def find_hooks(text: str) -> Callable[[], object]:
    module, _, name = text.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make: Callable[[], object] = getattr(import_module(module), name)
    except Exception as error:
        raise _unusable_error(text, error) from error
    finally:
        sys.path.pop(0)
    return make


def _unusable_error(text: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"hooks {text!r} cannot be used: {type(error).__name__}: {error}",
        hint="write package.module:Name, of a class derived from flowctl.live.LiveHooks",
    )


async def _await_result(call: Awaitable[object]) -> None:
    await call


def _overridden(hooks: LiveHooks, name: str) -> bool:
    return getattr(getattr(hooks, name), "__func__", None) is not getattr(LiveHooks, name)


def _refusal(decision: object, kind: RequestKind) -> Refusal | None:
    if decision is None or isinstance(decision, Refusal):
        return decision
    if isinstance(decision, str) and decision:
        return Refusal(decision)
    raise LocalProtocolError(
        f"hook may_{kind} returned {decision!r}", hint="return None to let the client in, or a text to refuse it"
    )
