"""The supervisor: starts the workers of one server, watches them, starts them again, and ends them.

Theory of operation. It makes a listening socket for each worker, all on one port, and keeps them open; each worker is a
fresh process that serves one of them. What changes the set of workers is done on the main thread, in `look`, since the
kernel ends a worker when the *thread* that started it ends. Threads that wait for processes, and that of the link,
enter what they saw in a queue and wake it.

It serves no connection itself, and so has nothing that a peer could make it do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import mmap
import os
import pickle
import queue
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import structlog

from flowctl.control.listener import ControlListener
from flowctl.control.summary import shown
from flowctl.control.together import merge_figures
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.server.handover import Heir, Loan
from flowctl.core.server.program import ServerProgram
from flowctl.errors import ClosedError, ConfigError, FlowctlError, LocalProtocolError
from flowctl.live.bans.penalties import overflow_of
from flowctl.live.bans.words import WordKind
from flowctl.live.changes import Changes
from flowctl.live.cluster.media.keeper import MediaKeeper
from flowctl.live.cluster.media.order import StreamOrder
from flowctl.live.cluster.workers.child import Child, make_folder
from flowctl.live.cluster.workers.counts import REGION_BYTES, clear
from flowctl.live.cluster.workers.link import FOR_EVER_S
from flowctl.live.cluster.workers.operating import WorkerOperations
from flowctl.live.cluster.workers.order import SOCKET, WORKER, WORKERS, WorkerConfig
from flowctl.live.cluster.workers.restarts import HUNG_S, START_S, WorkerPulse, WorkerRestarts
from flowctl.live.cluster.workers.sockets import close_all, worker_sockets
from flowctl.live.cluster.workers.streams import SupervisorNames, link_path
from flowctl.live.config import LiveConfig
from flowctl.live.server import book_of
from flowctl.nodes.rpc.access.access import AuthLevel
from flowctl.nodes.rpc.message import RpcMessage
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.peers.peer import ConnectionID

if TYPE_CHECKING:
    from flowctl.live.admin.listener import AdminListener
    from flowctl.live.fleet.member import Member

_log: Final = structlog.get_logger("flowctl.workers")
_STOP_S: Final = 7.0
"""Time that workers have to end: the grace of their connections, and the writing of their records."""
_LOOK_S: Final = 1.0
_FIGURES_S: Final = 2.0
"""Time for which a line of figures is waited for: the main thread does nothing else meanwhile."""
_WORDS_S: Final = 0.5
"""Time that a worker that hangs has to say where."""


class Worker:
    """One process of a worker."""

    def __init__(self, order: WorkerConfig, child: Child, now: float) -> None:
        self.number: Final = order.number
        self.serial: Final = order.serial
        self.child: Final = child
        self.pid: Final = child.pid
        self.started_at: Final = now
        self.pulse: Final = WorkerPulse(now)
        self.conn: ConnectionID | None = None  #: its link. None: it has not said so yet.
        self.ready = False
        self.hung = False


class Supervisor:
    """The supervisor of one server's workers. Main thread, but where something else is said."""

    _heir: Heir | None = None  # the server that takes the place of this one; told when this one ends
    _member: Member | None = None  # the part in a fleet. None: it is in none.

    def __init__(
        self,
        program: ServerProgram,
        options: LiveConfig,
        count: int,
        *,
        wake: Callable[[], None],
        log_level: str | int = "info",
        log_json: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if sys.platform != "linux" or not hasattr(socket, "SO_REUSEPORT"):
            raise ConfigError("several workers need Linux", hint="serve with one: --workers 1")
        self._program: Final = program
        self._count: Final = count
        self._wake: Final = wake
        self._log_level: Final = log_level
        self._log_json: Final = log_json
        self._clock: Final = clock
        book = book_of(options)
        try:
            self._sockets, port = worker_sockets(options, count)
        except ConfigError:
            book.close()
            raise
        self.address: tuple[str, int] = self._sockets[0]["rtmp"][0].getsockname()[:2]  #: that is served
        self.options: Final = dataclasses.replace(options, port=port)
        self.limits = str(options.limits)  #: those of new connections, in words; once it has started
        self._folder: Final = make_folder("workers")
        self.node: Final = RpcNode(name="flowctl-workers", on_error=self._report)  #: speaks with the workers
        self.node.add_category(WORKERS, AuthLevel.ADMIN)
        for name, asked in (("hello", self._hello), ("ready", self._ready), ("stay", _stay), ("words", self._words)):
            self.node.add_request_command(WORKERS, name, asked)
        for name, told in (("changed", self._changed), ("verdicts", self._take_verdicts), ("media", self._written)):
            self.node.add_command(WORKERS, name, told)
        self._names: Final = SupervisorNames(options, self.node)
        self._media: Final = MediaKeeper(options, self._tell_unwritten)
        self._lock: Final = OwnedLock()
        self._book: Final = book  # guarded by _lock
        self._jobs: Final[queue.SimpleQueue[Callable[[], object] | None]] = queue.SimpleQueue()
        self._judge: Final = threading.Thread(target=self._do_jobs, name="flowctl-bans", daemon=True)
        self.operating: Final = WorkerOperations(
            self.node,
            self._linked_locked,
            self._expected,
            lock=self._lock,
            book=book,
            changes=Changes(self._report),
            drains=self._drain,
            hands_over=self._hand_over,
            limits_file=options.limits_file,
            clock=clock,
        )
        if options.fleet_file is not None:
            # Loaded for a member of a fleet: it brings the messenger with it.
            from flowctl.live.fleet.config import read_config  # noqa: PLC0415 - as said
            from flowctl.live.fleet.member import Member  # noqa: PLC0415 - as said

            fleet = read_config(options.fleet_file)
            self._member = Member(fleet, book, self._jobs.put, self.operating.take_words, self._lock)
            self.operating.fleet = self._member
        self._control: ControlListener | None = None
        self._admin: AdminListener | None = None
        if options.admin != "off":
            # Loaded where it is asked for: it brings FastAPI and uvicorn with it, of an extra of its own.
            from flowctl.live.admin.listener import AdminListener  # noqa: PLC0415 - as said

            self._admin = AdminListener(options, self.operating.answer, self._report)
        self._workers: dict[int, Worker] = {}  # by serial; guarded by _lock
        self._serial = 0
        self._restarts: Final = {number: WorkerRestarts(Random()) for number in range(1, count + 1)}
        self._due: Final[dict[int, float]] = {}  # when the next process of a worker is started
        self._gone: Final[queue.SimpleQueue[Worker]] = queue.SimpleQueue()
        self._counts_fd: Final = os.memfd_create("flowctl-counts", os.MFD_CLOEXEC)
        os.ftruncate(self._counts_fd, count * REGION_BYTES)
        self._counts: Final = memoryview(mmap.mmap(self._counts_fd, count * REGION_BYTES))
        self._counts_key: Final = secrets.token_bytes(16)
        self._started = False
        self._start_lock: Final = OwnedLock()
        self._ending = False  # no worker is started any more; guarded by _start_lock

    # -- life

    def start(self, wait: Callable[[float], bool]) -> bool:
        """Start all workers, and return once all serve."""
        self.node.listen_plain(f"ipc://{self._folder / SOCKET}", AuthLevel.ADMIN)
        self.node.start()
        self._judge.start()
        self.operating.media = self._media.figures
        if self.options.writes_media:
            self._media.start()
        for number in range(1, self._count + 1):
            self._spawn(number)
        until = self._clock() + START_S
        while not all(worker.ready for worker in self.workers()):
            if wait(_LOOK_S):
                return False
            self._see_first_ends()
            if self._clock() > until:
                raise ConfigError(f"the workers were not ready within {START_S:g} s", hint="look at the lines above")
        self._started = True
        self._join_fleet()
        if self.options.control_addresses:
            self._control = ControlListener(self.options, self.address, self.operating.answer, self._report)
            self._control.start()
        if self._admin is not None:
            self._admin.start()
        _log.info("workers started", count=self._count, pids=[worker.pid for worker in self.workers()])
        return True

    def _join_fleet(self) -> None:
        """Take part in the fleet, if there is one, with the limits that it had in our last life."""
        if self._member is None:
            return
        with self._lock:
            limits = self._book.words.get("", WordKind.LIMITS)
        if limits is not None:
            self.operating.take_limits(limits)
        self._member.start()

    def _see_first_ends(self) -> None:
        with contextlib.suppress(queue.Empty):
            worker = self._gone.get_nowait()
            words, said = worker.child.last_words(), worker.child.how_it_ended()
            self._bury(worker)
            error = words.get("error") or f"it ended with {said['ended']}"
            if words.get("config"):
                raise ConfigError(str(error), hint=words.get("hint"))
            raise FlowctlError(f"worker {worker.number} could not start: {error}", hint=words.get("hint"))

    def look(self) -> None:
        """Start what is due, reap what has ended, and ask the others for a sign of life; each second and when woken."""
        now = self._clock()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ended(self._gone.get_nowait(), now)
        for number in [number for number, due in self._due.items() if due <= now]:
            del self._due[number]
            self._spawn(number)
        for worker in self.workers():
            self._feel_pulse(worker, now)
        with self._lock:
            self._book.follow_clock()

    @property
    def next_look_s(self) -> float:
        now = self._clock()
        return max(0.01, min([_LOOK_S, *(due - now for due in self._due.values())]))

    @property
    def finished(self) -> bool:
        """Whether it drains and all workers have ended."""
        return self._ends() and not self.workers()

    def stop(self, deadline_s: float = _STOP_S) -> bool:
        """End all workers in order, those that take too long at once; return whether all ended in order."""
        self.accept_no_more()
        for listener in (self._control, self._admin, self._member):
            if listener is not None:
                listener.stop(1.0)
        in_time = True
        for worker in self.workers():
            worker.child.signal(signal.SIGTERM)
        until = time.monotonic() + deadline_s
        for worker in self.workers():
            if not worker.child.end(max(0.0, until - time.monotonic())):
                in_time = False
                _log.warning("worker killed, it did not end in time", worker=worker.number, within_s=deadline_s)
            self._bury(worker)
        self._media.stop()
        self._jobs.put(None)
        if self._judge.ident is not None:
            self._judge.join(1.0)
        self.node.stop(1.0)
        with self._lock:
            self._book.close()
        if self._heir is not None:
            self._heir.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return in_time

    def accept_no_more(self) -> None:
        """Start no worker any more, and let go of the port: only workers that accept hold it now. Any thread."""
        with self._start_lock:
            self._ending = True
            close_all([sock for mine in self._sockets for socks in mine.values() for sock in socks])

    def _hand_over(self, path: Path, drain: Callable[[], object]) -> None:
        """Hand the sockets to a server that is to take the place of this one; `drain` is called once it serves."""
        if self._ends():
            raise LocalProtocolError("the server drains already, or stops", hint="start the other one without it")
        if self._heir is not None and self._heir.waited_for:
            raise LocalProtocolError("another server is taking its place already", hint="wait until that one serves")
        ours = {sock: name for mine in self._sockets for name, socks in mine.items() for sock in socks}
        sockets = [(name, sock) for sock, name in ours.items()]
        loans: list[Loan] = [self._lend_book]
        if self._member is not None:
            loans.append(self._member.lend)
        if self._control is not None:
            loans.append(self._control.lend)
        if self._admin is not None:
            sockets += self._admin.sockets
        self._heir = Heir(path, sockets, loans, partial(self._give_way, drain), self._go_on)

    def _give_way(self, drain: Callable[[], object]) -> None:
        if self._admin is not None:
            self._admin.stop(1.0)
        drain()

    def _go_on(self) -> None:
        if self._ends():  # an operator wants it meanwhile
            self._drain()

    def _lend_book(self, _: Path) -> Callable[[], object]:
        with self._lock:
            self._book.close()
        return self._take_book_back

    def _take_book_back(self) -> None:
        with self._lock:
            self._book.take_back()

    def _drain(self) -> None:
        self.accept_no_more()
        if self._member is not None:
            self._member.stop()
        with self._lock:
            self._book.close()
        if self._control is not None:
            self._control.leave_names()
        self._wake()

    @property
    def bound(self) -> list[str]:
        return [address for item in (self._control, self._admin) if item is not None for address in item.bound]

    @property
    def listening(self) -> list[tuple[str, tuple[str, int]]]:
        return [(name, sock.getsockname()[:2]) for name, socks in self._sockets[0].items() for sock in socks]

    def signal_workers(self, number: int) -> None:
        """Pass a signal on to all workers; nothing is waited for."""
        for worker in self.workers():
            worker.child.signal(number)

    def figures(self) -> dict[str, Any]:
        """Return a line of figures of all workers; those that do not answer at once are left out, and named."""
        answers, silent = [], []
        for reply in self.operating.request(self.workers(), f"{WORKER}.figures", timeout_s=_FIGURES_S):
            if reply.octets is None:
                silent.append(reply.worker)
            else:
                answers.append(json.loads(reply.octets))
        figures = shown(merge_figures(answers)) if answers else {}
        return figures | ({"no_answer_of": silent} if silent else {})

    # -- processes

    def _linked_locked(self) -> list[Worker]:
        self._lock.assert_owned()
        return [worker for worker in self._workers.values() if worker.conn is not None]

    def _expected(self) -> Iterable[int]:
        """Return the numbers of the workers that there are to be; one that has ended is started again."""
        return () if self._ends() else self._restarts

    def workers(self) -> list[Worker]:
        with self._lock:
            return sorted(self._workers.values(), key=lambda item: item.number)

    def _spawn(self, number: int) -> None:
        with self._start_lock:
            if not self._ending:
                self._spawn_locked(number)

    def _spawn_locked(self, number: int) -> None:
        self._start_lock.assert_owned()
        self._serial += 1
        mine = self._sockets[number - 1]
        order = WorkerConfig(
            number=number,
            serial=self._serial,
            count=self._count,
            folder=self._folder,
            listen_fds={name: tuple(map(socket.socket.fileno, socks)) for name, socks in mine.items()},
            counts_fd=self._counts_fd,
            counts_key=self._counts_key,
            program=self._program,
            options=self.options,
            log_level=self._log_level,
            log_json=self._log_json,
        )
        keeps = (self._counts_fd, *itertools.chain(*order.listen_fds.values()))
        try:
            child = Child("flowctl.live.cluster.workers.process", order, f"worker {number} of {self.address[1]}", keeps)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"server {self._program.name!r} cannot be started in another process: {error}",
                hint="its build function and its settings must be importable by name; or serve with one worker",
            ) from error
        except OSError as error:
            if not self._started:
                raise ConfigError(f"cannot start worker {number}: {error.strerror or error}") from error
            self._due[number] = self._clock() + self._restarts[number].pause_after(0.0) + _LOOK_S
            _log.error("worker cannot be started", worker=number, fault=str(error))
            return
        worker = Worker(order, child, self._clock())
        with self._lock:
            self._workers[worker.serial] = worker
        threading.Thread(target=self._wait_for, args=(worker,), name=f"flowctl-worker-{number}", daemon=True).start()

    def _wait_for(self, worker: Worker) -> None:
        """Wait for the end of a process; a thread of its own, which only sleeps."""
        worker.child.process.wait()
        self._gone.put(worker)
        self._wake()

    def _bury(self, worker: Worker) -> None:
        """Forget a process that has ended; a second call has no effect."""
        with self._lock:
            buried = self._workers.pop(worker.serial, None)
        if buried is not None:
            worker.child.close()
            clear(self._counts, worker.number - 1)
            self._names.worker_gone(worker.serial)
            self._media.gone(str(link_path(self._folder, worker.serial)))

    def _ended(self, worker: Worker, now: float) -> None:
        """Report the end of a process, and decide when the next one is started."""
        said = worker.child.how_it_ended()
        lived_s = now - worker.started_at
        self._bury(worker)
        if self._ends():
            return
        wait_s = self._restarts[worker.number].pause_after(lived_s)
        self._due[worker.number] = now + wait_s
        _log.error(
            "worker has ended, it is started again",
            worker=worker.number,
            lived_s=round(lived_s, 1),
            in_s=round(wait_s, 1),
            **said,
        )

    def _feel_pulse(self, worker: Worker, now: float) -> None:
        if worker.hung:
            return
        if worker.pulse.should_ask(now) and worker.conn is not None:
            with contextlib.suppress(ClosedError):
                self.node.request(
                    worker.conn, f"{WORKER}.alive", on_reply=partial(self._answered, worker), timeout_s=HUNG_S
                )
        if worker.pulse.is_hung(now):
            worker.hung = True
            threading.Thread(target=self._end_hung, args=(worker, now), name="flowctl-hung", daemon=True).start()

    def _answered(self, worker: Worker, ok: bool, data: list[bytes]) -> None:  # noqa: FBT001 - as called
        del data
        if ok:
            worker.pulse.note_answer(self._clock())

    def _end_hung(self, worker: Worker, now: float) -> None:
        """Have a worker that hangs say where, and kill it; a thread of its own."""
        worker.child.signal(signal.SIGABRT)
        silent_s = round(worker.pulse.silent_s(now), 1)
        _log.error("worker hangs, it is killed", worker=worker.number, pid=worker.pid, silent_s=silent_s)
        worker.child.end(_WORDS_S)

    # -- the link; the node's thread

    async def _hello(self, message: RpcMessage) -> str:
        """Note the link of a worker, and give it what is in force by command."""
        serial = json.loads(message.data[0])["serial"]
        with self._lock:  # with its link it is told of changes: those before are in what it is given
            worker = self._workers.get(serial)
            words, following = self.operating.words_page(0)
            limits, node = self.operating.limits_in_force(), self._book.words.node
            if worker is not None:
                worker.conn = message.conn
        if worker is not None:
            worker.pulse.note_answer(self._clock())
            self._names.worker_came(serial, message.conn)
        return json.dumps({"words": words, "next": following, "limits": limits, "node": node, "ends": self._ends()})

    def _ends(self) -> bool:
        with self._start_lock:
            return self._ending

    async def _words(self, message: RpcMessage) -> str:
        with self._lock:
            words, following = self.operating.words_page(json.loads(message.data[0]))
        return json.dumps({"words": words, "next": following})

    async def _take_verdicts(self, message: RpcMessage) -> None:
        """Have decided what becomes of addresses that have done too much at a worker."""
        verdicts = [overflow_of(item) for item in json.loads(message.data[0])]
        self._jobs.put(lambda: self.operating.punish(verdicts))

    def _do_jobs(self) -> None:
        """Decide about penalties, and take what the fleet says; a thread of its own, which waits for the workers."""
        for job in iter(self._jobs.get, None):
            try:
                job()
            except Exception as error:  # noqa: BLE001 - the next job is for others
                self._report("a ban", error)

    async def _written(self, message: RpcMessage) -> None:
        """Have written what a worker says of a stream of its own."""
        said = json.loads(message.data[0])
        order = None if said["order"] is None else StreamOrder(**said["order"])
        self._media.want(said["stream"], str(link_path(self._folder, said["serial"])), order, said["at"])

    def _tell_unwritten(self, stream: str, path: str, why: dict[str, str]) -> None:
        """Tell the worker that has a stream what of it is not written; a thread of the media process's keeper."""
        for worker in self.workers():
            if worker.conn is not None and str(link_path(self._folder, worker.serial)) == path:
                with contextlib.suppress(ClosedError):  # it has just ended
                    self.node.send(worker.conn, f"{WORKER}.unwritten", json.dumps([stream, why]))

    async def _changed(self, message: RpcMessage) -> None:
        said = json.loads(message.data[0])
        self.operating.note_file(said["what"], said["detail"], said["digest"])

    async def _ready(self, message: RpcMessage) -> str:
        said = json.loads(message.data[0])
        with self._lock:
            worker = self._workers.get(said["serial"])
        if worker is not None:
            worker.ready = True
            self.limits = said["limits"]
            worker.pulse.note_answer(self._clock())
            _log.info("worker serves", worker=worker.number, pid=worker.pid)
            self._wake()
        return "yes"

    def _report(self, where: str, error: BaseException) -> None:
        _log.error("a fault of the supervisor", where=where, exc_info=error)


async def _stay(message: RpcMessage) -> None:
    """Never answer: the end of this request is the end of the link, which both ends learn at once."""
    del message
    await asyncio.sleep(FOR_EVER_S)
