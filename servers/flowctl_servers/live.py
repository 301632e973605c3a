"""The live RTMP server: slow viewers are named, get what their line carries, and are cut at their limits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from flowctl.core.folders.folders import check_folder, found_folder
from flowctl.core.server.certificate import Certificate
from flowctl.core.server.program import ServeOptions, ServerProgram
from flowctl.core.text.extras import require_extra
from flowctl.core.text.files import check_target
from flowctl.errors import ConfigError
from flowctl.live import LiveConfig, LiveServer, build_live_server
from flowctl.live.hooks import find_hooks
from flowctl.live.settings.media import RecordFormat

_HANDOVER_S: Final = 1.0
"""Time in which what has a port of its own ends what it is about to answer, while a successor waits."""


def build(options: ServeOptions) -> LiveServer:
    """Return a live server that listens for operations, and for edges, where its settings say so."""
    server = build_live_server(options)
    if server.config.serves_http:
        # Loaded for a server that serves HTTP: h11 and wsproto are not for others.
        from flowctl.live.httpd.serving import serve_http  # noqa: PLC0415 - as said

        folder = server.config.hls_place
        from flowctl.live.playback.serving import recording_handlers  # noqa: PLC0415 - as said

        def may_play(stream: str) -> bool:
            return server.hub.config.at(stream).media.record_play.fits(stream)  # as it is by now

        handlers = recording_handlers(found_folder(server.config.media.record_folder), may_play)
        if folder is not None:
            from flowctl.live.remux.serving import hls_handlers  # noqa: PLC0415 - as said

            handlers |= hls_handlers(folder)
        try:
            serve_http(server, handlers)
        except BaseException:
            server.close_listeners()
            raise
    if server.config.fleet_file is not None:
        # Loaded for a member of a fleet: it brings the messenger with it.
        from flowctl.live.fleet.member import join_fleet  # noqa: PLC0415 - as said

        try:
            join_fleet(server, server.config.fleet_file)
        except BaseException:
            server.close_listeners()
            raise
    if server.config.media_here:
        # As below; and always, since settings that are read again may ask for it.
        from flowctl.live.cluster.media.keeper import ServerMedia  # noqa: PLC0415 - as said

        server.companions.append(ServerMedia(server))
    if server.config.relay_push or server.config.relay_pull:
        # As below: it brings the clients with it.
        from flowctl.live.relay.relay import Relays  # noqa: PLC0415 - as said

        server.companions.append(Relays(server))
    if server.config.runs or (server.config.source is not None and server.config.workers == 1):
        # As below; and where settings that are read again may ask for it.
        from flowctl.live.run.commands import Commands  # noqa: PLC0415 - as said

        server.companions.append(Commands(server))
    if server.config.origin:
        # As below: it brings diffusion with it.
        from flowctl.live.cluster.origin import Origin  # noqa: PLC0415 - as said

        offer = Origin(server, server.config.origin)
        server.companions.append(offer)
        server.on_handover.append(lambda: offer.stop(_HANDOVER_S))
    if server.config.control_addresses:
        # Loaded for a server that listens: it brings ZeroMQ with it.
        from flowctl.control.listener import listener_of  # noqa: PLC0415 - as said
        from flowctl.live.cluster.succession import precede  # noqa: PLC0415 - as said

        server.companions.append(listener_of(server))
        server.loans.append(partial(precede, server))
    if server.config.admin != "off":
        # As above: it brings FastAPI and uvicorn with it, of an extra of its own.
        from flowctl.live.admin.listener import admin_of  # noqa: PLC0415 - as said

        admin = admin_of(server)
        server.companions.append(admin)
        server.on_handover.append(lambda: admin.stop(_HANDOVER_S))
    return server


def check(options: ServeOptions) -> None:
    """See whether a server of these options would start: its files, and whom it lets operate it."""
    if not isinstance(options, LiveConfig):
        return
    options.check_start()
    if options.limits_file is not None and not options.limits_file.exists():
        raise ConfigError(
            f"cannot read the limits in {options.limits_file}: no such file", hint="make one, or leave limits out"
        )
    if options.ban_store is not None:
        check_target(options.ban_store, "ban_store")
    if options.fleet_file is not None:
        from flowctl.live.fleet.config import read_config  # noqa: PLC0415 - brings ZeroMQ with it

        read_config(options.fleet_file)
    if options.events.folder:
        check_folder(Path(options.events.folder), "events")
        require_extra("telemetry", "events", "pyarrow")
    _check_media(options)
    if options.hooks:
        find_hooks(options.hooks)
    if options.tls_certificate is not None and options.tls_key is not None:
        Certificate(options.tls_certificate, options.tls_key)
    if options.control_addresses:
        from flowctl.control.listener import check_sockets, keys_of  # noqa: PLC0415 - brings ZeroMQ with it

        keys_of(options)
        check_sockets(options)
    if options.admin != "off":
        from flowctl.live.admin.listener import tokens_of  # noqa: PLC0415 - of an extra of its own

        tokens_of(options)


def _check_media(options: LiveConfig) -> None:
    """See whether what is to be written of streams can be."""
    formats = [options.media.record_format, *(level.values.get("media.record_format") for level in options.levels)]
    if options.asked_for("record").patterns:
        check_folder(options.media.record_folder, "record_folder")
        if RecordFormat.MP4 in formats:
            require_extra("media", "record_format mp4", "av")
    if options.asked_for("hls").patterns and options.hls_place is not None:
        check_folder(options.hls_place, "hls_folder")
        require_extra("media", "hls", "av")


SERVER = ServerProgram(
    name="live",
    summary="Live RTMP server: publish and play; slow viewers get what their line carries, stalled ones are cut.",
    default_port=1935,
    build=build,
    check=check,
)
