"""The manifest in docs/kubernetes: JobSet takes it, and its pods, played by processes here, train.

No cluster is asked. That JobSet gives pods these names and annotations is what its documentation says.
"""

from __future__ import annotations

import copy
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pace
import pytest

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "docs" / "kubernetes" / "jobset.yaml"
SCHEMA = ROOT / "tests" / "data" / "kubernetes" / "jobset.schema.json"
PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"


def manifest() -> Any:
    return pytest.importorskip("yaml").safe_load(MANIFEST.read_text())


def complaints(document: Any) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]


def test_jobset_takes_the_manifest() -> None:
    assert complaints(manifest()) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "sucessPolicy"], {}),
        (["kind"], "Job"),
        (["spec", "network", "enableDNSHostnames"], "true"),
        (["spec", "replicatedJobs", 0, "template", "spec", "completion"], 1),
        (["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers"], {}),
        (["spec", "replicatedJobs", 2, "template", "spec", "template", "spec", "containers", 0, "envs"], []),
        (["spec", "replicatedJobs", 1, "name"], None),
    ],
)
def test_and_would_not_take_one_with_a_slip(path: list[Any], value: object) -> None:
    document = copy.deepcopy(manifest())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert len(complaints(document)) == 1


@dataclass(frozen=True)
class Pod:
    """One pod of one replicated job."""

    job: str
    index: int
    spec: Any

    @property
    def container(self) -> Any:
        (container,) = self.spec["template"]["spec"]["containers"]
        return container

    def environment(self) -> dict[str, str]:
        """Variables as a kubelet makes them: later ones may name earlier ones."""
        fields = {
            "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']": "0",
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(self.index),
            "status.podIP": "127.0.0.1",
        }
        found: dict[str, str] = {}
        for one in self.container["env"]:
            text = one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            found[one["name"]] = expanded(text, found)
        return found

    def keys(self) -> str:
        """Name in the Secret of the file that is mounted where the pod looks for its keys."""
        environment = self.environment()
        (mount,) = self.container["volumeMounts"]
        assert mount["mountPath"] == environment["KVSTORE_KEYS_FILE"]
        assert mount["readOnly"]
        (volume,) = self.spec["template"]["spec"]["volumes"]
        assert volume["name"] == mount["name"]
        assert volume["secret"]["defaultMode"] & 0o077 == 0
        return expanded(mount.get("subPathExpr") or mount["subPath"], environment)


def expanded(text: str, known: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], text)


def pods() -> Iterator[Pod]:
    for job in manifest()["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        assert spec["completionMode"] == "Indexed"
        assert spec["completions"] == spec["parallelism"]
        assert job["replicas"] == 1
        for index in range(spec["completions"]):
            yield Pod(job["name"], index, spec)


def test_numbers_and_names_agree_all_over_the_manifest() -> None:
    document, all_pods = manifest(), list(pods())
    name = document["metadata"]["name"]
    counts = {job: sum(pod.job == job for pod in all_pods) for job in ("scheduler", "server", "worker")}
    assert counts["scheduler"] == 1
    for pod in all_pods:
        environment = pod.environment()
        assert environment["KVSTORE_SCHEDULER"] == f"tcp://{name}-scheduler-0-0.{name}:9091"
        for job, variable in (("worker", "KVSTORE_NUM_WORKERS"), ("server", "KVSTORE_NUM_SERVERS")):
            assert environment.get(variable, str(counts[job])) == str(counts[job])
    assert document["spec"]["successPolicy"]["targetReplicatedJobs"] == ["worker"]
    assert document["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def test_the_page_makes_the_keys_that_the_manifest_wants() -> None:
    text = PAGE.read_text()
    (command,) = re.findall(r"kvstore keys -n (\d+) -s (\d+) keys$", text, re.MULTILINE)
    counts = [sum(pod.job == job for pod in pods()) for job in ("worker", "server")]
    assert [int(number) for number in command] == counts
    (secret,) = {pod.spec["template"]["spec"]["volumes"][0]["secret"]["secretName"] for pod in pods()}
    assert f"kubectl create secret generic {secret} --from-file=keys" in text
    assert "kubectl apply -f docs/kubernetes/jobset.yaml" in text


TRAIN = """
import numpy as np
import kvstore as kv
out = np.empty(3, np.float32)
with kv.create("dist_sync") as store:
    store.init("w", np.zeros(3, np.float32))
    store.pushpull("w", np.full(3, store.rank + 1, np.float32), out=out)
    print(store.rank, store.num_workers, *out)
"""


def test_processes_with_these_variables_train(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    kvstore = [sys.executable, "-m", "kvstore.launch"]
    subprocess.run([*kvstore, "keys", "-n", "4", "-s", "2", str(keys)], check=True, capture_output=True)
    (tmp_path / "train.py").write_text(TRAIN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    commands = {"kvstore": kvstore, "python": [sys.executable]}
    processes = []
    try:
        for pod in pods():
            environment = pod.environment() | {
                "KVSTORE_SCHEDULER": address,
                "KVSTORE_KEYS_FILE": str(keys / pod.keys()),
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            }
            program, *arguments = pod.container["command"]
            processes.append(
                subprocess.Popen(
                    [*commands[program], *arguments],
                    env=environment,
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        results = [
            (*process.communicate(timeout=pace.seconds(90)), process.returncode) for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [(code, err) for _, err, code in results] == [(0, "")] * 7
    assert sorted(out for out, *_ in results[3:]) == [f"{rank} 4 10.0 10.0 10.0\n" for rank in range(4)]
