"""The kernels that each model launches on a GPU, and what the compiler makes of them; needs no GPU.

The engine itself runs on ``meta`` tensors for the GPU that ``VLA_ROS_GPU`` names, so tiles, types and constants are
those of a real run. Launches are recorded instead of compiled, then compiled with the assemblers in Triton's wheel.
"""

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver, jit

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from benchmarks.models.groot import published
from benchmarks.models.subject import OPENVLA_7B
from vla_ros_models.checkpoint_files import Fields
from vla_ros_models.engine.decoder import parallel, prefill, verify
from vla_ros_models.engine.flow import FlowModel, fill_cross, prefill_flow, sample
from vla_ros_models.engine.fused_ops import FusedOps
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.resample import make_pipeline
from vla_ros_models.engine.stream import Guide, KVCache
from vla_ros_models.engine.tile_configs import SIMULATE, Gpu, gpu_of, uses_wgmma
from vla_ros_models.engine.triton_ops import TritonOps, TritonTowerOps
from vla_ros_models.engine.weights import DecoderWeights, fuse
from vla_ros_models.groot import inference as groot
from vla_ros_models.groot.building import build_model, tensor_shapes, with_few_rows
from vla_ros_models.groot.loading import EACH, tensor_dtype
from vla_ros_models.oft.processing import OFTResize
from vla_ros_models.openvla.loading import build_shard
from vla_ros_models.openvla.network import OpenVLAModel, VisionEncoder
from vla_ros_models.pi.architecture import PUBLISHED
from vla_ros_models.pi.loading import parameter_dtype
from vla_ros_models.pi.network import build_empty as build_pi
from vla_ros_models.pi.network import make_flow
from vla_ros_models.smolvla.architecture import SMOLVLM2_CONFIG, read_architecture
from vla_ros_models.smolvla.network import EXPERT_UNIT, build_flow
from vla_ros_models.smolvla.network import build_empty as build_smolvla
from vla_ros_models.splitting import Shard

META = torch.device("meta")
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Launch:
    """One specialisation of a kernel."""

    kernel: Any  # ``triton.JITFunction``
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name with its tile."""
        names = list(self.signature)
        found = {names[path[0]]: value for path, value in self.constants.items()}
        shown = [f"{name} {found[name]}" for name in NAMED if found.get(name) not in (None, False)]
        shown += [f"warps {self.options['num_warps']}", f"stages {self.options['num_stages']}"]
        return f"{self.kernel.__name__.removesuffix('_kernel')} {' '.join(shown)}"


NAMED = ("KIND", "K", "N", "HEAD", "BLOCK_M", "TAIL_M", "BLOCK_N", "BLOCK_K", "FRAGMENTS", "K_GROUPS", "SPLITS",
         "SPLIT_K", "BLOCK_R", "BLOCK_C", "EVEN", "FP8", "QUANTIZE")  # fmt: skip
"""Constants that tell launches of one kernel apart."""


@dataclass(frozen=True)
class Made:
    """What the compiler made of a launch."""

    registers: int  # per thread
    spills: int  # bytes of stores
    shared: int  # bytes per program
    ptx: str
    ttgir: str
    serialized: int  # warnings that ``wgmma`` waits for each other
    cubin: bytes

    def fits(self, gpu: Gpu) -> bool:
        return self.shared <= gpu.limit and self.spills <= MOST_SPILLED


MOST_SPILLED = 64
"""Bytes that a kernel may spill."""


class _Described:
    """Stands for a tensor: kernels are specialised by its type and the alignment of its address."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype

    def data_ptr(self) -> int:
        return 0


