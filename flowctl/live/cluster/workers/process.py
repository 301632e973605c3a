"""A worker: a fresh process that serves one of the listening sockets, and ends with its supervisor."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import pickle
import signal
from typing import BinaryIO, Final

from flowctl import log
from flowctl.core.connecting.core import number_from
from flowctl.core.server.signals import EndSignals
from flowctl.errors import ConfigError
from flowctl.live.cluster.media.watch import MediaWatch
from flowctl.live.cluster.workers.child import serve_orders
from flowctl.live.cluster.workers.counts import REGION_BYTES, WorkerCounts
from flowctl.live.cluster.workers.link import SupervisorLink
from flowctl.live.cluster.workers.order import WorkerConfig
from flowctl.live.cluster.workers.streams import join_streams
from flowctl.live.config import LiveConfig
from flowctl.live.records.recording import usual_node
from flowctl.live.server import LiveServer

_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_SET_NAME: Final = 15
ORPHANED_STATUS: Final = 3
"""Exit status of a worker whose supervisor had gone before it began."""
_STOP_S: Final = 5.0
_MOST_NAME_CHARS: Final = 61
"""Characters of a server's name, so that with the number of a worker it has the 64 of a node's name."""


def main(supervisor_pid: int, words_fd: int, file: BinaryIO) -> None:
    die_with(supervisor_pid)
    order: WorkerConfig = pickle.load(file)  # noqa: S301 - from the process that started this one, in memory without a name
    file.close()
    ctypes.CDLL(None).prctl(_SET_NAME, f"flowctl-{order.number}".encode())
    serve_orders(words_fd, lambda: _serve(order))


def die_with(supervisor_pid: int) -> None:
    """Have the kernel kill this process when its supervisor dies, and end now where it has died already.

    A server alone that is killed costs its connections as well; and a worker without a supervisor would keep its share
    of the port from the server that comes next, even if it hangs.
    """
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:
        os._exit(ORPHANED_STATUS)


def options_of(order: WorkerConfig) -> LiveConfig:
    """Return the settings of one worker: those of the server, with its own place and its part of what is shared."""
    options, count = order.options, order.count
    events = options.events
    if events.folder:
        node = f"{(events.node or usual_node(options.port))[:_MOST_NAME_CHARS]}-{order.number}"
        events = dataclasses.replace(events, node=node, max_bytes=-(-events.max_bytes // count))
    flights = dataclasses.replace(options.flights, most_at_once=-(-options.flights.most_at_once // count))
    return dataclasses.replace(
        options,
        listen_fds=order.listen_fds,
        control="off",
        ban_store=None,  # it has one writer
        fleet_file=None,  # the supervisor is its member
        admin="off",
        media_here=False,  # the supervisor has the process that writes
        workers=1,
        events=events,
        flights=flights,
        memory_budget_bytes=-(-options.memory_budget_bytes // count),
    )


def counts_of(order: WorkerConfig) -> WorkerCounts:
    memory = memoryview(mmap.mmap(order.counts_fd, order.count * REGION_BYTES))
    os.close(order.counts_fd)
    return WorkerCounts(memory, order.number - 1, order.count, order.counts_key)


def _serve(order: WorkerConfig) -> None:
    with EndSignals() as ended:
        log.configure(order.log_level, json=order.log_json, file=order.options.log, fields={"worker": order.number})
        number_from(order.first_connection)
        server = order.program.build(options_of(order))
        if not isinstance(server, LiveServer):
            raise ConfigError(f"server {order.program.name!r} is no live server, it cannot have workers")
        server.admission.others = counts_of(order)
        link = SupervisorLink(order, server, ended.end)
        streams = join_streams(server, link, order.serial, order.folder)
        link.followed = lambda: len(streams.statistics())
        MediaWatch(server, link.tell_media, copies=False)
        server.on_stopped = ended.end
        try:
            link.start()
            ended.calls = {signal.SIGUSR1: log.look_at_file}
            if server.reload.watching or server.certificate is not None:
                ended.calls = {**ended.calls, signal.SIGHUP: server.reload.look_now}
            server.start()
            link.ready()
            ended.wait()
        finally:
            server.stop(_STOP_S)
            link.stop()
