"""HTTP hooks: the operator's web server decides who may connect, publish and play, and is told when each has ended.

How it works. Names, bodies and answers are those of SRS: a POST with a JSON object; status 200 with ``0`` or
``{"code": 0}`` allows. All of it runs on one loop of its own, on which httpx sends; a poll group's thread only puts a
question there. Bounded are the questions under way (addresses take turns), those that wait, the time of each, what
is read of an answer, and what waits to be told. A redirect is not followed: it would carry keys elsewhere. What is no
answer (no connection, no time, another status, something else than a number) is a failure, and the settings say
whether one that asks meanwhile is refused or let in. Logs name the host of a hook and what failed, and never an
address, a body or an answer. Sets of web token keys are fetched here too, in the same bounds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

import structlog

from flowctl.core.loop.faults import ErrorHook, report
from flowctl.core.loop.thread import LoopThread
from flowctl.core.loop.trust import client_context
from flowctl.core.text.addresses import address_key, bracketed, join_host_port
from flowctl.errors import ConfigError, InternalError, LimitExceededError
from flowctl.live.access.request import UNDECIDED, LiveRequest, Question, Refusal, RequestKind, Why
from flowctl.live.access.rules import HookFailure, StreamAccess
from flowctl.live.access.turns import Turns
from flowctl.live.access.webtokens import MOST_SET_BYTES, RETRY_S, WebTokenKey

if TYPE_CHECKING:
    import httpx

_log: Final = structlog.get_logger("flowctl.access")
_QUESTIONS_AT_ONCE: Final = 64
"""Questions under way at a time. A hook server that answers in 5 ms decides about ten thousand a second."""
_MOST_WAITING: Final = 4096
_MOST_PER_ADDRESS: Final = 256
"""Questions, and news, of one address that wait: it shall not keep out, or push out, those of others."""
_MOST_ANSWER_BYTES: Final = 64 * 1024
"""Longest answer; SRS's own servers answer with some 20 bytes."""
_TELLERS: Final = 4
"""Threads that send news: those of one connection in order, those of several side by side."""
_MOST_NEWS: Final = 4096
FETCH_S: Final = 5.0
"""Longest time in which a set of web token keys must have come, whole."""
_LOG_EVERY_S: Final = 10.0
_MOST_HOSTS: Final = 256
_WIND_UP_S: Final = 1.0
"""Time at the end in which requests under way are given up in order; it takes milliseconds."""
_ACTIONS: Final[dict[RequestKind, tuple[str, str]]] = {
    "connect": ("on_connect", "on_close"),
    "publish": ("on_publish", "on_unpublish"),
    "play": ("on_play", "on_stop"),
}
_REFUSING_STATUSES: Final = {401: Why.UNAUTHORIZED, 403: Why.FORBIDDEN}
"""Statuses that refuse. Others, 404 among them, come of a wrong address or a server in trouble as well. 401 alone says
that the client may have guessed: another refusal may be the end of a show, for a crowd whose tokens were good."""
_REFUSED: Final = "The server's hook does not allow this."
_FAILED: Final = Refusal("The server could not ask whether to allow this.", Why.UNAVAILABLE)
_SERVER_ID: Final = f"vid-{secrets.token_hex(4)}"
_SERVICE_ID: Final = secrets.token_hex(4)
"""Identity of this process: SRS makes it anew at each start, and keeps `_SERVER_ID` where it has a file for it."""


class _NoAnswerError(Exception):
    """The hook gave no valid answer; the text is for the log."""


class _News(NamedTuple):
    urls: tuple[str, ...]
    body: dict[str, Any]
    timeout_s: float
    key: str


