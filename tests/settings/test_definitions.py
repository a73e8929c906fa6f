"""One table of settings: no default stands twice, one module reads variables, and none that is not in it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import kvstore as kv
from kvstore.settings import definitions, environment
from kvstore.settings.definitions import DEFAULTS, SETTINGS
from kvstore.settings.options import StoreConfig
from kvstore.settings.parameter_server import PsConfig
from kvstore.stores.parameter_server.scheduler.machine import SchedulerOptions
from kvstore.stores.parameter_server.server.machine import ServerOptions
from kvstore.stores.parameter_server.worker.state_machine.options import WorkerOptions

ROOT = Path(__file__).parents[2]
FILES = {
    str(path.relative_to(ROOT)): path
    for folder in ("kvstore", "kernels")
    for path in ROOT.glob(f"{folder}/**/*.py")
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}

# The modules that may read the environment, and why.
READERS = {
    "kvstore/settings/environment.py": "the one module that all others ask",
    "kernels/cuda/cache.py": "stands below the settings, and compiles ahead without them",
}
FUNCTIONS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

# Variables that are set for programs or left to them, and not read.
NOT_OURS = {"OMPI_MCA_hwloc_base_binding_policy"}
# What tests and benches set for processes of their own.
FOR_CHILDREN = {
    *(f"KVSTORE_BENCH_{name}" for name in ("CALLS", "HOST", "RANK", "REDIS_SOCKET", "SAMPLES")),
    *(f"KVSTORE_TEST_{name}" for name in ("AGAIN", "FAKE_BYTEPS", "FAKE_NCCL", "GREETING", "MARK")),
}
# What looks like a variable in the source.
VARIABLE = re.compile(
    r"(?:(?:KVSTORE|MXNET|DMLC|PS|SLURM|OMPI|PMI|PMIX|MPI|I_MPI|HOROVOD|TORCHELASTIC|BYTEPS|MASTER|XDG|MALLOC)_\w+"
    r"|(?:LOCAL_)?RANK|(?:LOCAL_)?WORLD_SIZE|PORT)"
)

# Where a default stands once more, and why.
TWICE = {
    ("kvstore/factory.py", "create"): "editors show it; test_typing compares it with StoreConfig",
    ("kvstore/errors.py", "role"): "of a lost process; no setting of this process",
    ("kvstore/ray.py", "timeout"): "the time that Ray may need to find room; no setting of the job",
}


def readers(tree: ast.Module) -> Iterator[int]:
    """Lines that look at the environment of the process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        else:
            continue
        if names & FUNCTIONS:
            yield node.lineno


def test_one_module_reads_the_environment() -> None:
    found = {name: [*readers(tree)] for name, tree in TREES.items()}
    assert {name for name, lines in found.items() if lines} == set(READERS), found


def test_no_compiled_module_reads_the_environment() -> None:
    sources = [
        path
        for folder in ("kvstore", "kernels")
        for ending in ("pyx", "pxi", "h")
        for path in ROOT.glob(f"{folder}/**/*.{ending}")
    ]
    assert [path.name for path in sources if re.search(r"\b(getenv|environ)\b", path.read_text())] == []


def in_table() -> set[str]:
    rows = {name for row in SETTINGS.values() for name in (row.variable, *(a.variable for a in row.aliases))}
    launchers = {
        name
        for row in definitions.LAUNCHERS
        for group in (row.signs, row.rank, row.size, row.local_rank, row.local_size, row.job, row.more)
        for name in group
    }
    return (rows | launchers | set(definitions.IGNORED) | set(definitions.IGNORED_ON_SERVERS)) - {""}


