"""The statements of the hosted workflows hold: they cannot run here, but name scripts, Pythons and steps."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import kvstore

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it there

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
FILES = {path.stem: path for path in (GITHUB / "workflows").iterdir()}
FLOWS: dict[str, dict[Any, Any]] = {name: yaml.safe_load(path.read_text()) for name, path in FILES.items()}
JOBS = {(flow, name): job for flow in FLOWS for name, job in FLOWS[flow]["jobs"].items()}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]

# The only jobs that may write anything, or prove their identity.
MAY = {
    ("release", "publish"): {"id-token": "write"},
    ("release", "announce"): {"contents": "write"},
    ("docs", "publish"): {"pages": "write", "id-token": "write"},
}


def steps(key: str) -> Iterator[tuple[str, str]]:
    """Workflow of each step (or job) that has this key, and the value."""
    for (flow, _), job in JOBS.items():
        for step in (job, *job.get("steps", ())):
            if key in step:
                yield flow, step[key]


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("github-workflows", sorted(FILES.values())),
        ("dependabot", [GITHUB / "dependabot.yml"]),
        ("github-issue-forms", [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "idea.yml")]),
    ],
)
def test_files_of_the_forge_fit_their_schema(schema: str, paths: list[Path]) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_workflows_call_is_there() -> None:
    scripts = {word for _, run in steps("run") for word in run.split() if word.startswith(".ci/")}
    assert {".ci/run", ".ci/least", ".ci/dependencies", ".ci/notes"} <= scripts
    for script in scripts:
        assert (ROOT / script).is_file(), script
        assert script.endswith(".py") or (ROOT / script).stat().st_mode & 0o111, f"{script} cannot be run"
    called = [ROOT / uses for _, uses in steps("uses") if uses.startswith("./")]
    assert called == [FILES["ci"]]
    for script in (".ci/run", ".ci/pythons", ".ci/least", ".ci/dependencies"):
        for helper in re.findall(r"\.ci/\w+(?:\.\w+)?", (ROOT / script).read_text()):
            assert (ROOT / helper).is_file(), f"{script} names {helper}"


def test_actions_are_pinned_by_commit_and_say_their_version() -> None:
    """A tag can be moved; a comment gives readers, and Dependabot, the version."""
    lines = [line for path in FILES.values() for line in path.read_text().splitlines() if "uses:" in line]
    others = [line.partition("uses: ")[2] for line in lines if "uses: ./" not in line]
    assert len(others) > 10
    unpinned = [line for line in others if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)]
    assert unpinned == []
    assert len({line.partition("@")[0] for line in others}) == len(set(others)), "one version of an action"


def test_jobs_have_a_limit_and_no_more_rights_than_they_need() -> None:
    for flow in FLOWS.values():
        assert flow["permissions"] in ({}, {"contents": "read"})
        assert flow["concurrency"]
    for name, job in JOBS.items():
        assert job.get("permissions", {"contents": "read"}) == MAY.get(name, {"contents": "read"}), name
        assert "timeout-minutes" in job or "uses" in job, f"{name} could run for six hours"
    assert MAY.keys() <= JOBS.keys()


def test_checkouts_leave_no_token_behind() -> None:
    checkouts = [step for job in JOBS.values() for step in job.get("steps", ()) if "checkout" in str(step)]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def versions(words: list[str]) -> list[tuple[int, ...]]:
    return sorted(tuple(int(part) for part in word.split(".")) for word in words)


def test_pythons_are_those_of_the_metadata() -> None:
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    matrix = JOBS["ci", "tests"]["strategy"]["matrix"]
    assert versions(matrix["python"]) == versions(classifiers)
    oldest, newest = versions(classifiers)[0], versions(classifiers)[-1]
    assert PROJECT["requires-python"] == ">={}.{}".format(*oldest)

    untried = [row["python"] for row in matrix.get("include", ()) if row["untried"]]
    assert all(version > newest for version in versions(untried))
    tried = JOBS["release", "try"]["strategy"]["matrix"]["python"]
    assert versions(tried) == versions([*matrix["python"], *untried])

    single = {
        step["with"]["python-version"] for step in JOBS["ci", "least"]["steps"] if "python" in str(step)
    }
    assert single == {"{}.{}".format(*oldest)}


def test_every_wheel_that_is_built_is_tried_and_published() -> None:
    machines = {row["machine"] for row in JOBS["release", "wheels"]["strategy"]["matrix"]["include"]}
    assert set(JOBS["release", "try"]["strategy"]["matrix"]["machine"]) == machines == {"x86_64", "aarch64"}
    pythons = JOBS["release", "try"]["strategy"]["matrix"]["python"]
    built = [pattern.partition("-")[0] for pattern in PYPROJECT["tool"]["cibuildwheel"]["build"]]
    assert built == [f"cp{python.replace('.', '')}" for python in pythons]

    made = {"tests", "wheels", "sdist", "try"}
    assert set(JOBS["release", "publish"]["needs"]) == made
    assert JOBS["release", "announce"]["needs"] == "publish"
    assert all(JOBS["release", name]["needs"] == "version" for name in made - {"try"})


def test_the_published_site_is_built_as_ci_builds_it() -> None:
    def build(text: str) -> str:
        (command,) = re.findall(r"sphinx-build\"? (.+)", text)
        return command

    ours = build((ROOT / ".ci/run").read_text())
    assert build("\n".join(run for flow, run in steps("run") if flow == "docs")) == ours
    folder = ours.split()[-1]
    assert [given["path"] for flow, given in steps("with") if flow == "docs" and "path" in given] == [folder]


def section(heading: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    return found


@pytest.mark.parametrize(("flow", "heading"), [("ci", "CI"), ("release", "Release")])
def test_contributors_are_told_of_every_job_in_its_order(flow: str, heading: str) -> None:
    told = [word for word in re.findall(r"`(\w+)`", section(heading)) if (flow, word) in JOBS]
    assert list(dict.fromkeys(told)) == list(FLOWS[flow]["jobs"])


def stand_in(folder: Path, version: str) -> Path:
    """A command that calls itself a Python of this version, and can do nothing."""
    command = folder / f"python{version}"
    command.write_text("#!/bin/sh\nexit 1\n")
    command.chmod(0o755)
    return command


def other_pythons(folder: Path, *except_for: str) -> subprocess.CompletedProcess[str]:
    """Let the script look for Pythons in this folder, which has the commands of a system besides."""
    for command in ("bash", "dirname", "grep", "sed", "awk", "sort"):
        (folder / command).symlink_to(shutil.which(command) or "")
    environment = {"PATH": str(folder)}
    command = ["bash", str(ROOT / ".ci/pythons"), *except_for]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_each_supported_python_that_is_not_here_is_named(tmp_path: Path) -> None:
    supported = JOBS["release", "try"]["strategy"]["matrix"]["python"]
    done = other_pythons(tmp_path, "3.11")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"NOT TESTED: Python (3\.\d+)", done.stdout) == [v for v in supported if v != "3.11"]


def test_an_oldest_python_that_is_here_must_be_used(tmp_path: Path) -> None:
    offered = stand_in(tmp_path, "3.10")
    done = other_pythons(tmp_path)
    assert done.returncode == 1
    assert str(offered) in done.stdout
    assert "oldest supported Python is offered here" in done.stderr


def test_another_python_that_cannot_build_is_named(tmp_path: Path) -> None:
    offered = stand_in(tmp_path, "3.12")
    done = other_pythons(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(offered) in done.stdout


def test_frameworks_are_pinned_once_for_each_python() -> None:
    lines = [line.partition(" #")[0] for line in (ROOT / ".ci/frameworks.txt").read_text().splitlines()]
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for version in JOBS["release", "try"]["strategy"]["matrix"]["python"]:
        here = [
            one for one in wanted if one.marker is None or one.marker.evaluate({"python_version": version})
        ]
        assert sorted(one.name for one in here) == ["jax", "optax", "torch"], version
        assert all([part.operator for part in one.specifier] == ["=="] for one in here)


def closure(extras: set[str]) -> set[str]:
    """These extras, and those of our own that they contain."""
    lines = " ".join(line for extra in extras for line in EXTRAS[extra] if line.startswith(PROJECT["name"]))
    inner = {word for group in re.findall(r"\[([^]]+)\]", lines) for word in group.split(",")}
    return extras if inner <= extras else closure(extras | inner)


def test_least_versions_and_licences_are_of_every_extra() -> None:
    (least,) = re.findall(r"^extras=\((.*?)\)", (ROOT / ".ci/least").read_text(), re.MULTILINE)
    assert closure(set(least.split())) == set(EXTRAS) - {"nccl"}
    (all_of_them,) = re.findall(r"'\.\[(.+)\]'", (ROOT / ".ci/dependencies").read_text())
    assert closure(set(all_of_them.split(","))) == set(EXTRAS)


def pins(*arguments: str) -> set[str]:
    command = [sys.executable, ROOT / ".ci/pins.py", *arguments]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines())


def test_pins_are_the_least_versions_that_are_stated() -> None:
    stated = {line.replace(">=", "==") for line in PROJECT["dependencies"]}
    assert pins("run") == stated
    whole = pins("run", *EXTRAS)
    assert stated <= whole
    assert len({pin.partition("==")[0] for pin in whole}) == len(whole) > 25
    assert len(pins("build")) == 3


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A tree of version 1.2.0, as far as the script that prints its notes looks."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/notes", tmp_path / ".ci/notes")
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore/__init__.py").write_text('"""A store."""\n\n__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n- later\n\n## [1.2.0] - 2031-05-06\n\n- new\n\n"
        "### Fixed\n\n- right\n\n## [1.1.0] - 2031-01-02\n\n- old\n"
    )
    return tmp_path


def notes(tree: Path, tag: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tree / ".ci/notes", tag], capture_output=True, text=True, check=False)


def test_the_notes_of_a_release_are_its_part_of_the_changelog(released: Path) -> None:
    done = notes(released, "v1.2.0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "- new\n\n### Fixed\n\n- right"


def test_a_tag_of_another_version_is_refused(released: Path) -> None:
    done = notes(released, "v1.2.1")
    assert done.returncode == 1
    assert "v1.2.1" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("heading", ["## [1.2.0]", "## [1.2.0] - soon", "## [1.2.0b1] - 2031-05-06"])
def test_a_version_without_a_dated_heading_is_refused(released: Path, heading: str) -> None:
    changelog = released / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## [1.2.0] - 2031-05-06", heading))
    done = notes(released, "v1.2.0")
    assert done.returncode == 1
    assert "no heading" in done.stderr


def test_the_version_of_this_tree_is_found_by_that_script() -> None:
    done = notes(ROOT, "v0.0.0")
    assert f'"{kvstore.__version__}"' in done.stderr
