"""Options of other launchers: the error of the command names the equivalent option of kvstore."""

from __future__ import annotations

from collections.abc import Sequence

import click

#: For each option of `kvstore`, the options of mpirun, srun, torchrun, horovodrun, deepspeed and accelerate
#: with the same meaning, without dashes.
_SAME = {
    "--workers": "n np n-p nproc nprocs num-proc num-procs num-processes num-workers nproc-per-node "
    "nproc-per-host ntasks n-tasks ppn num-gpus gpus processes procs slots",
    "--servers": "ps num-servers nservers num-ps",
    "--hosts": "H host hostlist nodes nodelist nnodes num-nodes num-machines include",
    "--hostfile": "machinefile machine-file hosts-file",
    "--export": "x env genv environment",
    "--restarts": "max-restarts max-restart",
    "--module": "module-name",
    "--no-prefix": "no-tag-output no-label",
    "--ssh-command": "ssh ssh-port launcher launch-agent",
    "--import": "imports import-module",
}
#: Options without an equivalent.
_NEEDLESS = {
    "rdzv-endpoint rdzv-backend rdzv-id rdzv-conf master-addr master-port node-rank machine-rank standalone "
    "main-process-ip main-process-port": "kvstore run makes the rendezvous itself: name other machines with "
    "--hosts, or start the program with torchrun on each machine",
    "tag-output label prefix-output": "omit it: lines of output have the name of their process",
    "verbose v debug log-level": "set KVSTORE_LOG=info or KVSTORE_LOG=debug",
    "no-python": "omit it: a PROGRAM whose name does not end with .py runs as it is",
    "allow-run-as-root oversubscribe bind-to map-by cpu-bind": "omit it: kvstore run does not bind processes",
}
_OF = {name: option for option, names in _SAME.items() for name in names.split()}
_HINTS = {name: hint for names, hint in _NEEDLESS.items() for name in names.split()}


class HintingCommand(click.Command):
    """A command whose error for an option of another launcher names its own option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; raise UsageError for an option of another launcher."""
        given = list(args)  # the parser removes words
        try:
            return super().parse_args(ctx, args)
        except (click.NoSuchOption, click.BadParameter) as error:
            if hint := self._hint_for(error, given):
                raise click.UsageError(hint, ctx) from error
            raise

    def _hint_for(self, error: click.NoSuchOption | click.BadParameter, given: Sequence[str]) -> str | None:
        """Return the text of the error, if its cause is an option of another launcher."""
        option = _written_option(error, given)
        name = option.lstrip("-").replace("_", "-")
        if any(option in one.opts for one in self.params):
            return None
        own = next((one for one in self.params if _OF.get(name) in one.opts), None)
        if own is not None:
            return f"No such option '{option}': write {' or '.join(own.opts)}."
        hint = _HINTS.get(name) if self.name == "run" else None
        if self.name == "role" and _OF.get(name) == "--workers":
            hint = "it belongs to the launcher, as in `mpirun -n 4 kvstore role -s 2 train.py`"
        return f"No such option '{option}': {hint}." if hint else None


def _written_option(error: click.NoSuchOption | click.BadParameter, given: Sequence[str]) -> str:
    """Return the option as it was written: click reads -np as -n p, and -ppn as -p -p -n."""
    names: tuple[str, ...]
    if isinstance(error, click.NoSuchOption):
        names = (error.option_name,)
    else:
        names = tuple(error.param.opts) if error.param else ()
    for word in given:
        option = word.partition("=")[0]
        if option in names or word.startswith(tuple(name for name in names if len(name) == 2)):
            return option
    return ""
