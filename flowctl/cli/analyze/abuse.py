"""``flowctl analyze abuse``: whom to keep out, and the ban list that the server loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowctl.cli.analyze.common import DEFAULT_MEMORY, AsJson, Conf, Master, Memory
from flowctl.text.output import say

if TYPE_CHECKING:
    from flowctl.pipeline.jobs.weights import Weights

WeightsFile = Annotated[Path | None, typer.Option(metavar="FILE", help="TOML; --print-weights shows the defaults.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="CIDR", help="Never ban or limit these: your proxies and monitors. Repeatable."),
]
JudgePrivate = Annotated[
    bool, typer.Option("--judge-private", help="Judge loopback and private networks too. Default: they are allowed.")
]
Threshold = Annotated[float | None, typer.Option(help="Score from which on an address is banned. Default: 10.")]
MaxBans = Annotated[int, typer.Option(min=1, help="Bans of this job at most; the highest scores are taken.")]
ReplaceBans = Annotated[
    bool, typer.Option("--replace-bans", help="Begin a new list. Default: bans of the list there that last are kept.")
]


def command(
    events: Annotated[str | None, typer.Argument(metavar="EVENTS", help="Folder that a server wrote.")] = None,
    *,
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="Folder of the results.")] = None,
    weights: WeightsFile = None,
    allow: Allow = None,
    judge_private: JudgePrivate = False,
    threshold: Threshold = None,
    max_bans: MaxBans = 10_000,
    replace_bans: ReplaceBans = False,
    now: Annotated[str | None, typer.Option(metavar="TIME", help="Judge as at TIME (UTC). Default: now.")] = None,
    truth: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Planted addresses (OUT/_truth/planted.parquet): print what was found."),
    ] = None,
    print_weights: Annotated[
        bool, typer.Option("--print-weights", help="Write the weights in force, and end.")
    ] = False,
    master: Master = None,
    conf: Conf = None,
    driver_memory: Memory = DEFAULT_MEMORY,
    as_json: AsJson = False,
) -> None:
    """Score addresses and subnets by what they did, and write abuse_scores and bans.jsonl.

    Exit status: 0 done; 1 it failed; 2 wrong use, or nothing to read; 130 or 143 ended by a signal.
    """
    from flowctl.errors import ConfigError

    chosen = read_weights(weights, threshold)
    if print_weights:
        say(chosen.render(), end="")
        return
    if events is None or out is None:
        missing = "EVENTS is" if events is None else "--out is"
        raise ConfigError(f"{missing} missing", hint="flowctl analyze abuse EVENTS --out DIR")
    from flowctl.cli.analyze.common import run_job, session_options
    from flowctl.pipeline.spark.session import check_available
    from flowctl.server.bans import parse_utc

    check_available()
    from flowctl.pipeline.jobs.abuse import AbuseOptions, run
    from flowctl.pipeline.tables.addresses import parse_networks

    options = AbuseOptions(
        weights=chosen,
        allow=tuple(parse_networks(allow or [], "--allow")),
        private=judge_private,
        most_bans=max_bans,
        now_s=None if now is None else parse_utc(now).timestamp(),
        truth=truth,
        replace_bans=replace_bans,
    )
    session = session_options(master, conf, driver_memory, "abuse")
    run_job("abuse", lambda spark, _: run(spark, events, out, options), session, as_json=as_json, folders=(events, out))


def read_weights(path: Path | None, threshold: float | None) -> Weights:
    """Return the weights of a file, or the defaults; `threshold` wins over both.

    Raises:
        ConfigError: the file cannot be read, or is wrong.
    """
    from dataclasses import replace

    from flowctl.errors import ConfigError
    from flowctl.pipeline.jobs.weights import Weights, parse_weights

    found = Weights()
    if path is not None:
        try:
            found = parse_weights(path.read_text("utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --weights {path}: {error}") from error
    return found if threshold is None else replace(found, threshold=threshold)
