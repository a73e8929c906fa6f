"""The `kvstore` command: the options and arguments of each subcommand.

A subcommand imports its code when it runs, so that ``kvstore --version`` is fast.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvstore.errors import KVStoreError
from kvstore.settings.definitions import DEFAULTS
from kvstore.settings.descriptors import occupy_standard
from kvstore.stores.parameter_server.transport.process_limits import resource_shortage

#: Errors of the system for output that cannot be written.
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_F = TypeVar("_F", bound=Callable[..., Any])


class _CommandGroup(click.Group):
    """A group whose commands report an error in one line, without a traceback, and exit with 1.

    This includes output that cannot be written.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            occupy_standard()
            return super().invoke(ctx)
        except KVStoreError as error:
            raise click.ClickException(" ".join(str(error).split())) from error
        except (MemoryError, ImportError, RuntimeError) as error:
            if (missing := resource_shortage(error)) is None:
                raise
            raise click.ClickException(f"this process has {missing}") from error
        except OSError as error:
            if error.filename is not None or error.errno not in _UNWRITTEN:
                raise
            raise click.ClickException(f"the output cannot be written: {error.strerror}") from error


class _FiniteNumber(click.FloatRange):
    """A finite number: comparisons let nan through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        return found if math.isfinite(found) else self.fail(f"{found} is not finite.", param, ctx)


def _option(names: str, text: str, **settings: Any) -> Callable[[_F], _F]:
    """Return an option of these names; `text` is its help."""
    return click.option(*names.split(), help=text, **settings)


def _count(
    names: str, text: str, least: int = 1, most: int | None = None, **settings: Any
) -> Callable[[_F], _F]:
    """Return an option that is a whole number from `least` to `most`."""
    return _option(names, text, type=click.IntRange(least, most), **settings)


def _flag(names: str, text: str) -> Callable[[_F], _F]:
    return _option(names, text, is_flag=True)


def _folder(names: str, text: str) -> Callable[[_F], _F]:
    return _option(names, text, metavar="DIR")


_IMPORTS = "Module that servers import, for own optimizers and codecs. Can be given several times."
_imports = _option("--import imports", _IMPORTS, metavar="MODULE", multiple=True)
_positive = _FiniteNumber(min=0, min_open=True)
_INTERVAL = f"Seconds between two snapshots.  [default: {DEFAULTS['snapshot_interval']:g}]"
_interval = _option("--snapshot-interval", _INTERVAL, type=_positive, metavar="S")
_keys = _option("--keys keys_file", "Keys of this process, written by `kvstore keys`.", metavar="FILE")
_insecure = _flag("--insecure", "Run without keys, even if other machines can connect.")
_module = _flag("-m --module", "PROGRAM is the name of a Python module.")
_port = _count("--port", "Port; 0 means a free port.  [default: 0]", least=0, most=65535)
_hostfile = _option("--hostfile", "File with one host per line, with or without `slots=4`.", metavar="FILE")
_SSH = "Command to use instead of ssh; host and remote command are appended.  [KVSTORE_SSH]"
_ssh_command = _option("--ssh-command", _SSH, metavar="COMMAND")
_EXPORT = "Variable for the hosts, besides KVSTORE_*, DMLC_*, PS_* and others. Can be given several times."
_python = _option("--python", "Path of Python on the hosts.  [default: that of this Python]", metavar="PATH")

_COMPLETION = """\b
Completion, in ~/.bashrc (for zsh: zsh_source; for fish: fish_source):
  eval "$(_KVSTORE_COMPLETE=bash_source kvstore)"
