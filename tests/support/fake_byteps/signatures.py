"""Signatures of BytePS, read from its source without running it; kept in tests/data/byteps.json.

python tests/support/fake_byteps/signatures.py FOLDER_OF_THE_UNPACKED_SDIST
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

RECORDED = Path(__file__).parents[2] / "data/byteps.json"
#: The functions that the store calls.
NAMES = ("init", "rank", "size", "local_rank", "declare", "poll", "synchronize", "push_pull_async_inplace")


def read(folder: Path) -> dict[str, list[str]]:
    """Name of each function of byteps.torch.ops -> its parameters, with their defaults."""
    found: dict[str, list[str]] = {}
    for path in ("byteps/common/__init__.py", "byteps/torch/ops.py"):
        found.update(read_one(folder / path))
    return found


def read_one(path: Path) -> dict[str, list[str]]:
    """As `read`, of one file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in NAMES]
    return {node.name: _parameters(node.args) for node in functions}


def _parameters(arguments: ast.arguments) -> list[str]:
    names = [one.arg for one in arguments.args if one.arg != "self"]
    defaults = [ast.unparse(one) for one in arguments.defaults]
    plain = len(names) - len(defaults)
    return names[:plain] + [f"{n}={d}" for n, d in zip(names[plain:], defaults, strict=True)]


def exported(folder: Path) -> list[str]:
    """Names that byteps.torch takes from its operations."""
    tree = ast.parse((folder / "byteps/torch/__init__.py").read_text())
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "byteps.torch.ops"]
    return sorted(alias.asname or alias.name for node in nodes for alias in node.names)


def main() -> None:
    folder = Path(sys.argv[1])
    print(json.dumps({"functions": read(folder), "exported": exported(folder)}, indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
