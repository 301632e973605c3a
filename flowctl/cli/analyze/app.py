"""``flowctl analyze``: jobs on the records of servers, each a command of its own; needs the extra ``pipeline``.

A command is loaded when it is asked for, so that ``flowctl --help`` costs nothing of it.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

COMMANDS: Final = {
    "all": "jobs",
    "sessions": "jobs",
    "experience": "jobs",
    "fleet": "jobs",
    "abuse": "jobs",
    "whatif": "jobs",
    "capacity": "jobs",
    "report": "jobs",
    "compare": "compare",
    "watch": "watch",
    "synth": "synth",
}
"""Name -> module with a function of that name, in the order of the help; `all` is what most want."""


class JobGroup(TyperGroup):
    """The jobs as commands that are loaded late."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the jobs, in the order of the help."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Load the command of a job; None: there is no such job."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"flowctl.cli.analyze.{COMMANDS[cmd_name]}")
        alone = typer.Typer(
            add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
        )
        alone.command(cmd_name)(module.COMMANDS[cmd_name])
        return get_command(alone)


app = typer.Typer(
    cls=JobGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Turn the records of servers into decisions: who was slow and why, which limits would be better, whom to keep "
    "out, how many viewers a node carries. Runs on Spark.",
)


@app.callback()
def analyze() -> None:
    """Turn the records of servers into decisions."""
