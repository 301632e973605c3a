"""Runs the demonstration: the server in this process, the clients in another, a look a few times a second.

The server listens on a free port of the loopback interface; nothing leaves the machine.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from flowctl.admission import AdmissionLimits
from flowctl.demo.audit import Audit
from flowctl.demo.plan import RECIPE, DemoPlan, cache_directory
from flowctl.demo.report import Report, judge
from flowctl.demo.show import Display, choose_display
from flowctl.demo.watch import Watch
from flowctl.errors import FlowctlError
from flowctl.live import LiveServer, build_live_server
from flowctl.media.sample import ensure_sample
from flowctl.sender_types import SenderSettings
from flowctl.serving import ServeOptions

_LOOK_S: Final = 0.2
_STREAM: Final = "demo/sample"
_CLIENTS_START_S: Final = 30.0
"""Time for the clients' process to import, connect and join; 25 clients take about 2 s."""

_CLIENTS_END_S: Final = 20.0
"""Time for it to end after the stream should have."""


class ClientProcess:
    """The clients' process and what it says.

    Args:
        orders: its one line of input.
    """

    def __init__(self, orders: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flowctl.demo.clients"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(orders) + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._said.put(line)
        self._said.put(None)

    def said(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next thing it says; None if there is nothing within `timeout_s`.

        Raises:
            FlowctlError: it reported an error, or has gone.
        """
        try:
            line = self._said.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if line is None:
            raise FlowctlError(f"the clients' process has gone, with exit status {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise FlowctlError(f"the clients: {said['error']}", hint=said["hint"])
        return said

    def stop(self) -> None:
        """Let it end, and see to it that it does."""
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join()  # its end of the pipe is closed, so there is an end to what it reads
        if process.stdout is not None:
            process.stdout.close()


def _build_server(plan: DemoPlan) -> LiveServer:
    # All viewers come from one address, at once.
    admission = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0)
    settings = SenderSettings(stuck_s=plan.stuck_s)
    return build_live_server(ServeOptions(limits=plan.limits, settings=settings, admission=admission))


def _follow(
    plan: DemoPlan, server: LiveServer, clients: ClientProcess, display: Display
) -> tuple[Watch, dict[str, Any]]:
    """Look at the viewers until the clients are done; return the last look and what the clients said."""
    first = clients.said(_CLIENTS_START_S)
    if first is None:
        raise FlowctlError(f"the clients did not start within {_CLIENTS_START_S:g} s")
    watch = Watch(plan.viewers(RECIPE.video_bit_rate + RECIPE.audio_bit_rate), first["ports"])
    start = time.monotonic()
    give_up = start + plan.duration_s * 1.5 + _CLIENTS_END_S
    last = None
    while last is None:
        if time.monotonic() > give_up:
            raise FlowctlError("the clients did not end in time", hint="is the machine overloaded?")
        last = clients.said(_LOOK_S)
        changed = watch.look(server.hub.snapshot())
        display.show(time.monotonic() - start, watch.viewers, changed)
    done: dict[str, Any] = last["done"]
    return watch, done


def _make_report(plan: DemoPlan, watch: Watch, done: dict[str, Any]) -> Report:
    outcomes = []
    for watched in watch.viewers:
        said = dict(done["viewers"][watched.plan.label])
        audit = Audit.from_dict({name: said.pop(name) for name in ("received", "missing", "faults")})
        outcomes.append(judge(watched, audit, said))
    return Report(tuple(outcomes), done["published"], str(plan.limits))


def make_recording(plan: DemoPlan, display: Display) -> Path | None:
    """Return the recording to publish, made by FFmpeg where it is not there yet. None: the synthetic source.

    Raises:
        FlowctlError: there is no FFmpeg, or it failed.
    """
    if plan.synthetic:
        return None
    directory = cache_directory()
    display.say(f"recording: {RECIPE.label} in {directory}")
    try:
        return ensure_sample(directory, RECIPE)
    except FlowctlError as error:
        hint = "give --synthetic, which needs no FFmpeg" + (f"; or: {error.hint}" if error.hint else "")
        raise FlowctlError(str(error), hint=hint) from error


def watch_demo(plan: DemoPlan, *, table: bool = True) -> Report:
    """Run the demonstration and return its report; takes a few seconds longer than the plan says.

    Args:
        plan: who takes part, with which limits.
        table: whether a live table is shown where standard error is a terminal; otherwise lines of text are.

    Raises:
        FlowctlError: it could not be carried out.
    """
    display = choose_display(table=table)
    recording = make_recording(plan, display)
    with _build_server(plan) as server:
        url = f"rtmp://127.0.0.1:{server.address[1]}/{_STREAM}"
        viewers = plan.viewers(1_000_000)
        display.say(f"server: {url}, limits: {plan.limits}")
        display.say(f"clients: 1 publisher and {len(viewers)} viewers, {plan.duration_s:g} s")
        orders = {"plan": plan.as_dict(), "url": url, "recording": None if recording is None else str(recording)}
        clients = ClientProcess(orders)
        try:
            with display:
                watch, done = _follow(plan, server, clients, display)
            # Those who closed by themselves have said so before their process wrote its last line.
            watch.look(server.hub.snapshot())
        finally:
            clients.stop()
    return _make_report(plan, watch, done)


def run_demo(plan: DemoPlan, *, table: bool = True, as_json: bool = False) -> bool:
    """Run the demonstration and write its report to standard output.

    Args:
        plan: who takes part, with which limits.
        table: see `watch_demo`.
        as_json: whether the report is one JSON object.

    Returns:
        Whether all went as it should.

    Raises:
        FlowctlError: it could not be carried out.
    """
    report = watch_demo(plan, table=table)
    text = json.dumps(report.as_dict()) if as_json else "\n".join(report.lines())
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return report.passed