def body_of(action: str, request: LiveRequest) -> dict[str, Any]:
    """Return the object that SRS would send for it. It holds what the client put behind the name, keys too."""
    url = request.url
    param = f"?{url.raw_query}" if url.raw_query else ""
    body: dict[str, Any] = {
        "server_id": _SERVER_ID,
        "service_id": _SERVICE_ID,
        "action": action,
        "client_id": str(request.connection),
        "ip": request.peer[0],
        "vhost": url.vhost or "__defaultVhost__",
        "app": url.app,
        "tcUrl": url.tc_url + (param if request.kind == "connect" else ""),
    }
    if request.kind != "connect":
        body |= {"stream": url.stream, "param": param, "stream_url": f"/{url.path}"}
        digest = hashlib.blake2b(url.path.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
        body["stream_id"] = f"vid-{digest}"  # always the same for the same name
    if action in ("on_connect", "on_play"):
        body["pageUrl"] = request.page_url
    return body


def read_answer(status: int, body: bytes) -> Refusal | None:
    if status in _REFUSING_STATUSES:
        return Refusal(_REFUSED, _REFUSING_STATUSES[status], guess=_REFUSING_STATUSES[status] is Why.UNAUTHORIZED)
    if status != 200:
        raise _NoAnswerError(f"status {status}")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _NoAnswerError("neither 0 nor JSON") from error
    if isinstance(value, dict):
        value = value.get("code")
    if not isinstance(value, int) or isinstance(value, bool):
        raise _NoAnswerError("no code")
    return Refusal(_REFUSED, guess=False) if value else None


class WebHooks:
    """Asks and tells the HTTP hooks; any thread may call its methods."""

    def __init__(self, on_error: ErrorHook) -> None:
        self._on_error: Final = on_error
        self._thread: Final = LoopThread("flowctl-web-hooks", asyncio.new_event_loop(), lambda: None, on_error)
        self._stopped = False
        self._lock = threading.Lock()
        self._untold: dict[str, int] = {}  # news that wait, by address; guarded by _lock
        self._left_out = 0  # news that found no room since the last line about it; guarded by _lock
        # The rest belongs to the loop's thread:
        self._client: httpx.AsyncClient | None = None
        self._turns: Final = Turns(_QUESTIONS_AT_ONCE, _MOST_WAITING, _MOST_PER_ADDRESS)
        self._news: Final[list[asyncio.Queue[_News]]] = [asyncio.Queue() for _ in range(_TELLERS)]
        self._tasks: Final[set[asyncio.Task[None]]] = set()
        self._logged: Final[dict[str, tuple[float, int]]] = {}  # by host: last line, failures since

    def start(self) -> None:
        self._thread.start()
        self._thread.loop.call_soon_threadsafe(self._start_tellers)

    def _start_tellers(self) -> None:
        self._client = _make_client()
        for queue in self._news:
            task = self._thread.loop.create_task(self._tell_all(queue))
            self._tasks.add(task)

    def stop(self, deadline_s: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        end = time.monotonic() + deadline_s
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._drain(), self._thread.loop).result(max(0.0, deadline_s))
        self._thread.end_at = time.monotonic() + _WIND_UP_S
        with suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(self._thread.stop)
        self._thread.join(max(_WIND_UP_S, end - time.monotonic()))

    async def _drain(self) -> None:
        for queue in self._news:
            await queue.join()
        if self._client is not None:
            await self._client.aclose()

    # -- questions

    def ask(
        self, access: StreamAccess, request: LiveRequest, answer: Callable[[Question, Refusal | None], None]
    ) -> Question:
        question = Question(answer)
        self._submit(self._decide(access, request, question), lambda: question.tell(UNDECIDED))
        return question

    def _submit(self, work: Coroutine[Any, Any, None], otherwise: Callable[[], None]) -> None:
        try:
            asyncio.run_coroutine_threadsafe(work, self._thread.loop)
        except RuntimeError:  # the loop has ended
            work.close()
            otherwise()

    async def _decide(self, access: StreamAccess, request: LiveRequest, question: Question) -> None:
        refusal: Refusal | None = UNDECIDED
        action = _ACTIONS[request.kind][0]
        body, urls = json.dumps(body_of(action, request)).encode(), access.asked(request.kind)
        until = asyncio.get_running_loop().time() + access.hook_timeout_s
        try:
            async with asyncio.timeout_at(until):
                await self._turns.acquire(address_key(request.peer[0]))
                if question.cancelled:
                    self._turns.release()
                    return
            refusal = await self._ask_all(access, action, urls, body, until)
        except (TimeoutError, LimitExceededError):
            self._log_failure(urls[0], action, "too many questions wait")
            refusal = _FAILED if access.hook_failure is HookFailure.REFUSE else None
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):  # that is the end of the loop
                report(self._on_error, f"HTTP hook {action}", error)
            else:
                raise
        finally:
            question.tell(UNDECIDED if self._stopped else refusal)  # what fails at the end is no fault of the hook's

    async def _ask_all(
        self, access: StreamAccess, action: str, urls: tuple[str, ...], body: bytes, until: float
    ) -> Refusal | None:
        """Ask all hooks at once, so that one that hangs does not hide the answer of another; give the turn back."""
        try:
            asked = [self._ask_one(access, action, url, body, until) for url in urls]
            refusals = [refusal for refusal in await asyncio.gather(*asked) if refusal is not None]
        finally:
            self._turns.release()
        said = [refusal for refusal in refusals if refusal is not _FAILED]
        return next(iter(said or refusals), None)

    async def _ask_one(self, access: StreamAccess, action: str, url: str, body: bytes, until: float) -> Refusal | None:
        try:
            return read_answer(*await self._request("POST", url, until, body))
        except _NoAnswerError as error:
            self._log_failure(url, action, str(error))
            return _FAILED if access.hook_failure is HookFailure.REFUSE else None

    async def _request(
        self, method: str, url: str, until: float, body: bytes | None = None, most_bytes: int = _MOST_ANSWER_BYTES
    ) -> tuple[int, bytes]:
        """Return status and body of an answer that comes before `until`, on the clock of the loop."""
        read = bytearray()
        try:
            # The limit is on all of it: one that sends an octet now and then would pass any limit on single reads.
            async with asyncio.timeout_at(until), self._started_client().stream(method, url, content=body) as response:
                plain = response.headers.get("content-encoding", "identity") == "identity"
                async for piece in response.aiter_raw():
                    read += piece
                    if len(read) > most_bytes or not plain:
                        break
                status = response.status_code
        except TimeoutError as error:
            raise _NoAnswerError("no answer in time") from error
        except Exception as error:
            # It may be an error of any library below, whose text may quote the address or the answer.
            raise _NoAnswerError(_why_untrusted(error) or type(error).__name__) from error
        if not plain or len(read) > most_bytes:
            raise _NoAnswerError("a compressed answer" if not plain else f"more than {most_bytes} bytes")
        return status, bytes(read)

    def _started_client(self) -> httpx.AsyncClient:
        if self._client is None:
            raise InternalError("HTTP hooks are asked before the start")
        return self._client

    def _log_failure(self, url: str, action: str, why: str) -> None:
        """Log that a hook failed: each host once in a while, with how often it did."""
        host, now = _host_of(url), time.monotonic()
        last, count = self._logged.get(host, (now - _LOG_EVERY_S, 0))
        if now - last >= _LOG_EVERY_S:
            _log.warning("HTTP hook failed", action=action, hook=host, why=why, failures=count + 1)
            last, count = now, -1
        if len(self._logged) >= _MOST_HOSTS:
            self._logged.clear()
        self._logged[host] = (last, count + 1)

    # -- sets of web token keys

    def fetch(self, key: WebTokenKey, then: Callable[[], None]) -> None:
        """Fetch a set anew, unless that is under way or was done just now, and call `then`, whatever comes of it."""
        self._submit(self._fetch_once(key, then), then)

    async def _fetch_once(self, key: WebTokenKey, then: Callable[[], None]) -> None:
        try:
            if key.fetching is None and time.monotonic() >= key.again_at:
                key.fetching = asyncio.get_running_loop().create_task(self._fetch(key))
            if key.fetching is not None:
                await asyncio.shield(key.fetching)
        finally:
            then()

    async def _fetch(self, key: WebTokenKey) -> None:
        now = time.monotonic()
        key.again_at = now + RETRY_S
        try:
            until = asyncio.get_running_loop().time() + FETCH_S
            status, octets = await self._request("GET", key.source, until, most_bytes=MOST_SET_BYTES)
            if status != 200:
                raise _NoAnswerError(f"status {status}")  # noqa: TRY301 - as what goes wrong before
            changed = key.accept_set(octets, now)
        except (_NoAnswerError, ConfigError) as error:
            key.put_off(now)
            _log.warning("web token keys not fetched", host=_host_of(key.source), why=str(error), keys=len(key.keys))
        except Exception as error:  # noqa: BLE001 - a fault of ours: what was fetched before stays in force
            key.put_off(now)
            report(self._on_error, "web token keys", error)
        else:
            if changed:
                _log.info("web token keys changed", host=_host_of(key.source), keys=len(key.keys))
        finally:
            key.fetching = None

    # -- news

    def tell(self, access: StreamAccess, request: LiveRequest, **more: Any) -> None:
        """Tell the hooks of `access` that a connection, publication or play has ended; their answer is ignored."""
        key = address_key(request.peer[0])
        with self._lock:
            waiting = self._untold.get(key, 0)
            full = waiting >= _MOST_PER_ADDRESS or sum(self._untold.values()) >= _MOST_NEWS
            if full:
                self._left_out += 1
            else:
                self._untold[key] = waiting + 1
        if full:
            return
        body = body_of(_ACTIONS[request.kind][1], request) | more
        news = _News(access.on_end, body, access.hook_timeout_s, key)
        queue = self._news[request.connection % _TELLERS]
        with suppress(RuntimeError):  # the loop has ended
            self._thread.loop.call_soon_threadsafe(queue.put_nowait, news)

    async def _tell_all(self, queue: asyncio.Queue[_News]) -> None:
        while True:
            news = await queue.get()
            body = json.dumps(news.body).encode()
            for url in news.urls:
                try:
                    await self._request("POST", url, asyncio.get_running_loop().time() + news.timeout_s, body)
                except _NoAnswerError as error:
                    self._log_failure(url, news.body["action"], str(error))
            with self._lock:
                count = self._untold.pop(news.key) - 1
                if count:
                    self._untold[news.key] = count
                left_out, self._left_out = self._left_out, 0
            if left_out:
                _log.warning("HTTP hooks were not told of all that is over", left_out=left_out)
            queue.task_done()


def _why_untrusted(error: BaseException | None) -> str:
    """Return what is wrong with the certificate of the other end; empty: the error is another one."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return "" if error is None else f"its certificate is not to be trusted: {error.verify_message}"


def _host_of(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{bracketed(host) if parts.port is None else join_host_port(host, parts.port)}"


def _make_client() -> httpx.AsyncClient:
    import httpx  # noqa: PLC0415 - only servers with HTTP hooks pay for it

    for name in ("httpx", "httpcore"):  # they log each request with its whole address
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
    # Each question has a connection of its own, as with SRS: one that the other end is closing would be a failure.
    # No proxy and no .netrc of the environment: they would be handed keys.
    return httpx.AsyncClient(
        verify=client_context(),
        follow_redirects=False,
        trust_env=False,
        timeout=None,  # noqa: S113 - the whole of it has one, see `_post`
        limits=httpx.Limits(max_keepalive_connections=0),
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "flowctl"},
    )
