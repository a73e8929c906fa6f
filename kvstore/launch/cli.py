"""The `kvstore` command: what each subcommand takes, and nothing of how it works.

A subcommand imports its own code when it runs, so that ``kvstore --version`` stays quick.
"""

from __future__ import annotations

from typing import Any

import click

from kvstore.errors import KVStoreError
from kvstore.settings.definitions import DEFAULTS


class _Commands(click.Group):
    """A group whose commands end on our own errors with one line and exit code 1, not with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KVStoreError as error:
            raise click.ClickException(" ".join(str(error).split())) from error


_imports = click.option(
    "--import",
    "imports",
    metavar="MODULE",
    multiple=True,
    help="Module that servers import, for what it registers; may be given several times.",
)
_interval = click.option(
    "--snapshot-interval",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help=f"Seconds between two snapshots.  [default: {DEFAULTS['snapshot_interval']:g}]",
)
_keys = click.option("--keys", metavar="FILE", help="Keys of this process, as `kvstore keys` made them.")
_insecure = click.option(
    "--insecure", is_flag=True, help="Do without keys, though other machines can connect."
)


#: Options of scheduler and server, and the variables in the place of which they stand.
_VARIABLES = {
    "workers": "KVSTORE_NUM_WORKERS",
    "servers": "KVSTORE_NUM_SERVERS",
    "scheduler": "KVSTORE_SCHEDULER",
    "rank": "KVSTORE_SERVER_RANK",
    "host": "KVSTORE_HOST",
    "port": "KVSTORE_PORT",
    "keys": "KVSTORE_KEYS_FILE",
    "insecure": "KVSTORE_INSECURE",
    "snapshot": "KVSTORE_SNAPSHOT",
    "snapshot_interval": "KVSTORE_SNAPSHOT_INTERVAL",
}


def _environment(role: str, options: dict[str, Any]) -> dict[str, str]:
    """Variables of this process, with its role and the options that are given."""
    from kvstore.launch.serve import environment_with
    from kvstore.settings.variables import process_variables

    options["insecure"] = 1 if options["insecure"] else None
    given = {_VARIABLES[name]: value for name, value in options.items()}
    return environment_with({"KVSTORE_ROLE": role, **given}, process_variables())


_COMPLETION = """\b
Completion, in ~/.bashrc (for zsh: zsh_source; for fish: fish_source):
  eval "$(_KVSTORE_COMPLETE=bash_source kvstore)"
"""


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_COMPLETION)
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
@click.option(
    "--servers",
    type=click.IntRange(1, 64),
    help="Servers to start, for the `dist` stores.  [default: 1 for these, unless some are there]",
)
def demo(workers: int, servers: int | None, replicas: int | None, **options: Any) -> None:
    """Train a small network on handwritten digits, its gradients summed and applied by a store.

    The data comes with scikit-learn, so nothing is downloaded. Four processes of one replica end with the
    same weights, bit by bit, as one process of four.
    """
    from kvstore.launch.demo import TrainingSettings, start

    if workers > 1 and options["store"] == "local":
        options["store"] = "shared"
    settings = TrainingSettings(replicas=replicas or (4 if workers == 1 else 1), **options)
    raise SystemExit(start(settings, workers, servers))


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "--workers", type=click.IntRange(1, 1024), required=True, help="Number of processes.")
@click.option(
    "-s",
    "--servers",
    type=click.IntRange(0, 1024),
    default=0,
    show_default=True,
    help="Number of parameter servers, for `dist` stores; with any there is a scheduler too.",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Failed workers that are started again, in all, before a failure ends the job.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is the name of a Python module.")
@click.option(
    "--no-prefix", is_flag=True, help="Do not mark lines of output with the process they come from."
)
@click.option(
    "--transport",
    type=click.Choice(["tcp", "ipc"]),
    help="How workers and servers talk: over tcp, or at unix sockets without files.  [default: tcp]",
)
@click.option("--host", help="Address at which scheduler and servers are reached.  [default: 127.0.0.1]")
@click.option(
    "--secure", is_flag=True, help="Encrypt on this machine too; with another --host it is done anyway."
)
@click.option("--insecure", is_flag=True, help="Do not encrypt, though other machines can connect.")
@_imports
@click.option("--snapshot", metavar="DIR", help="Folder in which servers save what they hold, now and then.")
@_interval
@click.option(
    "--server-restarts",
    type=click.IntRange(min=0),
    help="Failed servers that are started again from their snapshot, in all.  [default: 0]",
)
@click.option("--hosts", metavar="A:4,B:4", help="Hosts to run on, by ssh, and how many workers each takes.")
@click.option("--hostfile", metavar="FILE", help="File with a host a line, `slots=4` behind it or not.")
@click.option(
    "--ssh-command", metavar="COMMAND", help="In the place of ssh; name and command are added.  [KVSTORE_SSH]"
)
@click.option("--python", metavar="PATH", help="Python on the hosts.  [default: the path of this one]")
@click.option(
    "--export",
    "exports",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="Variable that hosts get too, beside KVSTORE_*, DMLC_* and their like; may be given several times.",
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int,
    servers: int,
    restarts: int,
    module: bool,
    no_prefix: bool,
    hosts: str | None,
    hostfile: str | None,
    ssh_command: str | None,
    python: str | None,
    exports: tuple[str, ...],
    program: str,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Run PROGRAM in several processes, which find each other through kvstore.

    They run on this machine, or on those that --hosts names.

    A PROGRAM whose name ends with .py runs in this Python. The first process that fails ends the others, and
    its exit code is that of the command. `--` ends the options, and may be left out.
    """
    from kvstore.launch import service
    from kvstore.launch.hosts import remote_hosts
    from kvstore.launch.run import command_of
    from kvstore.launch.run import run as start

    there = remote_hosts.wanted(workers, servers, hosts, hostfile, ssh_command, python, exports)
    command = command_of(program, arguments, module, there.python if there else None)
    parts = service.wanted(servers, program, options, there)
    raise SystemExit(start(command, workers, restarts, not no_prefix, parts, there))


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-s", "--servers", type=click.IntRange(1, 1024), required=True, help="Servers, spread over the ranks."
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is the name of a Python module.")
@click.option("--meet", metavar="DIR", help="Folder that all hosts see: the ranks meet there, with keys.")
@click.option("--scheduler", metavar="ADDRESS", help="tcp://HOST:PORT on the host of rank 0.")
@click.option("--keys", metavar="DIR", help="Folder in which `kvstore keys` has made keys.")
@_insecure
@_imports
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def role(
    servers: int,
    module: bool,
    meet: str | None,
    scheduler: str | None,
    keys: str | None,
    insecure: bool,
    imports: tuple[str, ...],
    program: str,
    arguments: tuple[str, ...],
) -> None:
    """Run PROGRAM as a worker, in a rank that mpirun, srun or torchrun has started.

    Rank 0 runs the scheduler beside it, and some ranks a server: `mpirun -n 4 kvstore role -s 2 train.py`. On
    one machine that is all. Ranks of several hosts must know where to meet: say --meet or --scheduler, or use
    Slurm, which names its first host.
    """
    from kvstore.launch.rendezvous import meeting
    from kvstore.launch.role import Company, placed
    from kvstore.launch.role import run as start
    from kvstore.launch.run import command_of
    from kvstore.settings.variables import process_variables, text_of

    place = placed()
    insecure = insecure or text_of("insecure") == "1"
    where = meeting(place, process_variables(), scheduler, meet, keys, insecure)
    command = command_of(program, arguments, module)
    raise SystemExit(start(Company(place, servers, where, imports), command))


