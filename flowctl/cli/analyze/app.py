"""``flowctl analyze``: jobs on the records of servers, each a command of its own; needs the extra ``pipeline``.

A job's command is in a module ``flowctl.cli.analyze_<job>``, which is loaded when the job is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

JOBS: Final = ("all", "sessions", "fleet", "abuse", "whatif", "capacity", "report", "watch", "synth")
"""In the order of the help; `all` is what most want."""


class JobGroup(TyperGroup):
    """The jobs as commands that are loaded late."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the jobs, in the order of the help."""
        return [name for name in JOBS if importlib.util.find_spec(f"flowctl.cli.analyze.{name}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Load the command of a job; None: there is no such job."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"flowctl.cli.analyze.{cmd_name}")
        alone = typer.Typer(
            add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
        )
        alone.command(cmd_name)(module.command)
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
