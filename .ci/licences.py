"""Check the licences of what kvstore-train and its extras bring, as installed in this environment.

All that is installed must have a licence that is in the lists below; every exception has its reason there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

OURS = "kvstore-train"

# May be used in, and shipped with, software under Apache-2.0.
FREE = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "ISC",
    "LicenseRef-MPICH",  # permits use, changes and distribution
    "MIT",
    "MIT-CMU",
    "PSF-2.0",
    "Zlib",
}
# Bind those who change or ship the files of that distribution: kvstore imports it, and ships none of it.
OF_FILES = "MPL-2.0"
# Distributions whose metadata say nothing, or too little, and the licence that they contain.
READ = {
    "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",  # only a list of NVIDIA's other distributions
    "docutils": "BSD-2-Clause",  # and public domain; the one file under the GPL is of an editor
    "numba": "BSD-2-Clause",
}
# NVIDIA's own terms, for its compiler and its libraries: extras `cuda` and `nccl`, which users ask for.
NVIDIA = re.compile(r"LicenseRef-NVIDIA-(Proprietary|SOFTWARE-LICENSE)")
NAMES = {
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "PSF": "PSF-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "new BSD": "BSD-3-Clause",
}


def canonical(name: str) -> str:
    """Return a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(name: str) -> str:
    """Return the licence that an installed distribution states, in SPDX's names; BSD if it says no more."""
    if canonical(name) in READ:
        return READ[canonical(name)]
    told = metadata.metadata(name)
    if told.get("License-Expression"):
        return told["License-Expression"]
    free = (told.get("License") or "").strip()
    classes = [
        line.rpartition(" :: ")[2]
        for line in told.get_all("Classifier") or []
        if line.startswith("License :: OSI Approved :: ")
    ]
    names = [NAMES.get(one, one) for one in ([free] if 0 < len(free) < 40 else classes)]
    return " AND ".join(names) or "unknown"


def allowed(name: str) -> bool:
    """Tell whether the licence of an installed distribution is in the lists."""
    told = licence(name)
    if NVIDIA.fullmatch(told) or told == OF_FILES:
        return True
    return is_free(told)


def is_free(expression: str) -> bool:
    """Tell whether licences of FREE satisfy an SPDX expression, in which AND binds more strongly than OR."""
    while inner := re.search(r"\(([^()]*)\)", expression):
        value = "0BSD" if is_free(inner[1]) else "unknown"
        expression = expression[: inner.start()] + value + expression[inner.end() :]
    return any(set(choice.split(" AND ")) <= FREE for choice in expression.split(" OR "))


def required(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield what a distribution requires here, with these extras."""
    for line in metadata.requires(name) or []:
        wanted = Requirement(line)
        if not wanted.marker or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield wanted


def brought() -> set[str]:
    """Return the names of all that comes with kvstore-train and those of its extras that are installed."""
    everything = frozenset(metadata.metadata(OURS).get_all("Provides-Extra") or [])
    seen, new = set(), {(OURS, everything)}
    while new:
        seen |= new
        found = {
            (canonical(wanted.name), frozenset(wanted.extras))
            for name, extras in new
            for wanted in required(name, extras)
        }
        new = {(name, extras) for name, extras in found - seen if is_installed(name)}
    return {name for name, _ in seen} - {OURS}


def is_installed(name: str) -> bool:
    """Tell whether that distribution is in this environment."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def main() -> int:
    """Print the licences, and return 1 if one of them is not allowed."""
    names = sorted(brought())
    for name in names:
        sys.stdout.write(f"{name}: {licence(name)}{'' if allowed(name) else '  <- is in no list'}\n")
    return int(not names or not all(allowed(name) for name in names))


if __name__ == "__main__":
    sys.exit(main())
