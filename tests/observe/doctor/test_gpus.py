"""Drivers of GPUs from trees of files: none, one without the extra, one that does not answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from observation.checks import finding

from kvstore.observe.doctor import children, gpus

Tree = Callable[[Mapping[str, str]], Path]

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed\nGCC version: 12\n"
DRIVER = {"proc/driver/nvidia/version": VERSION}


def test_no_driver_is_fine(tree: Tree) -> None:
    assert finding(gpus.cuda, tree({})).level == "ok"
    assert finding(gpus.nccl, tree({})).level == "ok"


def test_a_driver_without_the_extra_is_a_warning(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "version_of", lambda name: None)
    found = finding(gpus.cuda, tree(DRIVER))
    assert found.level == "warning"
    assert "driver 580.82.07" in found.text
    assert found.cure == "pip install 'kvstore-train[cuda]'"


def answers(monkeypatch: pytest.MonkeyPatch, ran: children.ProgramEnd) -> None:
    monkeypatch.setattr(gpus, "version_of", lambda name: "13.0")
    monkeypatch.setattr(children, "run", lambda command, deadline: ran)


def test_a_driver_that_does_not_answer_is_an_error(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, children.ProgramEnd(1, "", "Traceback\nMissingBackendError: CUDA_ERROR_NO_DEVICE\n"))
    found = finding(gpus.cuda, tree(DRIVER))
    assert found.level == "error"
    assert "CUDA_ERROR_NO_DEVICE" in found.text
    assert "nvidia-smi" in found.cure


def test_gpus_are_counted(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, children.ProgramEnd(0, "4\n", ""))
    assert finding(gpus.cuda, tree(DRIVER)).text == "driver 580.82.07, number of GPUs: 4"


def test_nccl_that_does_not_load_is_a_warning(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, children.ProgramEnd(1, "", "RuntimeError: libnccl.so.2\n"))
    found = finding(gpus.nccl, tree(DRIVER))
    assert found.level == "warning"
    assert "libnccl.so.2" in found.text
    assert "kvstore-train[nccl]" in found.cure
    answers(monkeypatch, children.ProgramEnd(0, "22707\n", ""))
    assert finding(gpus.nccl, tree(DRIVER)).level == "ok"


def test_the_folder_of_kernels_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_CUDA_KERNELS", raising=False)
    assert finding(gpus.cuda_kernels).level == "ok"
    monkeypatch.setenv("KVSTORE_CUDA_KERNELS", str(tmp_path))
    assert finding(gpus.cuda_kernels).level == "ok"
    monkeypatch.setenv("KVSTORE_CUDA_KERNELS", str(tmp_path / "none"))
    found = finding(gpus.cuda_kernels)
    assert found.level == "error"
    assert str(tmp_path) not in found.text + found.cure