"""


@click.group(
    cls=_CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=_COMPLETION,
)
@click.version_option(package_name="kvstore-train", prog_name="kvstore", message="%(prog)s %(version)s")
def main() -> None:
    """Synchronize parameters in data-parallel training."""


@main.command()
@_option("--store", "Name for kvstore.create.", default="local")
@_option("--optimizer", "Name of the optimizer.", default="sgd")
@_count("-n --workers", "Number of processes; the default store of several is `shared`.", most=64, default=1)
@_count("--replicas", "Copies of the network in a process.  [default: 4 in one process, else 1]", most=64)
@_count("--epochs", "Number of epochs.", default=30)
@_count("--seed", "Seed of the random numbers; equal seeds give identical bits.", least=0, default=0)
@_option("--lr", "Peak learning rate.", type=_positive)
@_count("--servers", "Servers to start, for a `dist` store.  [default: 1, unless servers run]", most=64)
def demo(workers: int, servers: int | None, replicas: int | None, **options: Any) -> None:
    """Train a small network on handwritten digits with a store.

    The store sums the gradients and applies the optimizer. The data is part of scikit-learn, so nothing is
    downloaded. Four processes with one replica each give the same weights, bit for bit, as one process with
    four replicas.
    """
    from kvstore.demo import TrainingSettings, start_demo

    if workers > 1 and options["store"] == "local":
        options["store"] = "shared"
    settings = TrainingSettings(replicas=replicas or (4 if workers == 1 else 1), **options)
    raise SystemExit(start_demo(settings, workers, servers))


@main.command(context_settings={"allow_interspersed_args": False})
@_count("-n --workers", "Number of processes.", most=1024, required=True)
@_count("-s --servers", "Number of servers for `dist` stores; a scheduler is added.", 0, 1024, default=0)
@_count("--restarts", "Failed workers to start again before a failure ends the job.", least=0, default=0)
@_module
@_flag("--no-prefix", "Print lines of output without the name of their process.")
@_option(
    "--transport", "tcp, or unix sockets without files.  [default: tcp]", type=click.Choice(["tcp", "ipc"])
)
@_option("--host", "Address at which scheduler and servers listen.  [default: 127.0.0.1]")
@_flag("--secure", "Encrypt connections on this machine too; with another --host they always are.")
@_flag("--insecure", "Do not encrypt, even if other machines can connect.")
@_imports
@_folder("--snapshot", "Folder in which servers save their data at intervals.")
@_interval
@_count("--server-restarts", "Failed servers to start again, from their snapshots.  [default: 0]", least=0)
@_count("--scheduler-restarts", "Restarts of a failed scheduler, from its journal.  [default: 0]", least=0)
@_folder("--journal", "Folder for the scheduler's journal.  [default: temporary, with --scheduler-restarts]")
@_option("--hosts", "Hosts to use over ssh, with the number of workers on each.", metavar="A:4,B:4")
@_hostfile
@_ssh_command
@_python
@_option("--export exports", _EXPORT, metavar="NAME[=VALUE]", multiple=True)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(program: str, arguments: tuple[str, ...], module: bool, **options: Any) -> None:
    """Run PROGRAM in several processes that form one job.

    The processes run on this machine, or on the machines of --hosts.

    If the name of PROGRAM ends with .py, the current Python runs it. When one process fails, the others are
    ended, and the command exits with the exit code of the failed process. `--` ends the options; you can omit
    it.
    """
    from kvstore.launch import service
    from kvstore.launch.hosts import remote_hosts
    from kvstore.launch.run import command_of
    from kvstore.launch.run import run as start

    workers, servers, restarts = (options.pop(name) for name in ("workers", "servers", "restarts"))
    prefix = not options.pop("no_prefix")
    hosts = remote_hosts.hosts_of_options(workers, servers, options)
    command = command_of(program, arguments, module, hosts.python if hosts else None)
    parts = service.service_of_options(servers, program, options, hosts)
    raise SystemExit(start(command, workers, restarts, prefix, parts, hosts))


@main.command(context_settings={"allow_interspersed_args": False})
@_count("-s --servers", "Number of servers.", most=1024, required=True)
@_module
@_folder("--meet", "Folder that all hosts can read; the ranks exchange address and keys there.")
@_option("--scheduler", "Address of the scheduler: tcp://HOST:PORT on the host of rank 0.", metavar="ADDRESS")
@_folder("--keys", "Folder with the keys that `kvstore keys` has written.")
@_insecure
@_imports
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def role(program: str, arguments: tuple[str, ...], module: bool, **options: Any) -> None:
    """Run PROGRAM as a worker, in a rank that mpirun, srun or torchrun has started.

    Rank 0 also runs the scheduler, and some ranks also run a server: `mpirun -n 4 kvstore role -s 2
    train.py`. On one machine this needs no other option. On several hosts, give --meet or --scheduler; under
    Slurm the ranks use the first host of the step.
    """
    from kvstore.launch.rendezvous import meeting
    from kvstore.launch.role import RankProcesses, launched_place
    from kvstore.launch.role import run as start
    from kvstore.launch.run import command_of
    from kvstore.settings.environment import process_variables, text_of

    place, insecure = launched_place(), options["insecure"] or text_of("insecure") == "1"
    scheduler, folder, keys = (options[name] for name in ("scheduler", "meet", "keys"))
    where = meeting(place, process_variables(), scheduler, folder, keys, insecure)
    command = command_of(program, arguments, module)
    raise SystemExit(start(RankProcesses(place, options["servers"], where, options["imports"]), command))


@main.command()
@_port
@_count("-n --workers num_workers", "Number of workers in the job.", most=65536)
@_count("-s --servers num_servers", "Number of servers in the job.", most=65536)
@_option("--host", "Address at which the scheduler listens.  [default: 127.0.0.1]")
@_keys
@_insecure
@_folder("--journal", "Folder for its journal, with which it can be started again.")
@_count("--report-fd", "File descriptor to write the address to, instead of stdout.", least=0)
def scheduler(port: int | None, host: str | None, report_fd: int | None, **options: Any) -> None:
    """Run the scheduler of a job, and print its address when other processes can connect.

    The variables KVSTORE_* and DMLC_* set what no option sets. `kvstore run -s` starts scheduler, servers and
    workers in one command.
    """
    from kvstore.launch import serve

    options |= {"host": host, "scheduler": serve.address_option(host, port)}
    report = serve.address_reporter(report_fd, click.echo)
    variables = serve.role_variables("scheduler", options)
    serve.run_scheduler(variables, report, launched=report_fd is not None)


@main.command()
@_option("--scheduler", "Address of the scheduler, as the scheduler prints it.")
@_count(
    "--rank server_rank", "Rank of this server.  [default: the scheduler assigns one]", least=0, most=65535
)
@_option("--host", "Address at which this server listens.")
@_port
@_keys
@_insecure
@_imports
@_folder("--snapshot", "Folder in which the server saves its data at intervals.")
@_interval
def server(imports: tuple[str, ...], **options: Any) -> None:
    """Run one server of a job until the job is over.

    The variables KVSTORE_* and DMLC_* set what no option sets.
    """
    from kvstore.launch import serve

    serve.run_server(serve.role_variables("server", options), imports)


@main.command()
@_count("-n --workers", "Number of workers.", most=65536, required=True)
@_count("-s --servers", "Number of servers.", most=65536, required=True)
@click.argument("folder", type=click.Path(file_okay=False))
def keys(workers: int, servers: int, folder: str) -> None:
    """Create the keys of a job on several machines.

    The command writes one file into FOLDER for each process. Give each process only its own file
    (KVSTORE_KEYS_FILE, --keys). `kvstore run` creates keys by itself.
    """
    from pathlib import Path

    from kvstore.launch.certificates import Certificates

    for path in Certificates(workers, servers).save(Path(folder)):
        click.echo(path)


@main.command()
@_flag("--json as_json", "Print one JSON list, with an object for each line.")
@_flag("--no-tests", "Omit the self-tests, which start processes.")
@_flag("--speed", "Also measure speeds: memory, `local`, `dist_sync`.")
@_option("--hosts", "Also check these hosts, reached by ssh, and their links.", metavar="A,B")
@_hostfile
@_ssh_command
@_python
def doctor(as_json: bool, no_tests: bool, speed: bool, **options: Any) -> None:
    """Check all that decides whether and how fast kvstore runs on this machine.

    Each line has a level (ok, warning, error), what was found, and what to do about it. The self-tests sum
    random arrays with each store that can run here, and compare the bits. The report has no keys, addresses
    or values of variables.

    --hosts compares versions and clocks of other hosts with those of this machine, lists the warnings and
    errors of their own checks, and measures latency and bandwidth from each host to the next.

    The command exits with 0 if there is no error, and with 1 if there is one. Warnings do not count.
    """
    import itertools
    import json

    from kvstore.launch.hosts import remote_hosts
    from kvstore.observe.doctor import hosts as far_hosts
    from kvstore.observe.doctor import report

    hosts = remote_hosts.hosts_of_options(None, 0, options)
    colours = {"ok": "green", "warning": "yellow", "error": "red"}
    found = []
    far = () if hosts is None else map(report.without_secrets, far_hosts.check_hosts(hosts))
    for one in itertools.chain(report.run_checks(not no_tests, speed), far):
        found.append(one)
        if not as_json:
            level, rest = report.finding_line(one)[:7], report.finding_line(one)[7:]
            click.echo(click.style(level, fg=colours[one.level]) + rest)
    objects = [one._asdict() for one in found]
    click.echo(json.dumps(objects, indent=2) if as_json else f"\n{report.last_line(found)}")
    raise SystemExit(1 if any(one.level == "error" for one in found) else 0)


@main.command()
@click.argument("job", required=False)
@_option(
    "--interval", "Seconds between two looks.", type=_FiniteNumber(0.05, 86400), default=2.0, metavar="S"
)
@_flag("--once", "Look twice, print what happened in between, and exit.")
@_flag("--json as_json", "Print one JSON object for each look, in one line.")
def top(job: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Show what the jobs of this user do on this machine, and for whom their processes wait.

    There is one row for each store of a process: rounds and bytes by the second, memory, processors, the
    processes that it has lost, the part of the time in which it waits, and for whom it waits now. A terminal
    of 120 columns has room for more. Ctrl-C ends the command.

    JOB is the name of a job, the beginning of the name that this command prints, or the number of one of its
    processes or of `kvstore run`. Without it all jobs are shown. The jobs go on as before, except that they
    measure times while this command looks on.

    The command exits with 1 if there is no such job.
    """
    from kvstore.observe.top.run import run

    if job is not None and not job.strip():
        raise click.BadParameter("it is empty; omit it to see all jobs.", param_hint="JOB")
    run(job, interval, once, as_json, click.echo)


