"""A compiled kernel, and the file that keeps it: a line of JSON, the code, and the SHA-256 of both."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field

_MAGIC = "kvstore cubin 2"
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class KernelCubin:
    """Code of one kernel for one architecture.

    Attributes
    ----------
    name : str
        `Spec.name`.
    arch : str
        ``"sm_90"`` and the like.
    entry : str
        Name of the kernel in the code.
    code : bytes
        The code that the driver loads.
    registers, stack, spill_stores, spill_loads : int
        Per thread, in bytes but for the first, as the assembler says.
    source : str
        Hash of the kernels' text (`cache.source_key`).
    toolchain : str
        The versions of the compilers.
    """

    name: str
    arch: str
    entry: str
    code: bytes = field(repr=False)
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    source: str = ""
    toolchain: str = ""

    def to_bytes(self) -> bytes:
        """Content of its file."""
        facts = asdict(self)
        code: bytes = facts.pop("code")
        whole = json.dumps(facts | {"format": _MAGIC}, sort_keys=True).encode() + b"\n" + code
        return whole + hashlib.sha256(whole).digest()

    @classmethod
    def from_bytes(cls, content: bytes) -> KernelCubin:
        """Read the content of a file. ValueError if it is not whole, or not one."""
        whole, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        line, _, code = whole.partition(b"\n")
        try:
            facts = json.loads(line)
            if facts.pop("format") == _MAGIC and digest == hashlib.sha256(whole).digest():
                return cls(code=code, **facts)
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        raise ValueError("no whole file of a CUDA kernel")
