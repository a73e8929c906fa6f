"""The programs of docs/examples run as a user runs them, on small data, with the promised results.

Those that need a framework run in the Python that a variable names (CONTRIBUTING.md), or here.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import pace
import pytest
from launched import Job, until
from nightly import nightly_unless

from kvstore.launch.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SRUN = ROOT / "tests" / "launch" / "stand_in_for_srun.py"
SCHEMA = ROOT / "tests" / "data" / "kubernetes" / "jobset.schema.json"
# Where two unbuffered workers share a pipe, as under torchrun, the lines of both may precede their ends.
TRAINED = re.compile(r"worker (\d+) of (\d+): loss ([\d.]+) -> ([\d.]+), weights ([\da-f.]+)")
PATIENCE = 300  # seconds of an idle machine: frameworks take long to import
pytestmark = pytest.mark.timeout(1500)


def python_with(variable: str, *modules: str) -> str:
    """Return a Python that has these modules; skip where there is none."""
    named = os.environ.get(variable, "")
    if not named and not all(importlib.util.find_spec(module) for module in modules):
        pytest.skip(f"install {' and '.join(modules)}, or name a python that has them in {variable}")
    return named or sys.executable


class Place(Job):
    """An empty folder in which commands run, whose processes and files are known afterwards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        kept = {
            name: text
            for name, text in self.environment.items()
            if not name.startswith("KVSTORE_") or name == "KVSTORE_TEST_MARK"
        }
        self.environment = {**kept, "OMP_NUM_THREADS": "1", "KVSTORE_TIMEOUT": pace.variable(200)}

    def begin(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def says(self, *command: str, **variables: str) -> str:
        """Run a command, which must end well; return its output."""
        with self.begin(*command, **variables) as process:
            try:
                out, _ = process.communicate(timeout=pace.seconds(PATIENCE))
            finally:
                process.kill()
        assert process.returncode == 0, out
        return out


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A place in which nothing is left: no process, nothing in memory, no file but the test's own."""
    before = jobs.names_in_memory()
    made = Place(tmp_path)
    yield made
    try:
        until(lambda: not made.alive())
    finally:
        for pid in made.alive():
            os.kill(pid, signal.SIGKILL)
    assert jobs.names_in_memory() <= before
    assert not list(tmp_path.glob("*kvstore*"))


def kvstore_run(python: str, *words: str) -> list[str]:
    return [python, "-m", "kvstore.launch", "run", *words]


def program(name: str, **options: object) -> list[str]:
    return [str(EXAMPLES / name), *(f"--{option}={value}" for option, value in options.items())]


def weights(printed: str, workers: int) -> str:
    """Weights that all workers have at the end, after losses that have fallen."""
    found = TRAINED.findall(printed)
    assert sorted(int(rank) for rank, *_ in found) == list(range(workers)), printed
    assert {int(size) for _, size, *_ in found} == {workers}
    for _, _, first, last, _ in found:
        assert float(last) < 0.7 * float(first), printed
    (same,) = {text for *_, text in found}
    return str(same)


# ------------------------------------------------------------------------------------------ numpy, frameworks

SMALL = {"steps": 150, "points": 400, "width": 16}
IMAGES = {"steps": 40, "images": 600, "width": 16}


@pytest.mark.parametrize("words", [["-n", "4"], ["-n", "2", "-s", "2"]], ids=" ".join)
def test_numpy_workers(place: Place, words: list[str]) -> None:
    kind = "dist_sync" if "-s" in words else "shared"
    said = place.says(*kvstore_run(sys.executable, *words, *program("numpy_workers.py", store=kind, **SMALL)))
    weights(said, int(words[1]))


@pytest.fixture(scope="module")
def torch_python() -> str:
    return python_with("KVSTORE_TEST_TORCH", "torch")


def test_pytorch_ddp_with_the_hook_trains_as_without(place: Place, torch_python: str) -> None:
    torchrun = [torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    totals = [
        float(weights(place.says(*torchrun, *program(f"pytorch_ddp_{name}.py", **IMAGES)), 2))
        for name in ("before", "after")
    ]
    assert totals[0] == pytest.approx(totals[1], rel=1e-3)


def test_pytorch_optimizer_on_two_workers_trains_as_on_one(place: Place, torch_python: str) -> None:
    one = place.says(torch_python, *program("pytorch_optimizer_before.py", **IMAGES))
    two = place.says(*kvstore_run(torch_python, "-n", "2", *program("pytorch_optimizer_after.py", **IMAGES)))
    assert float(weights(one, 1)) == pytest.approx(float(weights(two, 2)), rel=1e-3)


LIBRARIES = {
    "lightning_ddp.py": ("lightning", {"steps": 40, "images": 600, "width": 16}),
    "accelerate_ddp.py": ("accelerate", {"steps": 40, "images": 600, "width": 16}),
    "hf_trainer.py": ("transformers", {"steps": 60, "images": 600, "batch": 16, "width": 16}),
}


def python_with_library(python: str, module: str) -> str:
    """Skip if the Python does not have the module."""
    asked = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([python, "-c", asked], check=False).returncode:
        pytest.skip(f"the Python of KVSTORE_TEST_TORCH does not have {module}")
    return python


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("launcher", ["kvstore run", "torchrun"])
def test_libraries_that_train_by_ddp(place: Place, torch_python: str, name: str, launcher: str) -> None:
    """The store has averaged the gradients: its timeline has the keys of the hook."""
    module, options = LIBRARIES[name]
    python = python_with_library(torch_python, module)
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    start = torchrun if launcher == "torchrun" else kvstore_run(python, "-n", "2")
    weights(place.says(*start, *program(name, **options), KVSTORE_TIMELINE="calls"), 2)
    told = place.says(python, "-m", "kvstore.launch", "timeline", "--json", "calls")
    report = json.loads(told)
    assert report["notes"] == []
    assert {key["key"] for key in report["keys"]} & {"ddp.0", "(several keys)"}


def test_torchrun_on_two_machines(place: Place, torch_python: str) -> None:
    """Both are this machine; the script finds its commands by PATH."""
    commands = {"torchrun": "torch.distributed.run", "kvstore": "kvstore.launch"}
    (place.folder / "bin").mkdir()
    for command, module in commands.items():
        path = place.folder / "bin" / command
        path.write_text(f'#!/bin/sh\nexec {torch_python} -m {module} "$@"\n')
        path.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "PATH": f"{place.folder / 'bin'}:{os.environ['PATH']}", "FIRST": "127.0.0.1", "RDZV_PORT": str(port),
        "WORKERS": "2", "DMLC_INTERFACE": "lo", "KVSTORE_JOB": str(place.folder), "FOLDER": str(place.folder),
        "PROGRAM": str(EXAMPLES / "numpy_workers.py"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["bash", str(EXAMPLES / "torchrun_nodes.sh"), *program("", **SMALL)[1:]]
    machines = [place.begin(*command, **variables) for _ in range(2)]
    said = [machine.communicate(timeout=pace.seconds(PATIENCE))[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    weights("".join(said), 4)
    assert not (place.folder / "meeting").exists()


def test_torch_mp_spawn(place: Place, torch_python: str) -> None:
    weights(place.says(torch_python, *program("torch_mp_spawn.py", workers=2, **IMAGES)), 2)


def test_jax_optax(place: Place) -> None:
    python = python_with("KVSTORE_TEST_JAX", "jax", "optax")
    weights(place.says(*kvstore_run(python, "-n", "2", *program("jax_optax.py", **SMALL))), 2)


@pytest.mark.parametrize("words", [["-n", "2"], ["-n", "2", "-s", "1"]], ids=" ".join)
def test_gluon_trainer(place: Place, words: list[str]) -> None:
    python = python_with("KVSTORE_TEST_MXNET", "mxnet")
    kind = "dist_sync" if "-s" in words else "shared"
    weights(place.says(*kvstore_run(python, *words, *program("gluon_trainer.py", store=kind, **SMALL))), 2)


def test_files_of_mxnet(place: Place) -> None:
    said = place.says(python_with("KVSTORE_TEST_MXNET", "mxnet"), *program("mxnet_files.py"))
    (difference,) = re.findall(r"the weights of both runs differ by (\S+)", said)
    assert float(difference) < 1e-6


def test_ray_train(place: Place) -> None:
    python = python_with("KVSTORE_TEST_RAY", "ray")
    options = {"workers": 2, "servers": 1, "steps": 50, "points": 500}
    with tempfile.TemporaryDirectory(prefix="ray") as own:  # a short path: there are sockets in it
        variables = {"RAY_TMPDIR": own, "RAY_AUTH_MODE": "disabled"}  # else a token stays in the home
        weights(place.says(python, *program("ray_train.py", **options), **variables), 2)


# ------------------------------------------------------------------------------------------------ recommender

TABLE = {"every": 10, "steps": 300, "rows": 3000, "width": 8, "batch": 128}
LAST = re.compile(r"worker (\d): step 300, popular rows (\w{8})$", re.MULTILINE)


def recommender(folder: Path) -> list[str]:
    options = program("recommender.py", checkpoints=folder, **TABLE)
    return kvstore_run(sys.executable, "-n", "2", "-s", "2", *options)


def rows(printed: str) -> str:
    found = LAST.findall(printed)
    assert sorted(rank for rank, _ in found) == ["0", "1"], printed
    (same,) = {text for _, text in found}
    return str(same)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final result of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    said = Place(folder).says(*recommender(folder / "checkpoints"))
    losses = [float(text) for text in re.findall(r"step \d+: loss ([\d.]+)", said)]
    assert len(losses) == 30
    assert losses[-1] < 0.7 * losses[0]
    return rows(said)


def parts(place: Place, name: str) -> list[int]:
    """Processes of the job that are a worker, or a server."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in place.alive()}
    word, where = ("/recommender.py", 1) if name == "a worker" else ("server", 3)
    return [pid for pid, command in commands.items() if "".join(command[where : where + 1]).endswith(word)]


def killed(place: Place, folder: Path, victim: Callable[[int], int]) -> str:
    """Run until the second checkpoint is there, kill -9, and return the output until then."""
    with place.begin(*recommender(folder)) as process:
        assert process.stdout is not None
        said, deadline = "", threading.Timer(pace.seconds(PATIENCE), process.kill)
        deadline.start()
        try:
            for line in process.stdout:
                said += line
                if "checkpoint step-00000020" in line:
                    os.kill(victim(process.pid), signal.SIGKILL)
            process.wait(pace.seconds(60))
        finally:
            deadline.cancel()
            process.kill()
    assert process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), said
    until(lambda: not place.alive())
    return said


@pytest.mark.parametrize(
    "whom", nightly_unless(lambda whom: whom == "kvstore run", ["a worker", "a server", "kvstore run"])
)
def test_recommender_goes_on_from_its_checkpoint(place: Place, undisturbed: str, whom: str) -> None:
    folder = place.folder / "checkpoints"

    def victim(launcher: int) -> int:
        return launcher if whom == "kvstore run" else max(parts(place, whom))

    said = killed(place, folder, victim)
    assert "begins at step 0 with 2 workers and a table of 3,000 x 8" in said
    assert not LAST.search(said), "it was over before it was killed"
    last = max(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    assert 20 <= last < 300
    (folder / "part").mkdir(exist_ok=True)
    (folder / "part" / "values.safetensors").write_bytes(b"a checkpoint that was never finished")
    again = place.says(*recommender(folder))
    assert f"begins at step {last} with" in again
    assert rows(again) == undisturbed
    assert {path.name for path in folder.iterdir()} == {"step-00000290", "step-00000300"}
    fewer = place.says(*recommender(folder), "--steps=200")
    assert rows(fewer) == undisturbed, "it says the step of the checkpoint"


# --------------------------------------------------------------------------------------- Slurm and Kubernetes


def test_slurm_script(place: Place) -> None:
    """Bash takes it, and with an srun that starts its tasks here it trains."""
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    tools = place.folder / "venv" / "bin"
    tools.mkdir(parents=True)
    srun = f'shift\nexec {sys.executable} {SRUN} "127.0.0.[2-3]" 2 "$@"'
    kvstore = f'exec {sys.executable} -m kvstore.launch "$@"'
    for name, text in {"srun": srun, "kvstore": kvstore}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    (tools / "activate").write_text(f"PATH={tools}:$PATH\n")
    (place.folder / "numpy_workers.py").write_text((EXAMPLES / "numpy_workers.py").read_text())
    variables = {"SLURM_SUBMIT_DIR": str(place.folder), "VENV": str(tools.parent), "DMLC_INTERFACE": "lo"}
    (_, *options) = program("numpy_workers.py", **SMALL)
    weights(place.says("bash", str(script), *options, **variables), 4)
    assert {path.name for path in place.folder.iterdir()} == {"venv", "numpy_workers.py"}


def test_slurm_script_asks_for_what_it_says() -> None:
    text = (EXAMPLES / "slurm.sh").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    nodes, tasks = int(asked["nodes"]), int(asked["nodes"]) * int(asked["ntasks-per-node"])
    (servers,) = re.findall(r"--servers (\d+)", text)
    assert f": {nodes} hosts, {tasks} workers, {servers} servers." in text.splitlines()[1]


def documents() -> list[Any]:
    return list(pytest.importorskip("yaml").safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


def test_kubernetes_takes_the_job() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    claim, job = documents()
    for document, kind in ((job["spec"], "BatchJobSpec"), (claim["spec"], "PersistentVolumeClaimSpec")):
        wanted = {**schema["$defs"][kind], "$defs": schema["$defs"]}
        jsonschema.Draft202012Validator(wanted).validate(document)
    assert [claim["apiVersion"], job["apiVersion"]] == ["v1", "batch/v1"]
    pod = job["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["checkpoints"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == set(volumes)
    head = (EXAMPLES / "kubernetes.yaml").read_text().partition("apiVersion")[0]
    assert f"configmap {volumes['program']['configMap']['name']} --from-file=recommender.py" in head
    assert f"job/{job['metadata']['name']}" in head


def test_the_container_of_the_job_trains(place: Place) -> None:
    """Its command, with the folders of this test for those of the pod, and a small table."""
    (container,) = documents()[1]["spec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    there = {"/program": EXAMPLES, "/checkpoints": place.folder / "checkpoints"}
    assert set(mounts) == set(there)
    words = [*container["command"], *container["args"]]
    for path, here in there.items():
        words = [re.sub(rf"^{path}(?=/|$)", str(here), word) for word in words]
    assert words[0] == "kvstore"
    small = [f"--{name}={value}" for name, value in TABLE.items()]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    said = place.says(sys.executable, "-m", "kvstore.launch", *words[1:], *small, **variables)
    assert len(LAST.findall(said)) == 4


# ----------------------------------------------------------------------------------------------- the notebook


def cells() -> list[str]:
    """Code cells, magics as plain Python."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    return [plain("".join(cell["source"])) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def plain(source: str) -> str:
    first, _, rest = source.partition("\n")
    if first.startswith("%%writefile "):
        return f"open({first.split()[1]!r}, 'w').write({rest!r})"
    shell = r"import subprocess; subprocess.run(f'\1', shell=True, check=True)"
    return re.sub(r"^!(.*)$", shell, source, flags=re.MULTILINE)


def said_by_the_notebook(text: str) -> bool:
    return text.count("4 workers: loss 150.38 -> ") == 2 and "weights are equal: [" in text


def test_cells_of_the_notebook_run_in_a_process(place: Place) -> None:
    """Without Jupyter: `python -c` has no file either that other processes could import."""
    assert said_by_the_notebook(place.says(sys.executable, "-c", "\n".join(cells())))


def test_the_notebook_runs_in_jupyter(place: Place) -> None:
    python = python_with("KVSTORE_TEST_JUPYTER", "nbclient", "ipykernel")
    (place.folder / "notebook.ipynb").write_text((EXAMPLES / "notebook.ipynb").read_text())
    variables = {
        "IPYTHONDIR": str(place.folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(place.folder / "run"),
    }
    execute = "from nbclient.cli import main; main()"
    place.says(python, "-c", execute, "notebook.ipynb", "--output=done.ipynb", **variables)
    done = json.loads((place.folder / "done.ipynb").read_text())
    outputs = [output for cell in done["cells"] for output in cell.get("outputs", [])]
    assert said_by_the_notebook("".join("".join(output.get("text", "")) for output in outputs))


# ------------------------------------------------------------------------------------------------ messages


def table() -> dict[str, str]:
    """Files in the table of the page, and how each is run."""
    found = re.findall(
        r"^\| [^|]+ \| \[([\w.]+)\]\(\1\) \| `([^`]+)` \|$", (EXAMPLES / "index.md").read_text(), re.MULTILINE
    )
    return dict(found)


def test_the_table_has_every_file() -> None:
    assert set(table()) == {path.name for path in EXAMPLES.iterdir() if path.suffix not in ("", ".md")}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.*") if path.suffix != ".md"))
def test_each_program_is_short_and_says_how_it_is_run(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    if not name.endswith(".ipynb"):
        assert len(text.splitlines()) <= 120
        head = text.split('"""')[1] if name.endswith(".py") else text
        assert table()[name] in " ".join(head.split())


def commands() -> list[str]:
    """The statements of the programs and the table are typed for kvstore."""
    heads = [path.read_text().split('"""')[1] for path in sorted(EXAMPLES.glob("*.py"))]
    lines = [line.strip() for head in heads for line in head.splitlines()] + list(table().values())
    return sorted({line.partition(" #")[0] for line in lines if line.startswith("kvstore ")})


@pytest.mark.parametrize("line", commands())
def test_what_is_typed_is_understood(line: str) -> None:
    name, *words = shlex.split(line)[1:]
    with main.commands[name].make_context(name, words) as context:
        assert (EXAMPLES / context.params["program"]).is_file()


# ------------------------------------------------------------------------------------------ before and after


def code(name: str) -> list[str]:
    """Lines of a program after its docstring, which says how it is run."""
    return (EXAMPLES / name).read_text().split('"""\n', 1)[1].splitlines()


def changes(kind: str) -> list[str]:
    """Lines of the diff, with one line around each change, and an empty one between two places."""
    lines = difflib.unified_diff(
        code(f"pytorch_{kind}_before.py"), code(f"pytorch_{kind}_after.py"), n=1, lineterm=""
    )
    return ["" if line.startswith("@@") else line.rstrip() for line in list(lines)[3:]]


@pytest.mark.parametrize(("kind", "added", "removed"), [("ddp", 5, 0), ("optimizer", 7, 1)])
def test_the_page_shows_the_changes_and_counts_them(kind: str, added: int, removed: int) -> None:
    lines = changes(kind)
    assert sum(bool(re.match(r"\+.", line)) for line in lines) == added
    assert sum(bool(re.match(r"-.", line)) for line in lines) == removed
    page = (EXAMPLES / "index.md").read_text()
    counted = f"**{added} lines more, {removed} fewer**"
    (shown,) = re.findall(
        rf"pytorch_{kind}_after.py\).*?{re.escape(counted)}.*?```diff\n(.*?)\n```", page, re.DOTALL
    )
    assert shown.splitlines() == lines
