"""What ``flowctl play`` and ``flowctl publish`` share: one client from login to end, and what its end means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowctl.wire.client.base import RtmpClient
    from flowctl.wire.client.runner import ClientT


def run_client(
    command: str, make: Callable[[str, Callable[[Any], None]], ClientT], **sizes: Any
) -> tuple[ClientT, int | None]:
    """Run a client to its end, or until a signal; return it, and the exit status of that signal."""
    from flowctl.cli.errors import INTERRUPTED, TERMINATED, TerminatedError, terminable
    from flowctl.log import get_logger
    from flowctl.wire.client.runner import ClientRun

    signalled = None
    with terminable(), ClientRun(make, **sizes) as run:
        run.start()
        try:
            get_logger(f"flowctl.{command}").info(f"{command}ing", url=str(run.client.url))
            run.wait()
        except (KeyboardInterrupt, TerminatedError) as error:
            signalled = TERMINATED if isinstance(error, TerminatedError) else INTERRUPTED
            run.finish("interrupted")
        return run.client, signalled


def check_end(client: RtmpClient, signalled: int | None, done: str) -> None:
    """Leave with the status of a signal, or with an error where the client did not end as it should."""
    from flowctl.errors import FlowctlError

    if signalled is not None:
        raise typer.Exit(signalled)
    end = client.end
    if end is None or not end.as_wanted:
        raise FlowctlError(f"the stream was not {done} to its end: {end}", hint=hint_of_end(end))


def hint_of_end(end: object) -> str | None:
    """Return what to do about a connection of ours that ended so. None: its words say it."""
    said = str(end)
    if "(tls-certificate: " in said:
        return "name the authority that signed it: --ca-file PEM; for tests: --insecure"
    if "(tls: the peer left within" in said:
        return "is this the port of rtmps there, and not of rtmp?"
    return None
