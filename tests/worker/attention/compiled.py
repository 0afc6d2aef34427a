"""Run by test_xformers_paged.py in its own process: compiles the kernels of a GPU's worker without a GPU.

A decode of Llama 8B's shape runs over tensors of the CPU. Each launch of a kernel compiles it for the types and
constants of its arguments. Prints one JSON object: bytes of machine code by kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from xformers.ops.fmha import triton_splitk
from xformers.ops.fmha._triton import splitk_kernels

from worker.attention.base import AttentionShape, ForwardBatch, Span
from worker.attention.kv_cache import KVCache
from worker.attention.xformers_paged import XformersPagedAttention
from worker.kernels import triton_ops as gpu_kernels
from worker.kernels import triton_sampling
from worker.kernels.cpu import Limits

H100 = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
sizes: dict[str, int] = {}


class Compiling:
    """Replaces a kernel, and compiles it when it is launched."""

    def __init__(self, kernel: JITFunction[Any], name: str) -> None:
        self.kernel = kernel
        self.name = name

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    def run(self, *given: Any, grid: object, warmup: bool, **named: Any) -> None:
        self.launch(*given, **named)

    def launch(self, *given: Any, **named: Any) -> None:
        arguments = dict(zip(self.kernel.arg_names, given, strict=False)) | named
        options = {name: arguments.pop(name) for name in ("num_warps", "num_stages") if name in arguments}
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            value = arguments[parameter.name]
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            else:
                signature[parameter.name] = type_of(value)
                if not isinstance(value, int) or value % 16 == 0:
                    attributes[(place,)] = [["tt.divisibility", 16]] if not isinstance(value, float) else []
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        sizes[self.name] = len(triton.compile(source, target=H100, options=options).asm["cubin"])


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if value < 1 << 31 else "i64"


def main() -> None:
    gpu_kernels._rotate = Compiling(gpu_kernels._rotate, "_rotate")
    gpu_kernels._store = Compiling(gpu_kernels._store, "_store")
    splitk_kernels._splitK_reduce = Compiling(splitk_kernels._splitK_reduce, "_splitK_reduce")
    unrolled = splitk_kernels.unroll_varargs(splitk_kernels._fwd_kernel_splitK, N=1)
    heuristics = splitk_kernels._get_splitk_kernel(1)
    heuristics.fn = Compiling(unrolled, "_fwd_kernel_splitK")
    triton_splitk.FwOp.get_kernel = classmethod(lambda cls: heuristics)
    torch.cuda.get_device_capability = lambda *device: (9, 0)

    shape = AttentionShape(1, 32, 8, 128, 128**-0.5)
    cache = KVCache(shape, 4, 16, torch.bfloat16, torch.device("cpu"))
    attention = XformersPagedAttention(shape, cache)
    fused = torch.zeros(2, 48 * 128, dtype=torch.bfloat16)
    positions = slots = torch.zeros(2, dtype=torch.int64)
    heads = gpu_kernels.rotate(fused, positions, torch.zeros(50, 2, 128, dtype=torch.bfloat16), 40)
    value = fused[:, 40 * 128 :].view(2, 8, 128)
    gpu_kernels.store(
        heads[:, 32:], value, slots, cache.keys[0].flatten(0, 1), cache.values[0].flatten(0, 1), heads[:, :32]
    )
    plan = attention.plan([Span(3, 1, [1]), Span(5, 1, [2])])
    attention.attend(0, heads[:, :32], heads[:, 32:], value, ForwardBatch(positions, positions, slots, plan))
    triton_sampling._draw = Compiling(triton_sampling._draw, "_draw")
    triton_sampling.draw(torch.zeros(2, 128_256), [Limits(0.0, 0, 0, 0, 1.0, 1.0)] * 2, [0, 0])
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
