"""``flowctl edge``: a live server whose streams come from origins, or from other edges."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowctl.cli.common import Insecure, log_to_file, optional_duration, set_up_log
from flowctl.cli.serve import Replace, ServeCommand, options_of, run_server, take_place
from flowctl.errors import ConfigError

if TYPE_CHECKING:
    from flowctl.live.server import LiveServer


def edge(
    context: typer.Context,
    origins: Annotated[
        list[str],
        typer.Argument(
            metavar="ORIGIN...",
            help="[rtmps://]host[:segment port][/rtmp port][?key=KEY]; 1936 and 1935 unless said. dns+ or dnssrv+ "
            "before it: all origins of a name in DNS.",
        ),
    ],
    *,
    follow: Annotated[
        bool, typer.Option("--follow", help="Take frames from one origin by RTMP; segments repair what is missing.")
    ] = False,
    stream: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Have these streams without viewers too; repeatable.")
    ] = None,
    dns: Annotated[
        str, typer.Option(metavar="HOST[:PORT]", help="Server of DNS; of the system unless said.", envvar="FLOWCTL_DNS")
    ] = "",
    public: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST|URL", help="Where viewers reach it: origins may send them here; repeatable."),
    ] = None,
    redundancy: Annotated[int, typer.Option(min=1, max=8, help="Fetch each segment from so many origins.")] = 1,
    config: Annotated[
        Path | None, typer.Option(metavar="TOML", help="File of settings, as of serve.", envvar="FLOWCTL_CONFIG")
    ] = None,
    pairs: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any setting by its name; repeatable.")
    ] = None,
    stats: Annotated[str | None, typer.Option(help="Log a line of figures each time this has passed; 0: off.")] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log as JSON, one object per line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object when the server is ready.")] = False,
    replace: Replace = None,
    insecure: Insecure = False,
) -> None:
    """Serve viewers the streams of origins, or of other edges.

    An ORIGIN is a flowctl serve live --origin HOST:PORT, or such an edge. Each stream that somebody views is fetched in
    segments from all origins: one that dies, lies or is slow costs nothing that another one has. With --follow frames
    come at once from one origin, and segments fill the gap when it dies. With --origin other edges can fetch from this
    one. All settings are those of flowctl serve live.
    """
    from flowctl.cli.servers import load_server
    from flowctl.core.loop.trust import trust
    from flowctl.core.server.signals import EndSignals
    from flowctl.live.cluster.edge.discovery import parse_origin
    from flowctl.live.cluster.edge.edge import Edge, EdgeConfig

    ended = context.with_resource(EndSignals())  # first of all: no signal is to kill a server that begins
    set_up_log(as_json=log_json)
    trust(insecure=insecure)
    edge_config = EdgeConfig(
        origins=tuple(parse_origin(item) for item in origins),
        dns=dns,
        public=tuple(public or ()),
        follow=follow,
        streams=tuple(stream or ()),
        redundancy=redundancy,
    )
    program = load_server("live")
    options = options_of(context, program, pairs, config)
    if options.workers != 1:
        raise ConfigError("an edge has one process", hint="start several, each with a port of its own")
    log_to_file(options.log, as_json=log_json)
    options, successor = take_place(context, program, options, replace)
    live = program

    def build(given: Any) -> LiveServer:
        server: Any = live.build(dataclasses.replace(given, origin=""))
        server.companions.append(Edge(server, edge_config, offer=given.origin))
        edge_server: LiveServer = server
        return edge_server

    stats_s = optional_duration(stats, "--stats")
    program = dataclasses.replace(program, name="edge", build=build)
    run_server(program, options, ended, stats_s=stats_s, as_json=as_json, successor=successor)


def add_to(app: typer.Typer) -> None:
    app.command("edge", cls=ServeCommand)(edge)
