"""The live server with its figures in reach: driven by lines on its standard input.

The same server as ``flowctl serve live`` builds, in a process of its own. It writes one JSON line when it is ready. For
each line ``rounds`` it answers with the figures of its fan-outs, which cost nothing to read, and for each line ``all``
with what is queued for every viewer, the caches and Python's memory as well, which costs microseconds per viewer.
At the end of its input it stops, so that it cannot outlive the bench that started it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import itertools
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import flowctl.live.server as live_module
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.policy import KeepAll
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import AdmissionLimits
from flowctl.live import LiveConfig, build_live_server
from flowctl.live.relay.relay import Relays
from flowctl.live.server import LiveServer
from flowctl.live.settings.relays import parse_relays
from flowctl.live.settings.renditions import parse_renditions
from flowctl.log import configure
from flowctl.records.telemetry.options import EventsOptions

_AT_ONCE: Final = 10
_PAUSE_S: Final = 0.001


def rounds(server: LiveServer) -> dict[str, Any]:
    """Return the figures of all fan-outs: sums, and the largest of what is longest or an interval."""
    sums: collections.Counter[str] = collections.Counter()
    most: dict[str, float] = {"longest_round_s": 0.0}
    durations: list[int] = []  # rounds by how long they took
    for stream in list(server.hub._streams.values()):  # noqa: SLF001 - a snapshot would cost per viewer
        for wire in stream.wires:
            for fanout in wire.fanouts.active:
                for name, value in dataclasses.asdict(fanout.statistics()).items():
                    if name.endswith("_s"):
                        most[name] = max(most.get(name, 0.0), value)
                    elif isinstance(value, int):
                        sums[name] += value
                    elif isinstance(value, tuple):
                        durations = [sum(pair) for pair in itertools.zip_longest(durations, value, fillvalue=0)]
    most["longest_handler_s"] = max(group.statistics().longest_turn_s for group in server.groups.groups)
    if server.recording is not None:
        most["sampler_cpu_s"] = server.recording.sampler.cpu_s
        most["recorder_cpu_s"] = server.recording.recorder.statistics().cpu_s
    return {"at_s": time.monotonic(), **sums, **most, "rounds_by_duration": durations}


def cache_bytes(server: LiveServer) -> int:
    """Return the bytes between the key frame of each GOP cache and the end of its log."""
    total = 0
    for stream in list(server.hub._streams.values()):  # noqa: SLF001 - the logs are in no snapshot
        for wire in stream.wires:
            cached = wire.log.cached
            if cached is not None:
                total += wire.log.tail.offset - cached.offset
    return total


def everything(server: LiveServer) -> dict[str, Any]:
    """Return queues, states, caches, close reasons and Python's memory blocks.

    A thread that computes holds the interpreter's lock for 5 ms each time that a flush gives it up for a system call:
    a snapshot of a thousand viewers in one go would hold up the stream that is measured. So this goes a few viewers at
    a time, and reads no more of each than it needs.
    """
    states: collections.Counter[str] = collections.Counter()
    queued, messages, largest = 0, 0, 0
    connections = server.connections()
    for number, connection in enumerate(connections):
        load = connection.sender.load()
        states[connection.sender.state.name] += 1
        queued += load.size_bytes
        messages += load.messages
        largest = max(largest, load.size_bytes)
        if number % _AT_ONCE == 0:
            time.sleep(_PAUSE_S)
    return {
        **rounds(server),
        "connections": len(connections),
        "queue_bytes": queued,
        "largest_queue_bytes": largest,
        "queued_messages": messages,
        "cache_bytes": cache_bytes(server),
        "states": dict(states),
        "closed": {reason.value: count for reason, count in server.closed_by_reason.items()},
        "blocks": sys.getallocatedblocks(),
        "garbage_runs": sum(int(generation["collections"]) for generation in gc.get_stats()),
        "threads": threading.active_count(),
    }


def all_sent() -> dict[str, Any]:
    """Make the server one that leaves nothing out, as most do; return what has to be said of it in its options."""
    # A server has no such setting, since nobody would want it. It is here to be compared with.
    vars(live_module)["LIVE_POLICIES"] = {"all-or-cut": KeepAll()}
    known = {field.name for field in dataclasses.fields(LiveConfig)}
    times = {field.name for field in dataclasses.fields(SenderSettings)}
    off: dict[str, Any] = {name: 0.0 for name in ("soft_too_long_s", "return_delay_s") if name in times}
    options = {"limits": NO_LIMITS, "settings": SenderSettings(**off), "return_after_s": 0.0}
    return {name: value for name, value in options.items() if name in known}


def main() -> None:
    """Serve until the end of input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--flush", type=float, default=0.04, help="flush interval, or its ceiling, in seconds")
    parser.add_argument("--groups", type=int, default=1, help="poll groups, that is threads")
    parser.add_argument("--fixed", action="store_true", help="flush at this interval, whatever it costs")
    parser.add_argument("--events", type=Path, help="record into this folder")
    parser.add_argument("--all-sent", action="store_true", help="leave nothing out for a slow viewer, and never cut it")
    parser.add_argument("--renditions", default="off", help="as the setting of the live server")
    parser.add_argument("--push", default="", help="as relay_push of the live server")
    parser.add_argument("--no-samples", action="store_true", help="record events only")
    arguments = parser.parse_args()
    configure("error")
    changes = all_sent() if arguments.all_sent else {}
    server = build_live_server(
        LiveConfig(
            host=arguments.host,
            port=arguments.port,
            admission=AdmissionLimits(connections=0, connections_per_address=0, new_per_address_and_s=0),
            group_count=arguments.groups,
            flush_interval_s=arguments.flush,
            flush_adaptive=not arguments.fixed,
            renditions=parse_renditions(arguments.renditions, "--renditions"),
            relay_push=parse_relays(arguments.push, "--push"),
            events=EventsOptions(folder=str(arguments.events or ""), samples=not arguments.no_samples),
            **changes,
        )
    )
    if arguments.push:
        server.companions.append(Relays(server))
    server.start()
    try:
        print(json.dumps({"port": server.address[1]}), flush=True)
        for line in sys.stdin:
            answer = everything(server) if line.strip() == "all" else rounds(server)
            print(json.dumps(answer), flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
