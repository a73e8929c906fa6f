"""Rivals on a GPU: PyTorch in all its ways, a kernel of CuPy, a kernel of Triton."""

from __future__ import annotations

import importlib
from typing import Any

from bench.peers.base import Unsupported
from bench.peers.device.base import LEARNING_RATE, MOMENTUM, Data, Peer, Way


class Torch(Peer):
    """Several ways, each with PyTorch's name."""

    name = "torch"

    def __init__(self) -> None:
        self._held: list[Any] = []

    def ways(self, data: Data) -> dict[str, Way]:
        op = data.case.op
        if op == "sum":
            return self._sums(data)
        if op == "update":
            return self._updates(data)
        raise Unsupported("PyTorch has no such operation")

    def _sums(self, data: Data) -> dict[str, Way]:
        torch, case = data.torch, data.case

        def chain(i: int) -> None:
            for values, out in zip(data.values[i], data.outs[i], strict=True):
                torch.add(values[0], values[1], out=out)
                for value in values[2:]:
                    out.add_(value)

        def stacked(i: int) -> None:
            for values, out in zip(data.values[i], data.outs[i], strict=True):
                torch.sum(torch.stack(values), 0, out=out)

        if len(case.sizes) == 1:
            return {"torch add chain": chain, "torch stack + sum": stacked}
        return {"torch foreach": self._foreach(data), "torch key by key": chain}

    @staticmethod
    def _foreach(data: Data) -> Way:
        torch = data.torch
        columns = [data.columns(i) for i in range(data.sets)]

        def foreach(i: int) -> None:
            first, *rest = columns[i]
            torch._foreach_copy_(data.outs[i], first)
            for column in rest:
                torch._foreach_add_(data.outs[i], column)

        return foreach

    def _updates(self, data: Data) -> dict[str, Way]:
        torch = data.torch
        sums = self._foreach(data)
        steps = []
        for i in range(data.sets):
            weights = [values[0].clone().requires_grad_() for values in data.values[i]]
            for weight, out in zip(weights, data.outs[i], strict=True):
                weight.grad = out
            made = torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
            steps.append(made.step)
            self._held.append(weights)

        def update(i: int) -> None:
            sums(i)
            steps[i]()

        return {"torch foreach + fused SGD": update}

    def results(self, data: Data) -> list[Any] | None:
        return self._held[0] if data.case.op == "update" else data.outs[0]

    def release(self) -> None:
        self._held = []


_RAW = r"""
extern "C" __global__ void sum{k}({parameters}, float4 *o, long long n) {{
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += step) {{
        float4 a = x0[i];
        {additions}
        o[i] = a;
    }}
}}
"""


class CuPy(Peer):
    """ElementwiseKernel, and a RawKernel that loads 16 bytes at a time."""

    name = "cupy"

    def ways(self, data: Data) -> dict[str, Way]:
        case = data.case
        if data.device != "cuda" or case.op != "sum" or case.dtype != "float32" or len(case.sizes) > 1:
            raise Unsupported("sums of one float32 key on a GPU only")
        try:
            cupy = importlib.import_module("cupy")
        except ImportError as error:
            raise Unsupported(str(error)) from error
        views = [[cupy.from_dlpack(value) for value in values[0]] for values in data.values]
        outs = [cupy.from_dlpack(own[0]) for own in data.outs]
        stream = cupy.cuda.ExternalStream(data.torch.cuda.current_stream().cuda_stream)
        names = [f"x{j}" for j in range(case.k)]
        kernel = cupy.ElementwiseKernel(
            ", ".join(f"T {name}" for name in names), "T o", f"o = {' + '.join(names)}", f"sum{case.k}"
        )
        found: dict[str, Way] = {"CuPy ElementwiseKernel": _on(stream, lambda i: kernel(*views[i], outs[i]))}
        if case.sizes[0] % 4 == 0:
            raw = cupy.RawKernel(_source(case.k), f"sum{case.k}")
            blocks = 8 * cupy.cuda.Device().attributes["MultiProcessorCount"]
            count = case.sizes[0] // 4
            found["CuPy RawKernel float4"] = _on(
                stream, lambda i: raw((blocks,), (256,), (*views[i], outs[i], count))
            )
        return found


def _source(k: int) -> str:
    parameters = ", ".join(f"const float4 *x{j}" for j in range(k))
    lines = [
        f"{{ float4 b = x{j}[i]; a.x += b.x; a.y += b.y; a.z += b.z; a.w += b.w; }}" for j in range(1, k)
    ]
    return _RAW.format(k=k, parameters=parameters, additions="\n        ".join(lines))


def _on(stream: Any, work: Way) -> Way:
    def run(i: int) -> None:
        with stream:
            work(i)

    return run


_BLOCKS = (1024, 4096)


class Triton(Peer):
    """Blocks of two sizes."""

    name = "triton"

    def ways(self, data: Data) -> dict[str, Way]:
        case = data.case
        if data.device != "cuda" or case.op != "sum" or len(case.sizes) > 1 or case.k not in (2, 4, 8):
            raise Unsupported("sums of one key of 2, 4 or 8 values on a GPU only")
        try:
            triton: Any = importlib.import_module("triton")
            kernels: Any = importlib.import_module(".triton_kernels", __package__)
        except ImportError as error:
            raise Unsupported(str(error)) from error
        (size,) = case.sizes
        kernel = getattr(kernels, f"sum{case.k}")

        def way(block: int) -> Way:
            grid = (triton.cdiv(size, block),)
            return lambda i: kernel[grid](data.outs[i][0], *data.values[i][0], size, BLOCK=block, num_warps=8)

        return {f"Triton, blocks of {block}": way(block) for block in _BLOCKS}
