"""Build Horovod for tests: its core alone, in about a minute, or the real thing for PyTorch, in about five.

    python tests/engines/build_horovod.py core FOLDER
    PYTHON tests/engines/build_horovod.py torch FOLDER

The first needs cmake and a C++ compiler, and makes the library that tests use with
KVSTORE_TEST_HOROVOD_CORE=FOLDER. The second is run by a Python that has PyTorch and kvstore: it builds a
wheel into FOLDER, or uses the wheel that is there, and installs it; then KVSTORE_TEST_HOROVOD=PYTHON. FOLDER
may be left out where KVSTORE_TEST_CACHE names one. MAKEFLAGS=-j1 and the like are heard.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
VERSION = "0.28.1"  # the last one; it has no wheels, and its sdist has what its repository has as submodules
TOOLS = ("setuptools<80", "wheel", "packaging", "cffi", "cloudpickle", "psutil", "pyyaml")
WITHOUT = dict.fromkeys(("HOROVOD_WITHOUT_MPI", "HOROVOD_WITHOUT_TENSORFLOW", "HOROVOD_WITHOUT_MXNET"), "1")


def run(*command: str | Path, folder: Path | None = None, **variables: str) -> None:
    print("+", *command, flush=True)  # noqa: T201
    subprocess.run([str(part) for part in command], cwd=folder, env={**os.environ, **variables}, check=True)


def pip(python: Path, *arguments: str | Path, **variables: str) -> None:
    run(python, "-m", "pip", "-q", "--disable-pip-version-check", *arguments, **variables)


def sources(python: Path, folder: Path) -> Path:
    """Fetch and unpack Horovod's sources, anew."""
    pip(
        python,
        *("download", "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "-d", folder),
        f"horovod=={VERSION}",
        HOROVOD_SKIP_COMPILE="1",
    )
    unpacked = folder / f"horovod-{VERSION}"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return unpacked


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new))


def build_core(folder: Path) -> None:
    """horovod_shim.so, and Horovod's launcher and rendezvous, which are pure Python, in `site`."""
    if (folder / "horovod_shim.so").exists() and (folder / "site").exists():
        print(f"{folder} has it already")  # noqa: T201
        return
    run(sys.executable, "-m", "venv", folder / "tools")
    python = folder / "tools/bin/python"
    pip(python, "install", *TOOLS)
    source = sources(python, folder)
    shim = source / "horovod/shim"
    shim.mkdir()
    shutil.copy(HERE / "horovod_shim.cc", shim)
    shutil.copy(HERE / "horovod_shim.cmake", shim / "CMakeLists.txt")
    mxnet = "add_subdirectory(horovod/mxnet)"
    replace(source / "CMakeLists.txt", mxnet, f"{mxnet}\nadd_subdirectory(horovod/shim)")
    build = source / "made"
    build.mkdir()
    options = (
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DPYTHON_EXECUTABLE={python}",
        f"-DSHIM_FOLDER={folder}",
    )
    run("cmake", "..", *options, folder=build, HOROVOD_WITHOUT_PYTORCH="1", **WITHOUT)
    run("make", "horovod_shim", folder=build)
    run("strip", "--strip-unneeded", folder / "horovod_shim.so")
    target = ("install", "--target", folder / "site", "--upgrade")
    pip(python, *target, "--no-build-isolation", "--no-deps", source, HOROVOD_SKIP_COMPILE="1")
    pip(python, *target, "packaging", "cloudpickle", "psutil", "pyyaml")
    shutil.rmtree(source)


def build_torch(folder: Path) -> None:
    """Build a wheel for this very Python and its PyTorch, and install it here."""
    python = Path(sys.executable)
    pip(python, "install", *TOOLS)
    if not list(folder.glob(f"horovod-{VERSION}-*.whl")):
        source = sources(python, folder)
        for part in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):  # PyTorch 2.1 and newer need C++17
            replace(source / part, "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)")
        wheel = ("wheel", "--no-build-isolation", "--no-deps", "-w", folder, source)
        pip(python, *wheel, HOROVOD_WITH_PYTORCH="1", HOROVOD_WITH_GLOO="1", **WITHOUT)
        shutil.rmtree(source)
    (made,) = folder.glob(f"horovod-{VERSION}-*.whl")
    pip(python, "install", "--no-deps", "--force-reinstall", made)


def main() -> None:
    what, *rest = sys.argv[1:] or [""]
    folder = rest[0] if rest else os.environ.get("KVSTORE_TEST_CACHE")
    builders = {"core": build_core, "torch": build_torch}
    if what not in builders or not folder:
        sys.exit(__doc__)
    place = Path(folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    builders[what](place)


if __name__ == "__main__":
    main()