def literals(name: str) -> set[str]:
    return {
        node.value
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_variable_that_is_read_is_in_the_table() -> None:
    for name in FILES.keys() - {"kvstore/settings/definitions.py"}:
        found = {text for text in literals(name) if VARIABLE.fullmatch(text) and text[-1] != "_"}
        assert found - NOT_OURS - in_table() == set(), name


def test_every_row_is_used() -> None:
    used = {field.name for config in (StoreConfig, PsConfig) for field in fields(config)}
    for name in FILES.keys() - {"kvstore/settings/definitions.py"}:
        used |= literals(name) & in_table()
        used |= set(re.findall(r'\b(?:text_of\(|SETTINGS\[|DEFAULTS\[)"(\w+)"', FILES[name].read_text()))
    rows = (*definitions.STORES, *definitions.SERVERS, *definitions.PLACE)
    assert [row.name for row in rows if not {row.name, row.variable} & used] == []


def test_what_tests_and_benches_read_is_in_the_table() -> None:
    sources = [path for folder in ("tests", "bench") for path in ROOT.glob(f"{folder}/**/*.py")]
    text = "".join(path.read_text() for path in sources if path != Path(__file__))
    found = set(re.findall(r'"(KVSTORE_(?:TEST|BENCH|SIM|FUZZ)_\w+)"', text))
    assert found - FOR_CHILDREN == {row.variable for row in definitions.DEVELOPMENT}


def test_the_names_of_settings_differ() -> None:
    assert len(SETTINGS) == len(
        (*definitions.STORES, *definitions.SERVERS, *definitions.PLACE, *definitions.DEVELOPMENT)
    )


def stated(tree: ast.Module) -> Iterator[tuple[str, str, ast.expr]]:
    """Class or function, name and default of each field and argument that has one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value:
                    yield node.name, line.target.id, line.value
        elif isinstance(node, ast.FunctionDef):
            arguments, keywords = node.args.args, node.args.kwonlyargs
            late = arguments[len(arguments) - len(node.args.defaults) :]
            pairs = [
                *zip(late, node.args.defaults, strict=True),
                *zip(keywords, node.args.kw_defaults, strict=True),
            ]
            yield from ((node.name, argument.arg, value) for argument, value in pairs if value is not None)


def value_of(node: ast.expr) -> object:
    """Return the value of a text of a number or string; `32 << 20` too."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift):
        return ast.literal_eval(node.left) << ast.literal_eval(node.right)
    return node.value if isinstance(node, ast.Constant) else None


def test_no_default_stands_twice() -> None:
    """0, False and the empty text are no news, and may."""
    found = set()
    for path, tree in TREES.items():
        for owner, name, node in stated(tree):
            value = value_of(node)
            if value and value == DEFAULTS.get({"credit": "credit_bytes"}.get(name, name)):
                found.add((path, owner if (path, owner) in TWICE else name))
    assert found == set(TWICE)


@pytest.mark.parametrize("config", [StoreConfig(), PsConfig()])
def test_options_have_the_defaults_of_the_table(config: StoreConfig | PsConfig) -> None:
    names = [field.name for field in fields(config)]
    assert {name: getattr(config, name) for name in names} == {name: DEFAULTS[name] for name in names}
    for name in names:
        assert type(getattr(config, name)) is SETTINGS[name].kind, name


def test_keywords_of_create_are_the_options() -> None:
    assert [row.name for row in definitions.STORES if row.keyword] == [
        field.name for field in fields(StoreConfig)
    ]


def test_machines_have_the_defaults_of_the_table() -> None:
    roles = [SchedulerOptions("job", 1, 1), ServerOptions(), WorkerOptions()]
    assert {options.dead_after for options in roles} == {DEFAULTS["dead_after"]}
    assert (WorkerOptions().credit, WorkerOptions().resend) == (DEFAULTS["credit_bytes"], DEFAULTS["resend"])
    assert SchedulerOptions("job", 1, 1).timeout == DEFAULTS["timeout"]


def test_the_help_of_create_has_the_defaults_of_the_table() -> None:
    told = dict(re.findall(r"^ +(\w+) : \w+, default (.+)$", inspect.getdoc(kv.create) or "", re.MULTILINE))
    told["credit_bytes"] = told["credit_bytes"].replace(" MB", " << 20")
    values = {name: value_of(ast.parse(text.strip("`"), mode="eval").body) for name, text in told.items()}
    assert values == {row.name: row.default for row in definitions.STORES if row.keyword}


def test_the_text_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSTORE_TIMEOUT", "KVSTORE_DEAD_AFTER", "PS_HEARTBEAT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert environment.text_of("timeout") == "300.0"
    monkeypatch.setenv("PS_HEARTBEAT_TIMEOUT", "7")
    assert environment.text_of("dead_after") == "7"
    monkeypatch.setenv("KVSTORE_DEAD_AFTER", "")
    assert environment.text_of("dead_after") == "7"
    monkeypatch.setenv("KVSTORE_DEAD_AFTER", "9")
    assert environment.text_of("dead_after") == "9"


def test_variables_are_changed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_JOB", "before")
    monkeypatch.delenv("KVSTORE_RANK", raising=False)
    seen = environment.process_variables()
    with environment.changed_variables({"KVSTORE_JOB": None, "KVSTORE_RANK": "3"}):
        assert "KVSTORE_JOB" not in seen
        assert seen["KVSTORE_RANK"] == "3"
    assert seen["KVSTORE_JOB"] == "before"
    assert "KVSTORE_RANK" not in seen
    with pytest.raises(TypeError):
        seen["KVSTORE_RANK"] = "1"  # type: ignore[index]