class _Driver:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, gpu: Gpu) -> None:
        self.arch = 10 * gpu.capability[0] + gpu.capability[1]

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@contextmanager
def recorded(gpu: Gpu) -> Iterator[dict[str, Launch]]:
    """Record launches on ``gpu``; the dictionary's keys identify them."""
    found: dict[str, Launch] = {}
    run = jit.JITFunction.run

    def described(value: Any) -> Any:
        return _Described(value) if isinstance(value, Tensor) else value

    def launch(kernel: Any, *values: Any, grid: Any, warmup: bool, **named: Any) -> None:
        named = {name: described(value) for name, value in named.items()}
        run(kernel, *map(described, values), grid=grid, warmup=True, **named)

    def keep(kernel: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any,
             warmup: bool) -> None:  # fmt: skip
        found[f"{kernel.__name__} {key}"] = Launch(kernel, signature, constants, attributes, options.__dict__)

    for one in (gpu_of, uses_wgmma):
        one.cache_clear()
    with (
        mock.patch.dict(os.environ, {SIMULATE: gpu.name}),
        mock.patch.object(jit.JITFunction, "run", launch),
        mock.patch.object(jit.JITFunction, "_do_compile", keep),
        mock.patch.object(driver, "_active", _Driver(gpu)),
    ):
        yield found
    for one in (gpu_of, uses_wgmma):
        one.cache_clear()


def compiled(launch: Launch, gpu: Gpu) -> Made:
    """Compile a launch for ``gpu``."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    knobs = triton.knobs
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as said:
        knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log = True, True
        made = triton.compile(source, target=_Driver(gpu).get_current_target(), options=launch.options)
    log = said.getvalue()
    used, spilled = (
        int(found[1]) if (found := re.search(words, log)) else -1
        for words in (r"Used (\d+) reg", r"(\d+) bytes spill stores")
    )
    assert min(used, spilled) >= 0, log
    serialized = log.count("wgmma.mma_async instructions are serialized")
    return Made(
        used, spilled, made.metadata.shared, made.asm["ptx"], made.asm["ttgir"], serialized, made.asm["cubin"]
    )


def machine_code(made: Made) -> str:
    """Return the instructions, as ``cuobjdump -sass`` prints them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def moves(ttgir: str) -> int:
    """Count values that a kernel's loop moves between threads because operations want them in different places."""
    lines = iter(ttgir.splitlines())
    loop = next((line for line in lines if "scf.for" in line), None)
    if loop is None:
        return 0
    end = loop[: len(loop) - len(loop.lstrip())] + "}"
    body = takewhile(lambda line: not line.startswith(end), lines)
    return sum("ttg.convert_layout" in line for line in body)


def _typed(network: nn.Module, dtype_of: Callable[[str], torch.dtype] = lambda name: BF16) -> Any:
    for name, parameter in network.named_parameters():
        parameter.data = torch.empty(parameter.shape, dtype=dtype_of(name), device=META)
    return network.to(META)


def openvla(kind: str, gpus: int = 1) -> None:
    """Run decoding, drafts, prompts, and the bidirectional passes of OpenVLA-OFT, or of a shard."""
    sizes = replace(OPENVLA_7B, llm=replace(OPENVLA_7B.llm, layers=2))
    model = _typed(build_shard(OpenVLAModel, sizes, Shard(0, gpus)))
    weights, ops = fuse(model.language_model, kind), TritonOps(ranks=Ranks() if gpus > 1 else None)
    if gpus == 1 and kind == "none":
        VisionEncoder(model, TritonTowerOps())(torch.empty(1, 224, 224, 3, dtype=torch.uint8, device=META))
        for processor in (OFTResize(), OFTResize(camera_side=256)):
            frame = torch.empty(1, 480, 640, 3, dtype=torch.uint8, device=META)
            make_pipeline(processor, (480, 640), META)(frame)
    at = torch.empty(1, dtype=torch.int32, device=META)
    for rows in (1, 6, 12, 32, 64):
        tokens = torch.empty(1, rows, dtype=torch.int64, device=META)
        ops.choose(verify(weights, ops, KVCache.allocate(weights, 1, 512), tokens, at))
    for length in (288, 320):
        patches = torch.empty(1, 256, weights.shape.hidden_size, dtype=BF16, device=META)
        text = torch.empty(1, length - 256, dtype=torch.int64, device=META)
        prefill(weights, ops, KVCache.allocate(weights, 1, 512), patches, text, at, 7)
    for length in (608, 1152):
        _both_ways(weights, ops, length, at)


def _both_ways(weights: DecoderWeights, ops: TritonOps, length: int, at: Tensor) -> None:
    sequence = torch.empty(1, length, weights.shape.hidden_size, dtype=BF16, device=META)
    wanted = torch.empty(1, 56, dtype=torch.int64, device=META)
    parallel(weights, ops, KVCache.allocate(weights, 1, length, 1), sequence, wanted, at)


