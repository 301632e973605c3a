"""Runs the demonstration: the server in this process, its crowd in others, a look at the server a few times a second.

The server listens on a free port of the loopback interface; nothing leaves the machine. The crowd is a load run; this
thread conducts it, while another one looks at the server and shows what it sees.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import AdmissionLimits
from flowctl.demo.line import ProxyLine
from flowctl.demo.plan import BIT_RATE, RENDITIONS, SET_SHARE, SLOW_SHARES, DemoPlan
from flowctl.demo.renditions import SetRun, publish_set
from flowctl.demo.report import FLOOD_LIMIT, ShowReport, make_report
from flowctl.demo.runner import (
    DISPOSABLE_EVERY,
    FPS,
    KEY_INTERVAL_S,
    cache_directory,
    hand_over,
    load_page,
    tell,
    write_page,
)
from flowctl.demo.watch import ViewerDisplay, ViewerWatch
from flowctl.errors import ConfigError
from flowctl.live import LiveConfig, LiveServer
from flowctl.live.httpd.serving import serve_http
from flowctl.live.oversight.pace import RestingPace
from flowctl.live.settings.renditions import RenditionNames
from flowctl.load.results.result import RunResult, RunSample
from flowctl.load.run import run_load
from flowctl.pollgroup import PollGroup
from flowctl.units import format_count
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import start_client
from flowctl.wire.client.player import HEALTHY, PlayProfile, RtmpPlayer
from flowctl.wire.client.publisher import RtmpPublisher
from flowctl.wire.media.synthetic import SyntheticSource

if TYPE_CHECKING:
    from flowctl.live.admin.listener import AdminListener

_LOOK_S: Final = 0.2
_STAYING: Final = 5
_STAY_LOOK_S: Final = 1.0
_STOP_S: Final = 5.0
_STREAM: Final = "demo/sample"
_SET: Final = "demo/show"
_ANY_PORT: Final = "127.0.0.1:0"
_BESIDE_BUFFER_BYTES: Final = 32 * 1024
_CONDITIONS: Final = ("healthy.missing>0", "healthy.cut>0", "slow.broken_restarts>0", "failed>0")
"""What the written report judges; the demonstration itself knows more, from the server."""


def _build_server(plan: DemoPlan) -> LiveServer:
    # All viewers come at once, and an attacker tries again afterwards.
    admission = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0)
    settings = SenderSettings(stuck_s=plan.stuck_s)
    return LiveServer(
        LiveConfig(
            limits=plan.limits,
            settings=settings,
            admission=admission,
            renditions=RenditionNames(suffixes=tuple(RENDITIONS)),
            admin=_ANY_PORT,
            http=_ANY_PORT,
        )
    )


def _add_dashboard(server: LiveServer) -> AdminListener | None:
    """Put the dashboard beside the server, and the listener that it plays from. None: its packages are missing."""
    try:
        from flowctl.live.admin.listener import admin_of  # noqa: PLC0415 - brings what needs the extra admin

        admin = admin_of(server)
    except ConfigError as error:
        tell(f"no dashboard: {error}; hint: {error.hint}")
        return None
    serve_http(server)
    server.companions.append(admin)
    return admin


class _ViewerPoller:
    """Looks at the server from a thread of its own, until told to stop."""

    def __init__(self, watch: ViewerWatch, server: LiveServer, display: ViewerDisplay) -> None:
        self._watch = watch
        self._server = server
        self._display = display
        server.hub.add_observer(watch)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll_viewers, name="demo-look", daemon=True)

    def _poll_viewers(self) -> None:
        start = time.monotonic()
        while not self._over.wait(_LOOK_S):
            changed = self._watch.update_viewers(RestingPace().over(self._server.hub.viewing()))
            self._display.show_viewers(time.monotonic() - start, self._watch.viewers, changed)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()
        # Those who closed by themselves have done so before the run was over.
        self._watch.update_viewers(self._server.hub.viewing())


class _ServerMeter:
    """Measures the server, that is this process, for the load run.

    The load run cannot be told its process: those of the crowd are its children, and would be counted with it.
    """

    def __init__(self) -> None:
        self._base_bytes = self._memory()
        self._base_s = time.process_time()
        self._at, self._cpu_s = time.monotonic(), self._base_s

    @staticmethod
    def _memory() -> int:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return pages * resource.getpagesize()

    def add_usage(self, sample: RunSample) -> None:
        """Add to a sample what the server used since the one before."""
        now, cpu_s = time.monotonic(), time.process_time()
        sample.server_cpu_percent = round((cpu_s - self._cpu_s) / max(now - self._at, 1e-3) * 100, 1)
        sample.server_rss_bytes = self._memory()
        self._at, self._cpu_s = now, cpu_s

    def finish(self, result: RunResult) -> None:
        """Add to the result what the server used in all."""
        result.server_base_rss_bytes = self._base_bytes
        result.server_cpu_s = round(time.process_time() - self._base_s, 3)


def watch_demo(
    plan: DemoPlan, server: LiveServer, dashboard: str = "", *, table: bool = True
) -> tuple[ShowReport, RunResult]:
    """Run the demonstration; return its report and the load run; takes a few seconds longer than the plan says."""
    display = ViewerDisplay(table=table)
    load = plan.load_plan(_url(server))
    viewers = plan.viewers(load)
    display.say(f"server: {load.url}, limits: {plan.limits}")
    display.say(f"clients: 1 publisher and {format_count(len(viewers), 'viewer')}, {plan.duration_s:g} s")
    if dashboard:
        display.say(f"dashboard: {dashboard}")
    watch = ViewerWatch(viewers)
    with display, _ViewerPoller(watch, server, display):
        meter = _ServerMeter()
        with SetRun(plan, _url(server, _SET)) as of_set:
            result = run_load(load, meter.add_usage)
            if result.interrupted:
                raise KeyboardInterrupt
        meter.finish(result)
    of_set.add_to(result)
    floods_cut = server.hub.limits_hit.get(FLOOD_LIMIT, 0)
    for warning in result.warnings:
        display.say(f"warning: {warning}")
    return make_report(plan, watch.viewers, floods_cut, result), result


def _url(server: LiveServer, stream: str = _STREAM) -> str:
    return f"rtmp://127.0.0.1:{server.address[1]}/{stream}"


def run_demo(
    plan: DemoPlan,
    *,
    table: bool = True,
    as_json: bool = False,
    page: Path | None = None,
    stays: bool = False,
    until: threading.Event | None = None,
) -> bool:
    """Run the demonstration, and write its report to standard output and as a page with plots."""
    path = cache_directory() / "demo-report.html" if page is None else page
    server = _build_server(plan)
    admin = _add_dashboard(server)
    with ExitStack() as stack:
        stack.enter_context(server)
        dashboard = admin.bound[0] + _beside(server, stack) if admin else ""
        report, result = watch_demo(plan, server, dashboard, table=table)
        write_page(path, load_page(result, _CONDITIONS))
        passed = hand_over(
            report,
            as_json=as_json,
            files={"page": str(path), "dashboard": dashboard.partition("#")[0]},
            last=(
                f"what the viewers measured, with plots: {path}",
                *([_of_dashboard(dashboard, stays=stays)] if dashboard else []),
            ),
        )
        if stays:
            _stay(server, until or threading.Event())
    return passed


def _stay(server: LiveServer, until: threading.Event) -> None:
    """Publish what the dashboard shows and play the stream, healthy and slow viewers, until the event or Ctrl-C."""
    address = parse_address(_url(server))
    profiles = [HEALTHY] * _STAYING + [PlayProfile(rate=int(BIT_RATE * share)) for share in SLOW_SHARES]
    group = PollGroup("demo-stay")
    group.start()
    try:
        source = SyntheticSource(
            video_bit_rate=BIT_RATE, fps=FPS, key_interval_s=KEY_INTERVAL_S, disposable_every=DISPOSABLE_EVERY
        )
        start_client(group, RtmpPublisher(address, source))
        publish_set(group, _url(server, _SET))
        for profile in profiles:
            start_client(group, RtmpPlayer(address, profile), receive_buffer_bytes=profile.receive_buffer_bytes)
        with contextlib.suppress(KeyboardInterrupt):
            while not until.wait(_STAY_LOOK_S):
                pass
    finally:
        group.stop(_STOP_S)


def _beside(server: LiveServer, stack: ExitStack) -> str:
    """Return what has the dashboard show the stream and, behind slow lines that `stack` ends, it and the set."""
    port = next(item.address[1] for item in server.listeners if item.name == "http")
    rate = BIT_RATE / 8 * SET_SHARE
    lines = [stack.enter_context(ProxyLine(port, rate=rate, buffer_bytes=_BESIDE_BUFFER_BYTES)) for _ in range(2)]
    on = f"on a line of {SET_SHARE:.0%}"
    shown = {"watch": _STREAM, "beside": lines[0].port, "line": on}
    return "#" + urlencode(shown | {"set": _SET, "by": lines[1].port, "what": f"the set, {on}"})


def _of_dashboard(address: str, *, stays: bool) -> str:
    if stays:
        return f"the dashboard is at {address} and stays, with a stream and viewers, until Ctrl-C"
    return f"the dashboard was at {address} (make demo ARGS=--stay, or flowctl demo --stay, leaves it running)"
