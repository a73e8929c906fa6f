"""Use the kvstore that is installed for this Python: modules, the README's first example, and two workers.

For a wheel before it is published: `[tool.cibuildwheel]` runs this in the environment of each wheel. It takes
some seconds, and needs nothing but what the wheel brings; ``--demo`` adds `kvstore demo` and its extra.
"""

import importlib
import pkgutil
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = str(Path(sysconfig.get_path("scripts")) / "kvstore")
PATIENCE = 120.0  # seconds for each step; a step takes one or two

WORKER = """
import sys
import numpy as np
import kvstore as kv

with kv.create(sys.argv[1]) as store:
    store.init("w", np.zeros((100, 10), np.float32))
    store.push("w", np.full((100, 10), store.rank + 1, np.float32))
    out = np.empty((100, 10), np.float32)
    store.pull("w", out=out)
    assert store.num_workers == 2
    assert (out == 3).all(), out
"""


def run(*command: str, cwd: str) -> str:
    """Return what a command printed; one that fails ends this program."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        sys.exit(f"{' '.join(command[:6])} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def refuse_the_tree() -> None:
    """End this program if what is imported is the source tree."""
    for name in ("kvstore", "kvstore.kernels._cpu", "kvstore.stores.shared.native._shared"):
        path = Path(importlib.import_module(name).__file__ or "").resolve()
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            sys.exit(f"{name} comes from the source tree ({path}), not from a wheel")


def import_all() -> None:
    """Import every module but those of what is not installed: some are imported only when asked for."""
    kvstore = importlib.import_module("kvstore")
    for module in pkgutil.walk_packages(kvstore.__path__, "kvstore."):
        if module.name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            cause = error.__cause__ if isinstance(error, kvstore.MissingBackendError) else error
            name = cause.name if isinstance(cause, ModuleNotFoundError) else None
            if name is None or name.partition(".")[0] == "kvstore":
                sys.exit(f"{module.name} cannot be imported: {error!r}")


def first_example() -> tuple[str, str]:
    """Return the README's first example, and what it prints."""
    section = (ROOT / "README.md").read_text().split("## First example\n")[1]
    found = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", section, re.DOTALL)
    if found is None:
        sys.exit("the README has no first example with its output")
    return found[1], found[2]


def main() -> None:
    """Run all steps in an empty folder."""
    refuse_the_tree()
    import_all()
    with tempfile.TemporaryDirectory() as folder:
        program, output = first_example()
        if (said := run(sys.executable, "-c", program, cwd=folder)) != output:
            sys.exit(f"the README's first example printed\n{said}")
        worker = Path(folder, "worker.py")
        worker.write_text(WORKER)
        run(COMMAND, "run", "-n", "2", str(worker), "local", cwd=folder)
        run(COMMAND, "run", "-n", "2", "-s", "1", str(worker), "dist_sync", cwd=folder)
        if "--demo" in sys.argv[1:]:
            print(run(COMMAND, "demo", "--epochs", "3", cwd=folder))
            run(COMMAND, "demo", "-n", "2", "--epochs", "3", cwd=folder)
    print("the installed kvstore works: example, shared memory, servers")


if __name__ == "__main__":
    main()
