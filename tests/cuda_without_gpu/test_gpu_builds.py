"""Every program that `objective.npn_compile` compiles is built for an H100 here, without a GPU.

A process of its own makes torch and Triton believe in a GPU that is not there, collects the programs of traced steps,
lowers them with Inductor to Triton's language, and compiles that for sm_90.
"""

import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils._pytree as pytree
from packaging.version import Version
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cuda_without_gpu.kernel_trace import KernelTrace
from tests.cuda_without_gpu.test_kernel_budget import npn_step
from tests.launch import run

# The kernels of each formula: one, but for the one that computes [R] weights and multiplies [R, d] features by them.
KERNELS = {"_adagrad": 1, "_squares": 1, "_exponentials": 1, "_sums": 1, "normalizer_of_mean": 1, "_exp_sum": 1,
           "_log_sum": 1, "_pull": 2}  # fmt: skip
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 * 2**20,
    gcnArchName="", is_integrated=0, max_threads_per_block=1024,
)  # fmt: skip
LACKS_COMPILER = torch.version.cuda is None or importlib.util.find_spec("triton") is None


@pytest.mark.slow  # lowers and builds 16 programs
@pytest.mark.skipif(LACKS_COMPILER, reason="this build of torch comes without Triton's compiler for CUDA")
@pytest.mark.skipif(Version(torch.__version__) < Version("2.12.dev0"), reason="older torch lowers only with a driver")
def test_all_programs_of_a_compiled_network_build_for_an_h100():
    """In both modes of `npn_update`, with the paper's sizes."""
    built = [json.loads(line) for line in run("tests.cuda_without_gpu.test_gpu_builds").stdout.splitlines()]
    assert {name for name, _, _ in built} == KERNELS.keys()
    for name, shapes, binaries in built:
        assert len(binaries) == KERNELS[name], (name, shapes)
        assert all(size > 1000 for size in binaries), (name, shapes, binaries)
    shapes = {tuple(shapes[0]) for name, shapes, _ in built if name == "_exponentials"}
    assert shapes == {(5120, 4096), (5120, 512)}, "products with all prototypes, and with a rank's own"


def programs():
    """By name, shapes and precisions: every formula that compiled networks run, as a function of tensors alone."""
    found: dict[tuple[object, ...], tuple[Callable[..., Any], list[Tensor]]] = {}

    def record(_, formula, *arguments):
        for kind in {type(a) for a in arguments if is_dataclass(a)} - pytree.SUPPORTED_NODES.keys():
            pytree.register_dataclass(kind)
        leaves, spec = pytree.tree_flatten(arguments)

        def program(*tensors):
            given = iter(tensors)
            filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return formula(*pytree.tree_unflatten(filled, spec))

        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found.setdefault((formula.__name__, *((tuple(t.shape), t.dtype) for t in tensors)), (program, tensors))
        return formula(*arguments)

    with mock.patch.object(KernelTrace, "fused", record):
        npn_step(ranks=1, batch=5120, update="replicated", compiled=True)
        npn_step(ranks=8, batch=5120, update="prototypes", compiled=True)
    return found


def pretend_gpu():
    """Answer what Inductor and Triton ask about the GPU."""
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    for where, answers in (
        (torch.cuda, {"get_device_properties": H100, "current_device": 0, "get_device_capability": (9, 0),
                      "is_available": True, "_lazy_init": None}),
        (CudaInterface, {"get_compute_capability": 90, "is_available": True, "get_device_properties": H100,
                         "current_device": 0, "raise_if_triton_unavailable": None}),
        (CudaInterface.Worker, {"get_device_properties": H100, "current_device": 0}),
    ):  # fmt: skip
        for name, value in answers.items():
            setattr(where, name, lambda *_, _value=value, **__: _value)
    limits = {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_device_interface=lambda: torch.cuda,
            utils=SimpleNamespace(get_device_properties=lambda device: limits),
        )
    )


def lower(program, tensors):
    """Inductor's output code for a program."""
    import torch._inductor.config as settings
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode()
    on_meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
    with mode:
        inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in tensors]
    with torch.no_grad():
        graph = make_fx(program, decomposition_table=select_decomp_table(), tracing_mode="real")(*on_meta)
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        graph.recompile()
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
        return str(lowering.codegen()[0].value)


def build(source, folder):
    """Compile every Triton kernel of Inductor's output code for sm_90; the sizes of the binaries in bytes."""
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    triton_helpers.set_driver_to_gpu = lambda: None
    sizes = []
    for name, body in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", source, re.S):
        path = folder / f"{name}.py"  # Triton reads the source of its kernels
        path.write_text(body)
        spec: Any = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        signature, config = kernel.triton_meta["signature"], kernel.configs[0]
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


if __name__ == "__main__":
    wanted = programs()
    pretend_gpu()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": temporary, "TRITON_CACHE_DIR": temporary}
        for (name, *_), (program, tensors) in wanted.items():
            sizes = build(lower(program, tensors), Path(temporary))
            print(json.dumps([name, [list(t.shape) for t in tensors], sizes]), flush=True)
