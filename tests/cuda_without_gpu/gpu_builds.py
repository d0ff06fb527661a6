"""Builds every program that `objective.npn_compile` compiles for an H100 on a machine without a GPU, and reports each.

Run as a process of its own (`python -m tests.cuda_without_gpu.gpu_builds`), because it makes torch and Triton believe
in a GPU that is not there. The programs are those of traced training steps. Inductor lowers each to Triton source, and
Triton compiles that for sm_90.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cuda_without_gpu.programs import npn_step

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 * 2**20,
    gcnArchName="", is_integrated=0, max_threads_per_block=1024,
)  # fmt: skip


@dataclass(frozen=True)
class Formula:
    """A formula with the arguments, taken apart, whose shapes it is compiled for."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: pytree.TreeSpec

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def __call__(self, *tensors: Tensor) -> Any:
        """The formula of these tensors in place of its own."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self.function(*pytree.tree_unflatten(leaves, self.spec))


def formulas() -> list[Formula]:
    """Every formula and shape that compiled networks run, in both modes, with products in bf16."""
    found: dict[tuple[object, ...], Formula] = {}

    def record(function: Callable[..., Any], *arguments: Any) -> Any:
        for kind in {type(a) for a in arguments if is_dataclass(a)} - pytree.SUPPORTED_NODES.keys():
            pytree.register_dataclass(kind)
        formula = Formula(function, *pytree.tree_flatten(arguments))
        key = function.__name__, *((tuple(t.shape), t.dtype) for t in formula.tensors)
        found.setdefault(key, formula)
        return function(*arguments)

    for update, ranks in (("replicated", 1), ("prototypes", 8)):
        with mock.patch("tests.cuda_without_gpu.kernel_trace.KernelTrace.fused", lambda trace, *given: record(*given)):
            npn_step(ranks=ranks, batch=5120, update=update, compiled=True)
    return list(found.values())


def pretend_gpu() -> None:
    """Answer what Inductor and Triton ask about the GPU."""
    import torch.utils._triton as support
    from torch._dynamo import device_interface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    for name, value in {
        "get_device_properties": H100, "current_device": 0, "device_count": 1, "get_device_capability": (9, 0),
        "get_device_name": H100.name, "is_available": True, "synchronize": None, "is_bf16_supported": True,
        "_lazy_init": None,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    interface = device_interface.CudaInterface
    answers = {"get_compute_capability": 90, "is_available": True, "get_device_properties": H100, "current_device": 0,
               "is_triton_capable": True, "raise_if_triton_unavailable": None}  # fmt: skip
    for name, value in answers.items():
        setattr(interface, name, staticmethod(lambda *_, _value=value, **__: _value))
    interface.Worker.get_device_properties = staticmethod(lambda *_, **__: H100)
    interface.Worker.current_device = staticmethod(lambda: 0)
    for function in vars(support).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    limits = {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_device_interface=lambda: torch.cuda,
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            utils=SimpleNamespace(get_device_properties=lambda device: limits),
            binary_ext="cubin",
        )
    )


def lower(formula: Formula) -> str:
    """Inductor's output code for a formula."""
    import torch._inductor.config as settings
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode()
    on_meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in formula.tensors]
    with torch.no_grad():
        graph = make_fx(formula, decomposition_table=select_decomp_table(), tracing_mode="real")(*on_meta)
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    graph.recompile()
    with mode:
        inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in on_meta]
    with torch.no_grad():
        FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*inputs)
    lowering = GraphLowering(graph, example_inputs=inputs, shape_env=None)
    with (
        settings.patch({"deterministic": True, "compile_threads": 1}),
        V.set_fake_mode(mode),
        V.set_graph_handler(lowering),
        V.set_extern_kernel_nodes([]),
        V.set_debug_handler(DebugContext()),
    ):
        lowering.run(*inputs)
        code: Any = lowering.codegen()[0]
    return str(getattr(code, "value", code))


def build(source: str, folder: Path) -> list[int]:
    """Compile every Triton kernel of Inductor's output code for sm_90; the sizes of the binaries in bytes."""
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    triton_helpers.set_driver_to_gpu = lambda: None
    sizes = []
    for name, body in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", source, re.S):
        path = folder / f"{name}.py"
        path.write_text(body)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        signature, config = dict(kernel.triton_meta["signature"]), kernel.configs[0]
        constants = {(i,): config.kwargs[key] for i, key in enumerate(signature) if key in config.kwargs}
        types = {key: "constexpr" if key in config.kwargs else kind for key, kind in signature.items()}
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
        compiled = triton.compile(
            ASTSource(kernel.fn, types, constants, aligned),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        )
        sizes.append(len(compiled.asm["cubin"]))
    return sizes


def main() -> None:
    wanted = formulas()
    pretend_gpu()
    with tempfile.TemporaryDirectory() as folder:
        for formula in wanted:
            shapes = [list(t.shape) for t in formula.tensors]
            source = lower(formula)
            report = {"formula": formula.function.__name__, "shapes": shapes, "binaries": build(source, Path(folder))}
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
