"""``python -m kvstore.kernels.cuda``: compile kernels ahead of time, report facts about the compiled code."""

from __future__ import annotations

from pathlib import Path

import click

from . import cache
from .spec import KernelSpec, all_specs

_ARCHS = ("sm_80", "sm_90", "sm_100")


@click.group(
    help="Compile the CUDA kernels ahead of time. Needs kvstore-train[cuda], but no GPU and no driver."
)
def main() -> None:
    """Group the commands."""


@main.command(help="Put every kernel into FOLDER, for KVSTORE_CUDA_KERNELS.")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--arch", "archs", multiple=True, default=_ARCHS, show_default=True, help="May be repeated.")
@click.option("--kernel", "names", multiple=True, help="By name; may be repeated. [default: all]")
def build(folder: Path, archs: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Compile and write kernels; existing files are not compiled again."""
    from .compile import assemble_cubin, compile_ptx

    specs = [KernelSpec.from_name(name) for name in names] or all_specs()
    made = 0
    for spec in specs:
        paths = {arch: folder / cache.file_name(spec, arch) for arch in archs}
        missing = [arch for arch in archs if cache.read_kernel(paths[arch], spec, arch, own=False) is None]
        for arch, ptx in compile_ptx(spec, missing).items() if missing else ():
            cache.write_kernel(folder, spec, assemble_cubin(spec, arch, ptx), private=False)
            made += 1
    click.echo(f"{made} kernels compiled into {folder}, {len(specs) * len(archs) - made} were there")


@main.command(help="Write facts about the compiled code of each kernel, as a table in Markdown, to FILE.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--arch", "archs", multiple=True, default=_ARCHS, show_default=True, help="May be repeated.")
def report(file: Path, archs: tuple[str, ...]) -> None:
    """Compile all kernels, and write the report."""
    from .report import report_page

    file.write_text(report_page(archs))
    click.echo(f"{len(all_specs())} kernels for {', '.join(archs)}: {file}")


if __name__ == "__main__":
    main(prog_name="python -m kvstore.kernels.cuda")
