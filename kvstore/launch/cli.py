"""The `kvstore` command: what each subcommand takes, and nothing of how it works.

A subcommand imports its own code when it runs, so that ``kvstore --version`` stays quick.
"""

from __future__ import annotations

from typing import Any

import click

from kvstore.errors import KVStoreError


class _Commands(click.Group):
    """A group whose commands end on our own errors with one line and exit code 1, not with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KVStoreError as error:
            raise click.ClickException(" ".join(str(error).split())) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvstore-train", prog_name="kvstore", message="%(prog)s %(version)s")
def main() -> None:
    """Keep parameters in step in data-parallel training."""


@main.command()
@click.option("--store", default="local", show_default=True, help="Name for kvstore.create.")
@click.option("--optimizer", default="sgd", show_default=True, help="The rule that runs on the store.")
@click.option(
    "-n",
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Processes; with more than one the store is `shared` unless --store says otherwise.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 64),
    help="Copies of the network in each process, each with its own shard of every batch.  "
    "[default: 4 in one process, else 1]",
)
@click.option("--epochs", type=click.IntRange(min=1), default=30, show_default=True)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same bits."
)
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), help="Peak learning rate.")
def demo(workers: int, replicas: int | None, **options: Any) -> None:
    """Train a small network on handwritten digits, its gradients summed and applied by a store.

    The data comes with scikit-learn, so nothing is downloaded. Four processes of one replica end with the
    same weights, bit by bit, as one process of four.
    """
    from kvstore.launch.demo import Settings, run
    from kvstore.launch.spawn import spawn

    if workers == 1:
        run(Settings(replicas=replicas or 4, **options))
        return
    if options["store"] == "local":
        options["store"] = "shared"
    spawn(run, workers, (Settings(replicas=replicas or 1, **options),))


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "--workers", type=click.IntRange(1, 1024), required=True, help="Number of processes.")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Failed workers that are started again, in all, before a failure ends the job.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is the name of a Python module.")
@click.option("--no-prefix", is_flag=True, help="Do not mark lines of output with the rank they come from.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int, restarts: int, module: bool, no_prefix: bool, program: str, arguments: tuple[str, ...]
) -> None:
    """Run PROGRAM in several processes of this machine, which find each other through kvstore.

    A PROGRAM whose name ends with .py runs in this Python. The first worker that fails ends the others, and
    its exit code is that of the command. `--` ends the options, and may be left out.
    """
    from kvstore.launch.run import command_of
    from kvstore.launch.run import run as start

    code = start(command_of(program, arguments, module), workers, restarts, prefix=not no_prefix)
    raise SystemExit(code)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def env(as_json: bool) -> None:
    """Show which launcher's variables are found here, what they say, and why the others lost.

    Exits with 1 where the variables contradict each other.
    """
    import json

    from kvstore.launch.env import findings, lines

    found = findings()
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))
    raise SystemExit(1 if "error" in found else 0)
