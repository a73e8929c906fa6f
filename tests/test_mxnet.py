"""Our stores under MXNet 1.9.1, where an environment that has it is named; its own stores give the weights.

KVSTORE_TEST_MXNET is a Python that can import both: MXNet wants NumPy before 2.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pace
import pytest

TESTS = Path(__file__).parent
PYTHON = os.environ.get("KVSTORE_TEST_MXNET", "")
needs_mxnet = pytest.mark.skipif(
    not PYTHON, reason="set KVSTORE_TEST_MXNET to a Python that has mxnet 1.9.1 and numpy<2"
)
pytestmark = pytest.mark.timeout(1300)
#: Bodies that need one process.
ALONE = (
    "names", "arrays", "updaters", "local", "trainer_updates", "settings_change", "schedules", "own_rules",
    "float16", "sparse_verbs", "sparse_rules", "sparse_gluon", "compression", "resume",
    "foreign_files", "module", "batch_sizes", "errors", "every_error", "shown_states",
    "lagging", "stale", "empty_table", "unfrozen", "refused_changes",
)  # fmt: skip


def run(*command: str) -> None:
    """Run Python with MXNet; it must end well."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    ended = subprocess.run(
        [PYTHON, *command],
        env={**variables, "OMP_NUM_THREADS": "1", "KVSTORE_TIMEOUT": "600"},
        capture_output=True,
        text=True,
        timeout=pace.seconds(1200),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "well" in ended.stdout


def body(*arguments: str) -> None:
    run(str(TESTS / "bodies" / "frameworks" / "procs_mxnet.py"), *arguments)


def job(servers: int, *arguments: str) -> None:
    launch = ["-m", "kvstore.launch", "run", "-n", "2", *(["-s", str(servers)] if servers else [])]
    run(*launch, str(TESTS / "bodies" / "frameworks" / "procs_mxnet.py"), *arguments)


@needs_mxnet
@pytest.mark.parametrize("function", ALONE)
def test_in_one_process(function: str) -> None:
    body(function)


@needs_mxnet
@pytest.mark.parametrize("kind", ["local", "shared"])
def test_every_setting_of_every_optimizer(kind: str) -> None:
    body("every_setting", kind)


ROLE = """
import os
os.environ["DMLC_ROLE"] = "server"  # which makes MXNet serve, when it is imported
import kvstore.mxnet
assert os.environ["DMLC_ROLE"] == "server"
print("well")
"""


@needs_mxnet
def test_an_import_starts_no_server() -> None:
    run("-c", ROLE)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of MXNet's own store."""
    folder = tmp_path_factory.mktemp("weights")
    body("leave", str(folder), "sgd", "adam", "lamb", "adagrad")
    return folder


@needs_mxnet
@pytest.mark.parametrize("kind", ["shared", "local"])
def test_two_workers_of_one_machine(weights: Path, kind: str) -> None:
    job(0, "worker", str(weights), kind, "sgd", "adam", "lamb", "adagrad")


@needs_mxnet
@pytest.mark.parametrize("servers", [1, 2])
def test_two_workers_with_servers(weights: Path, servers: int) -> None:
    job(servers, "worker", str(weights), "dist_sync", "sgd", "adam", "lamb")


@needs_mxnet
@pytest.mark.parametrize(("servers", "kind"), [(0, "shared"), (1, "dist_sync")])
def test_two_workers_resume(weights: Path, servers: int, kind: str) -> None:
    job(servers, "worker_resumes", str(weights), kind)


@needs_mxnet
@pytest.mark.parametrize(("servers", "kind"), [(0, "shared"), (1, "dist_sync")])
def test_what_a_job_cannot_run(servers: int, kind: str) -> None:
    job(servers, "refused", kind)


STAND_IN = """
import sys
from types import ModuleType, SimpleNamespace

import numpy as np

nothing = type("Nothing", (), {})
mxnet = ModuleType("mxnet")
mxnet.base = SimpleNamespace(MXNetError=type("MXNetError", (RuntimeError,), {}))
mxnet.kvstore = SimpleNamespace(KVStore=nothing, KVStoreBase=SimpleNamespace(register=lambda kind: kind))
mxnet.nd = SimpleNamespace(sparse=SimpleNamespace(RowSparseNDArray=nothing))
mxnet.optimizer = SimpleNamespace(Optimizer=nothing, Updater=nothing)
sys.modules["mxnet"] = mxnet

import kvstore as kv
import kvstore.mxnet as kv_mxnet

def raised(kind, call, *arguments):
    try:
        call(*arguments)
    except mxnet.base.MXNetError as error:
        assert isinstance(error, kind) and type(error).__name__ == kind.__name__, error
    else:
        raise AssertionError(kind)

with kv_mxnet.create("local") as store:
    store.init("w", np.ones(3))
    raised(kv.KeyNotFoundError, store.push, "v", np.ones(3))
    raised(kv.ShapeError, store.pushpull, "w", np.ones(4))
    raised(kv.ConfigError, store.is_capable, "magic")
    raised(kv.ArgumentError, store.set_optimizer, "sgd")
    raised(kv.ConfigError, kv_mxnet.create, "locla")
raised(kv.ClosedError, store.pull, "w", np.ones(3))
print("well")
"""


def test_errors_are_both_on_a_stand_in_for_mxnets_names() -> None:
    """Everywhere; with the real MXNet `errors` and `every_error` say more."""
    ended = subprocess.run(
        [sys.executable, "-c", STAND_IN],
        capture_output=True,
        text=True,
        timeout=pace.seconds(1200),
        check=False,
    )
    assert ended.stdout == "well\n", ended.stderr


def test_without_mxnet_the_front_door_says_what_to_install() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['mxnet'] = None\nimport kvstore.mxnet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "MissingBackendError" in ended.stderr
    assert "pip install 'mxnet==1.9.1'" in ended.stderr
