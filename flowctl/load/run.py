"""A whole load run: ``run_load(plan)`` starts the processes, watches them and the server, and returns what was found.

Theory of operation. One loop over the messages of all workers. First the publishers: the run begins when each of them
publishes. Then the viewers' workers are told at which moment to begin, and each second their figures are put together
into one `RunSample`. At the end, or when it is interrupted, viewers leave first, then publishers, so that nobody is cut
by the end of a stream. A worker that dies is reported, its peers are counted as errors, and the run goes on. When there
is nothing left to measure, because the server or all publishers are gone or everybody has left and nobody is to come,
it ends before its time; what went wrong is `RunResult.failure`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flowctl.core.text.userfiles import text_of
from flowctl.errors import BrokenError, ConfigError, InternalError, RemoteProtocolError
from flowctl.load.gathering import Gathering
from flowctl.load.peers.http import HTTP_SCHEMES
from flowctl.load.peers.link import Target
from flowctl.load.plan import LoadPlan
from flowctl.load.process import WorkerMessage, WorkerProcess
from flowctl.load.procfs import check_process
from flowctl.load.profiles import parse_profile
from flowctl.load.results.result import PeerKind, RunResult, RunSample
from flowctl.load.target import can_spread, check_descriptors, resolve
from flowctl.load.worker import ATTACK_PATIENCE_S, Orders
from flowctl.wire.client.source import FlvFile, check_has_media
from flowctl.wire.rtmp.url import RtmpUrl, parse_query

_START_S: Final = 30.0
"""Time for a worker to start: Python and its imports, beside others on a busy machine."""
_LEAD_S: Final = 0.3
"""Time from the first published frame to the first viewer."""
_BEGIN_S: Final = 0.1
"""Time from the order to begin to the begin itself."""
_STOP_S: Final = 15.0
_LAST_WORDS_S: Final = 0.25
_LOSS_S: Final = 1.0
"""Time from the loss of the server or of the publishers to the end of the run: viewers still see how it ends."""
_PROBE_S: Final = 1.0


def run_load(plan: LoadPlan, on_sample: Callable[[RunSample], None] | None = None) -> RunResult:
    """Run a load and return what was found; blocks until it is over.

    Ctrl-C and SIGTERM end it early and in order, with the results so far (`RunResult.interrupted`), where this is
    called from the main thread.
    """
    if plan.server_pid is not None:
        check_process(plan.server_pid)
    url, target = resolve(plan.url, allow_remote=plan.allow_remote)
    if url.scheme in HTTP_SCHEMES and plan.url.partition("?")[0].endswith(".m3u8"):
        hint = "give the address of the stream with .flv, or rtmp://"
        raise ConfigError("viewers play FLV, and this is an address of HLS", hint=hint)
    _check_attacks(plan, over_http=url.scheme in HTTP_SCHEMES)
    if plan.spread_addresses is None:
        plan = dataclasses.replace(plan, spread_addresses=can_spread(target))
    cores = os.cpu_count() or 1
    workers = plan.worker_count(cores)
    check_descriptors(max(-(-plan.peers // workers), plan.publishers))
    run = _Run(plan, url, target, on_sample)
    run.check_source()
    with _signals(run.interrupt):
        try:
            return run.carry_out(cores)
        finally:
            run.close()


@contextlib.contextmanager
def _signals(interrupt: Callable[[int], None]) -> Iterator[None]:
    """Let SIGINT, SIGTERM, SIGHUP and SIGQUIT call `interrupt` meanwhile; SIGUSR1 and SIGUSR2 do nothing.

    Elsewhere than in the main thread, they are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, lambda got, _: interrupt(got)) for number in ending}
    before |= {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(eq=False)
class _Run:
    """One run in progress."""

    plan: LoadPlan
    url: RtmpUrl
    target: Target
    on_sample: Callable[[RunSample], None] | None
    _inbox: queue.Queue[WorkerMessage] = field(default_factory=queue.Queue)
    _publishing: list[WorkerProcess] = field(default_factory=list)
    _viewing: list[WorkerProcess] = field(default_factory=list)
    _published: set[int] = field(default_factory=set)
    _signal: int | None = None
    _lost_at: float | None = None  # when server or publishers were lost
    _publishing_died: str = ""  # the last words of the process of the publishers
    _queries: list[str] = field(default_factory=list)
    _gathering: Gathering = field(init=False)

    def __post_init__(self) -> None:
        self._gathering = Gathering(self.plan, str(self.url), self.on_sample)

    @property
    def _interrupted(self) -> bool:
        return self._signal is not None

    def interrupt(self, number: int) -> None:
        """End the run early, because of the signal `number`; may be called from a signal handler."""
        self._signal = number

    def check_source(self) -> None:
        """Check the source of the publishers, and read what viewers bring, before anything starts."""
        plan = self.plan
        if plan.query_file is not None:
            self._queries = read_queries(plan.query_file)
        if plan.publishers and plan.source is not None:
            check_has_media(FlvFile(plan.source), plan.source)
        elif plan.publishers:
            plan.synthetic(0)

    # -- the parts of a run, in their order

    def carry_out(self, cores: int) -> RunResult:
        plan, gathering = self.plan, self._gathering
        orders = plan.assignments(cores)
        gathering.expect_peers(orders, plan.parsed_every(cores))
        if plan.publishers:
            self._publishing.append(
                WorkerProcess(self._orders("publishers", list(range(plan.publishers))), self._inbox)
            )
        workers = plan.worker_count(cores)
        # Each worker gets its share of every profile and of the ramp.
        self._viewing += (
            WorkerProcess(
                self._orders("viewers", [dataclasses.astuple(order) for order in orders[index::workers]]), self._inbox
            )
            for index in range(workers)
        )
        self._wait(lambda: all(worker.ready or worker.over for worker in self._all), _START_S)
        if not self._interrupted:
            self._check_started()
            self._start_publishers()
        if not self._interrupted:
            self._watch_viewers()
        gathering.result.interrupted = self._interrupted
        gathering.result.interrupted_by = self._signal
        self._stop()
        return gathering.finish([worker.done for worker in self._all if worker.done is not None])

    @property
    def _all(self) -> list[WorkerProcess]:
        return [*self._publishing, *self._viewing]

    def _orders(self, role: str, peers: list[Any]) -> Orders:
        plan, url = self.plan, self.url
        return Orders(
            role=role,
            family=self.target.family,
            address=list(self.target.address),
            urls=[_stream_url(plan, url, index) for index in range(plan.stream_count)],
            queries=self._queries,
            peers=peers,
            plan=plan,
        )

    def _check_started(self) -> None:
        for worker in self._all:
            if worker.died or not worker.ready:
                raise InternalError(
                    f"a worker process did not start: {worker.last_words()}",
                    hint="check that memory, processes and descriptors are left (ulimit -a), or use fewer --workers",
                )

    def _start_publishers(self) -> None:
        count = self.plan.publishers
        if not count:
            return
        for worker in self._publishing:
            worker.tell({"begin": time.monotonic()})
        timeout_s = self.plan.connect_timeout_s + self.plan.key_interval_s + 5
        if not self._wait(lambda: len(self._published) >= count, timeout_s) and not self._interrupted:
            raise BrokenError(
                f"{count - len(self._published)} of {count} publishers were not let publish within {timeout_s:.0f} s",
                hint="check that the server runs and that the stream is free",
            )
        self._wait(lambda: False, _LEAD_S)

    def _watch_viewers(self) -> None:
        """Let the viewers begin, and watch until the time is over."""
        plan, gathering = self.plan, self._gathering
        began = time.monotonic() + _BEGIN_S
        gathering.begin(began)
        for worker in self._viewing:
            worker.tell({"begin": began})
        end = began + plan.length_s
        seconds = int(end - began)
        while not self._interrupted:
            now = time.monotonic()
            # The figures of the last second come a moment after it.
            if now >= end and (gathering.closed >= seconds or now >= end + _LAST_WORDS_S):
                break
            gathering.close_second(now, len([worker for worker in self._viewing if not worker.over]))
            if self._nothing_left(now):
                break
            self._listen(0.05 if now < end - 0.05 else 0.01)
        if not self._interrupted:
            gathering.result.failure = self._failure(time.monotonic() - began)

    def _nothing_left(self, now: float) -> bool:
        gathering = self._gathering
        if all(worker.over for worker in self._viewing) or gathering.deserted:
            return True
        publishers = self.plan.publishers
        lost = gathering.server_gone or self._publishing_died or 0 < publishers <= len(gathering.lost_publishers)
        if lost and self._lost_at is None:
            self._lost_at = now
        return self._lost_at is not None and now >= self._lost_at + _LOSS_S

    def _failure(self, after_s: float) -> str:
        """Return what went wrong until now, a cause before its effect; "" if nothing did."""
        gathering, publishers = self._gathering, self.plan.publishers
        if gathering.server_gone:
            return f"the server ended in mid run: its process was gone after {after_s:.0f} s"
        if self._publishing_died:
            return f"the publisher was lost: its process died ({self._publishing_died})"
        lost = gathering.lost_publishers
        # By its viewers alone a stream may end, where that was asked for.
        cut = 0 if self.plan.until == "stream-end" else gathering.healthy_cut
        if (lost or cut) and not self._server_answers():
            return f"the server ended in mid run: after {after_s:.0f} s nobody listened there any more"
        if lost:
            who = "the publisher was" if publishers == 1 else f"{len(lost)} of {publishers} publishers were"
            return f"{who} lost after {lost[0].ended_s or 0:.1f} s: {lost[0].end_details}"
        if cut:
            return f"all {cut} healthy viewers were cut before the run was over: the stream or the server ended"
        return ""

    def _server_answers(self) -> bool:
        """Return whether the server's address still accepts connections."""
        with socket.socket(self.target.family, socket.SOCK_STREAM) as sock:
            sock.settimeout(_PROBE_S)
            try:
                sock.connect(self.target.address)
            except OSError:
                return False
        return True

    def _stop(self) -> None:
        patience_s = 0.0 if self._interrupted else ATTACK_PATIENCE_S
        for group in (self._viewing, self._publishing):
            for worker in group:
                worker.tell({"stop": patience_s})
            end = time.monotonic() + _STOP_S
            while not all(worker.over for worker in group) and time.monotonic() < end:
                self._listen(0.1)
            for worker in group:
                if not worker.over:
                    self._gathering.warn("a worker process did not end in time; its last figures are missing")

    def close(self) -> None:
        for worker in self._all:
            worker.close()

    # -- listening

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Listen until a condition holds; return whether it does."""
        end = time.monotonic() + timeout_s
        while not self._interrupted and time.monotonic() < end:
            if condition():
                return True
            self._listen(min(0.05, timeout_s))
        return condition()

    def _listen(self, timeout_s: float) -> None:
        """Handle the messages of the workers, and wait for the first one."""
        try:
            message = self._inbox.get(timeout=timeout_s)
            while True:
                self._handle_message(*message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _handle_message(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        worker.note_message(message)
        gathering = self._gathering
        if "ready" in message:
            gathering.note_start(self._all.index(worker), message["cpu_s"])
        elif "row" in message:
            gathering.add_row(message["row"])
        elif "sample" in message:
            publishing = worker in self._publishing
            gathering.add_report(self._all.index(worker), message, publishing=publishing)
        elif "failed" in message:
            raise BrokenError(f"a worker process failed: {message['failed']}", hint=message["hint"])
        elif "published" in message:
            index = message["published"]
            self._published.add(index)
            if self.plan.source is not None:
                for viewing in self._viewing:
                    viewing.tell({"origin": [index, message["origin_us"]]})
        elif "unpublished" in message:
            raise BrokenError(
                f"publisher {message['unpublished'] + 1} was not let publish: {message['why']}",
                hint="check that the server runs and that the stream is free",
            )
        elif "publisher_lag_s" in message:
            gathering.note_publisher_lag(message["publisher_lag_s"])
        elif "ended" in message and worker.died:
            gathering.note_death(worker.orders, worker.last_words())
            if worker in self._publishing:
                self._publishing_died = worker.last_words()


def read_queries(path: str) -> list[str]:
    """Return what viewers bring, a line each: a query, or an address with one behind it."""
    hint = "a line each, like key=... or room?expires=...&token=..."
    try:
        text = text_of(Path(path).read_bytes())
        lines = [line.strip().rpartition("?")[2] for line in text.split("\n") if line.strip()]
        for line in lines:
            parse_query(line)
    except (OSError, UnicodeDecodeError, RemoteProtocolError) as error:
        why = getattr(error, "strerror", None) or "it holds no queries"
        raise ConfigError(f"cannot use {path} for viewers: {why}", hint=hint) from error
    if not lines or not all("=" in line for line in lines):
        raise ConfigError(f"{path} has no query, or a line that is none", hint=hint)
    return lines


def _check_attacks(plan: LoadPlan, *, over_http: bool) -> None:
    """See that attacks on RTMP go to an address of RTMP, and those on HTTP to one of HTTP."""
    for name in plan.profiles:
        chosen = parse_profile(name).profile
        if chosen.kind is PeerKind.HOSTILE and chosen.over_http is not over_http:
            raise ConfigError(
                f"profile {name} attacks {'HTTP' if chosen.over_http else 'RTMP'}, which this address is not",
                hint="give an address like http://127.0.0.1:8080/live/test.flv for H01 to H08, rtmp:// for others",
            )


def _stream_url(plan: LoadPlan, url: RtmpUrl, index: int) -> str:
    base, mark, query = plan.url.partition("?")
    if plan.stream_count == 1:
        return plan.url
    head, _, _ = base.rstrip("/").rpartition("/")
    suffix = ".flv" if url.scheme in HTTP_SCHEMES else ""
    name = plan.stream_name((url.stream or url.app).removesuffix(suffix), index)
    return f"{head}/{name}{suffix}{mark}{query}"
