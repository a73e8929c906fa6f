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
@click.option("--store", default="local", show_default=True, help="Name for kvstore.create: local or device.")
@click.option("--optimizer", default="sgd", show_default=True, help="The rule that runs on the store.")
@click.option(
    "--replicas",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Copies of the network in this process; each works on its own shard of every batch.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=30, show_default=True)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same bits."
)
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), help="Peak learning rate.")
def demo(**options: Any) -> None:
    """Train a small network on handwritten digits, its gradients summed and applied by a store.

    The data comes with scikit-learn, so nothing is downloaded.
    """
    from kvstore.launch.demo import Settings, run

    run(Settings(**options))