def pi(name: str, kind: str) -> None:
    """Run the prefix and flow steps of pi0 or pi0.5, for one robot and for several."""
    for horizon, batch in FLOWS:
        sizes = replace(PUBLISHED[name], horizon=horizon)
        sizes = replace(sizes, prefix=replace(sizes.prefix, layers=2), expert=replace(sizes.expert, layers=2))
        network = _typed(build_pi(sizes), lambda one: parameter_dtype(one, BF16))
        model = make_flow(network, 10, ops=TritonTowerOps(), quantization=kind)
        _flow(model, torch.empty(3, 224, 224, 3, dtype=torch.uint8, device=META), batch)


def smolvla() -> None:
    """Run the prefix and flow steps of SmolVLA's first layers, of which the second crosses."""
    for horizon, batch in FLOWS:
        config = Fields({"chunk_size": horizon, "num_vlm_layers": 2}, "published")
        sizes = read_architecture(config, Fields(SMOLVLM2_CONFIG, "published"))
        network = _typed(build_smolvla(sizes), lambda one: parameter_dtype(one, BF16))
        model = build_flow(network, 10, TritonTowerOps(), 64, unit=EXPERT_UNIT)
        _flow(model, torch.empty(2, *[sizes.vision.image_size] * 2, 3, device=META), batch)


FLOWS = (50, 1), (10, 1), (50, 4)
"""Actions in a chunk, and robots."""


def _flow(model: FlowModel, images: Tensor, batch: int) -> None:
    ops, tokens = TritonOps(), torch.empty(batch, 64, dtype=torch.int64, device=META)
    patches = model.encode(images).view(1, -1, model.prefix.shape.hidden_size).expand(batch, -1, -1)
    length = patches.shape[1] + tokens.shape[1]
    cache = KVCache.in_blocks(model.prefix, batch, length + model.suffix)
    cross = KVCache.in_blocks(model.expert, batch, length) if model.crosses else None
    lengths = torch.empty(batch, dtype=torch.int32, device=META)
    state = torch.empty(batch, model.state_dim, device=META)

    def ready(layer: int) -> None:
        fill_cross(model, ops, cache, cross, layer)

    prefill_flow(model, ops, cache, patches, tokens, lengths, ready, state)
    actions = torch.empty(batch, model.horizon, model.action_dim, device=META)
    given = torch.empty(batch, model.horizon, dtype=torch.int32, device=META)
    guide = Guide(actions, actions[..., 0], actions[:, 0, 0], given)
    sample(model, ops, cache, lengths, actions, state, guide, first=8, cross=cross)


def groot_n17(kind: str) -> None:
    """Run the first layers of each transformer."""
    sizes, tensors = published(tiny=False, horizon=40), {}
    for name, shape in tensor_shapes(sizes).items():
        size = (1, *shape[1:]) if EACH.match(name) else shape
        tensors[name] = torch.empty(size, dtype=tensor_dtype(name, BF16), device=META)
    with mock.patch.object(groot, "require_close"):  # there are no numbers to compare
        groot.check_passes(FusedOps(), with_few_rows(build_model(sizes, tensors, 4, kind)))


MODELS: dict[str, Callable[[], None]] = {
    "OpenVLA and OFT": lambda: openvla("none"),
    "OpenVLA and OFT, int8": lambda: openvla("int8"),
    "OpenVLA and OFT, 4 bits": lambda: openvla("int4"),
    "OpenVLA and OFT, FP8": lambda: openvla("fp8"),
    "pi0": lambda: pi("pi0", "none"),
    "pi0.5": lambda: pi("pi05", "none"),
    "pi0.5, FP8": lambda: pi("pi05", "fp8"),
    "SmolVLA": smolvla,
    "GR00T N1.7": lambda: groot_n17("none"),
    "GR00T N1.7, FP8": lambda: groot_n17("fp8"),
}


def launches(gpu: Gpu, model: str) -> dict[str, Launch]:
    """Return the launches of one of :data:`MODELS` on ``gpu``."""
    with recorded(gpu) as found, torch.no_grad():
        MODELS[model]()
    return found


def runs(gpu: Gpu, model: str) -> bool:
    """Return True if the model's format exists on ``gpu``."""
    return "FP8" not in model or gpu.capability >= (8, 9)
