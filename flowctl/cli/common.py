"""What several commands share: settings in front of the command, set-up of the log, JSON output, a client's run."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowctl.cli.errors import INTERRUPTED, TERMINATED, TerminatedError, terminable
from flowctl.core.text.output import say
from flowctl.errors import ConfigError, FlowctlError
from flowctl.units import parse_bit_rate, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from flowctl.core.text.logfile import LogFileOptions
    from flowctl.wire.client.base import RtmpClient
    from flowctl.wire.client.connect import ClientT

CaFile = Annotated[
    Path | None,
    typer.Option("--ca-file", metavar="PEM", help="For TLS: trust these authorities instead of the system's."),
]
SYNTHETIC_OPTIONS: Final = {
    "video_bit_rate": "--bit-rate",
    "fps": "--fps",
    "key_interval_s": "--key-interval",
    "key_frame_bytes": "--key-frame-size",
    "key_frame_ratio": "--key-frame-size",
    "disposable_every": "--disposable-every",
}
"""Setting of `SyntheticSource` and the option that sets it."""
Insecure = Annotated[bool, typer.Option("--insecure", help="For TLS: take any certificate. For tests alone.")]


@dataclass(slots=True)
class Settings:
    """Options that stand in front of the command."""

    log_level: str = "info"


settings = Settings()
"""Settings of this process; the application's callback fills them in before a command runs."""


def given(context: typer.Context, parameter: str) -> bool:
    """Return whether the parameter of that name stands on the command line, and is not just its default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def set_up_log(*, as_json: bool = False, level: str | None = None, file: LogFileOptions | None = None) -> None:
    from flowctl import log

    log.configure(settings.log_level if level is None else level, json=as_json, file=file)


def log_to_file(file: LogFileOptions, *, as_json: bool) -> None:
    """Have the log go on in its file, where the settings name one; what came before is on standard error."""
    if file.path is not None:
        from flowctl.core.text.logfile import LogFile
        from flowctl.log import get_logger

        LogFile(file.path, file).close()  # refused before anything is said
        get_logger("flowctl.log").info("the log goes on in a file", file=str(file.path))
        set_up_log(as_json=as_json, file=file)


def print_json(value: Any) -> None:
    """Write one line of JSON to standard output without delay, for programs that follow it."""
    say(json.dumps(value, ensure_ascii=False, separators=(", ", ": ")))


@contextlib.contextmanager
def named_by_options(options: Mapping[str, str]) -> Iterator[None]:
    """Have errors name the options of a command, and not the settings that these become."""

    def named(text: str) -> str:
        return re.sub(rf"\b({'|'.join(options)})\b", lambda match: options[match[0]], text)

    try:
        yield
    except ConfigError as error:
        raise ConfigError(named(str(error)), hint=error.hint and named(error.hint)) from error


def optional_duration(text: str | None, field: str) -> float | None:
    """Return the seconds that an option stands for, None if it was not given."""
    return None if text is None else parse_duration(text, field)


def optional_rate(text: str | None, field: str) -> int | None:
    """Return the bits per second that an option stands for, None if it was not given."""
    return None if text is None else parse_bit_rate(text, field)


def run_client(
    command: str, make: Callable[[str, Callable[[Any], None]], ClientT], **sizes: Any
) -> tuple[ClientT, int | None]:
    """Run a client to its end, or until a signal; return it, and the exit status of that signal."""
    from flowctl.log import get_logger
    from flowctl.wire.client.connect import ClientRun

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
    if signalled is not None:
        raise typer.Exit(signalled)
    end = client.end
    if end is None or not end.as_wanted:
        raise FlowctlError(f"the stream was not {done} to its end: {end}", hint=hint_of_end(end))


def hint_of_end(end: object) -> str | None:
    """Return a hint on a connection of ours that ended early. None: its error says enough."""
    from flowctl.wire.client.base import BEFORE_HANDSHAKE

    said = str(end)
    early = BEFORE_HANDSHAKE in said or "(tls-on-plain-port: " in said
    return "does this port speak TLS? then say rtmps://" if early else None
