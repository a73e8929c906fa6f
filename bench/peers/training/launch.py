"""Starts the workers that train."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.cases.dist import Entry
from bench.cases.training import Curves
from bench.peers.dist.hosts import LINK
from bench.peers.dist.launch import HostsGroup
from bench.peers.group.launch import Launch, start
from bench.peers.shared.launch import SharedGroup
from bench.runner import compiled
from kvstore.observe.bench.worker_group import PeerFailure, end_process

_PATIENCE = 900.0  # seconds for all trainings with compared losses


class OneHost(SharedGroup):
    """Two processes with torch, gloo and `shared` stores, which train in the requested way."""

    fresh = ("torch",)  # the memory of a model is freed with the process

    def codes(self) -> tuple[Path, Path]:
        return super().codes()[0], compiled.build(Path(__file__).with_name("average.c"))

    def column(self, variant: str) -> str:
        """Return the variant: each way is a column."""
        return variant


class TwoHosts(HostsGroup):
    """The same on two hosts, with a server on each."""

    fresh = ("torch",)
    entry = Entry("ours", "workers that train")

    def column(self, variant: str) -> str:
        """Return the variant: each way is a column."""
        return variant

    def plan(self, address: str, folder: str) -> Launch:
        return self._on_hosts(self._worker(address), folder)

    def losses(self, wanted: Curves) -> list[dict[str, Any]]:
        """Run the program of `curves.py` in a separate job, and return its losses.

        Raises
        ------
        PeerFailure
            It failed, or did not end within 15 minutes.
        """
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
            target = Path(folder) / "losses"
            worker = self.setting.command("training.curves", target, json.dumps(wanted.to_json()))
            process = start(self._on_hosts(worker, folder).ranks[0], folder)
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                raise PeerFailure(f"{wanted.name}: no end in {_PATIENCE:g} s") from None
            finally:
                end_process(process, 0.0)
            if not target.exists():
                raise PeerFailure(f"{wanted.name} failed; see its messages above")
            found: list[dict[str, Any]] = json.loads(target.read_text())
            return found

    def _on_hosts(self, worker: list[str], folder: str) -> Launch:
        told = ("OMP_NUM_THREADS=1", f"GLOO_SOCKET_IFNAME={LINK}")
        return self._ours(worker, folder, *(word for one in told for word in ("--export", one)))
