"""``flowctl analyze``: jobs on the records of servers, each a command of its own; needs the extra ``pipeline``.

What a command needs of the extra is loaded when it runs, so that ``flowctl --help`` costs nothing of it.
"""

from __future__ import annotations

import typer

from flowctl.cli.analyze import compare, jobs, synth, watch

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Turn the records of servers into decisions. Who was slow and why, which limits would be better, whom to keep "
    "out, how many viewers a node carries. Runs on Spark.",
)
for name, command in jobs.COMMANDS.items():
    app.command(name)(command)
app.command("compare")(compare.compare)
app.command("watch")(watch.watch)
app.command("synth")(synth.synth)


def add_to(program: typer.Typer) -> None:
    program.add_typer(app, name="analyze")
