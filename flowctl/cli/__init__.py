"""The command line: one module per command.

Standard output is for data, standard error for logs and errors. Exit status: 0 done, 1 it failed while running, 2 it
was called or configured wrongly, 130 interrupted (SIGINT, Ctrl-C), 143 terminated (SIGTERM, SIGHUP, SIGQUIT), 141 the
reader of standard output has gone. A server is ended by SIGINT, SIGTERM or SIGQUIT, so for
`serve` that is 0.

Each command has a module that imports next to nothing: what a command needs is imported when it runs, so that
``flowctl --help`` is there at once.

Begin with `app.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

try:
    from flowctl.cli.app import app
    from flowctl.cli.errors import run
    from flowctl.core.text.output import open_missing_streams
except ModuleNotFoundError as error:
    # Only the framework is installed: the words below are all that such an environment has.
    from flowctl.core.text.extras import missing_extra
    from flowctl.core.text.output import say

    if (told := missing_extra(error, "the command flowctl", "cli")) is None:
        raise
    say(f"error: {told}\nhint: {told.hint}", to_stderr=True)
    raise SystemExit(2) from None
except KeyboardInterrupt:
    # Ctrl-C while the modules are still being read: nothing has begun, so there is nothing to say.
    raise SystemExit(130) from None

__all__ = ["app", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    open_missing_streams()
    return run(app, list(sys.argv[1:] if arguments is None else arguments))