@main.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 takes a free one.  [default: 0]")
@click.option("-n", "--workers", type=click.IntRange(1, 65536), help="Number of workers that will come.")
@click.option("-s", "--servers", type=click.IntRange(1, 65536), help="Number of servers that will come.")
@click.option("--host", help="Address at which others reach the scheduler.  [default: 127.0.0.1]")
@_keys
@_insecure
@click.option("--report-fd", type=click.IntRange(min=0), help="Write the address there instead of to stdout.")
def scheduler(port: int | None, host: str | None, report_fd: int | None, **options: Any) -> None:
    """Run the scheduler of a job, and print its address as soon as others can connect.

    What no option says is read from the variables KVSTORE_* and DMLC_*. `kvstore run -s` does all of this on
    one machine.
    """
    from kvstore.launch.serve import address_option, reporter
    from kvstore.launch.serve import scheduler as serve
    from kvstore.settings.variables import process_variables

    options |= {"host": host, "scheduler": address_option(host, port, process_variables())}
    report = reporter(report_fd, click.echo)
    serve(_environment("scheduler", options), report, launched=report_fd is not None)


@main.command()
@click.option("--scheduler", help="Address of the scheduler, as it prints it.")
@click.option(
    "--rank", type=click.IntRange(0, 65535), help="Number of this server; else the scheduler gives one."
)
@click.option("--host", help="Address at which workers reach this server.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 takes a free one.  [default: 0]")
@_keys
@_insecure
@_imports
@click.option(
    "--snapshot", metavar="DIR", help="Folder in which the server saves what it holds, now and then."
)
@_interval
def server(imports: tuple[str, ...], **options: Any) -> None:
    """Run one server of a job, until the job is over.

    What no option says is read from the variables KVSTORE_* and DMLC_*.
    """
    from kvstore.launch.serve import server as serve

    serve(_environment("server", options), imports)


@main.command()
@click.option("-n", "--workers", type=click.IntRange(1, 65536), required=True, help="Number of workers.")
@click.option("-s", "--servers", type=click.IntRange(1, 65536), required=True, help="Number of servers.")
@click.argument("folder", type=click.Path(file_okay=False))
def keys(workers: int, servers: int, folder: str) -> None:
    """Make the keys of a job of several machines: one file in FOLDER for each process.

    Give each process its own file, and no other (KVSTORE_KEYS_FILE, --keys). `kvstore run` makes keys itself.
    """
    from pathlib import Path

    from kvstore.launch.certificates import Certificates

    for path in Certificates(workers, servers).save(Path(folder)):
        click.echo(path)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def env(as_json: bool) -> None:
    """Show which launcher's variables are found here, what they say, and why the others lost.

    Where there is a parameter server, also the part of this process in it. Exits with 1 where variables are
    missing or contradict each other.
    """
    import json

    from kvstore.launch.env import findings, lines, sound

    found = findings()
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))
    raise SystemExit(0 if sound(found) else 1)