_BENCH_KEYS = (
    "resnet50, llama-1b-shapes, or a file: safetensors, of which only names, shapes and types are read; "
    'JSON, {"name": [64, 3, 7, 7]}; or lines, `name 64,3,7,7 float32`.'
)
_BENCH_METHODS = click.Choice(["pushpull", "push-pull"])
_BENCH_PEERS = "Other libraries: gloo (needs torch), mpi (needs mpi4py), gloo,mpi; auto: those installed."


@main.command()
@_option("--store", "Name for kvstore.create.", default="shared")
@_count("-n --workers", "Number of processes.  [default: 2, or 1 for a store of one process]", most=64)
@_count("-s --servers", "Number of parameter servers, for `dist` stores.  [default: 1]", most=64)
@_option("--keys", _BENCH_KEYS, metavar="NAME|FILE", default="resnet50")
@_option("--dtype", "Element type of all keys.  [default: that of the file, or float32]")
@_option("--compression", "Gradient compression, such as 2bit=0.5.", metavar="TYPE[=THRESHOLD]")
@_option("--optimizer", "Name of an optimizer, which the store runs.  [default: none]")
@_option("--method", "One call, or a push and then a pull.", type=_BENCH_METHODS, default="pushpull")
@_count("--rounds", "Rounds; in each, every peer has one turn.", most=10_000, default=10)
@_option("--peers", _BENCH_PEERS, metavar="auto|none|NAMES", default="auto")
@_option("--json json_file", "Write the result as JSON; - prints it instead.", metavar="FILE")
@_option("--plot picture", "Draw the times, such as bench.png; needs matplotlib.", metavar="FILE")
def bench(
    keys: str, dtype: str | None, peers: str, json_file: str | None, picture: str | None, **options: Any
) -> None:
    """Measure a store with your keys, beside other libraries on this machine.

    Each worker has one gradient for each key; a call sums all of them over the workers. The processes of the
    store and those of each peer take turns. All sums are compared with those of NumPy before anything is
    timed.
    """
    from kvstore.observe.bench import command

    raise SystemExit(command.run_bench(options, keys, dtype, peers, json_file, picture))


@main.command()
@click.argument("folder", type=click.Path(file_okay=False))
@_option("-o --output", "Write a trace that Perfetto opens.", metavar="FILE")
@_flag("--report", "Print the report, also with -o.")
@_flag("--json as_json", "Print the report as one JSON object.")
def timeline(folder: str, output: str | None, report: bool, as_json: bool) -> None:
    """Put the timelines of a job's processes together.

    FOLDER is what KVSTORE_TIMELINE was set to in the job. Without -o, the command prints a report: for each
    worker the time of a step, and its parts; which worker the others wait for; which keys cost most.

    The trace (-o) can be opened at https://ui.perfetto.dev.
    """
    import json
    from pathlib import Path

    from kvstore.observe.timeline.job import chrome, model, text
    from kvstore.observe.timeline.job.report import job_report

    if output == "-":
        raise click.BadParameter("a trace is written to a file, not to stdout.", param_hint="-o")
    job = model.read_job(Path(folder))
    if output is not None:
        count = chrome.write_trace(job, Path(output))
        click.echo(f"{count} events of {len(job.processes)} processes are in {output}", err=True)
    if report or as_json or output is None:
        found = job_report(job)
        click.echo(json.dumps(found, indent=2) if as_json else "\n".join(text.report_lines(found)))
