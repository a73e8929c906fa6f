"""CuPy: one element-wise kernel over all values of a key."""

from __future__ import annotations

import importlib
from typing import Any

from bench.peers.base import Unsupported
from bench.peers.device.base import Data, Peer, Way

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
