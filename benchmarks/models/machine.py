"""Measures this machine's bandwidth and arithmetic rate, and derives a lower bound for one inference."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vla_ros_models.engine.weights import DecoderWeights, Matrix
from vla_ros_models.openvla.network import OpenVLAModel


@dataclass(frozen=True)
class Machine:
    """Measured limits of a machine."""

    name: str  # device
    bytes_per_s: float  # of a large copy, bytes read plus bytes written
    flops_per_s: float  # of a large matrix product of the model's type, or of FP8 weights, on random data


def measure_machine(device: torch.device, dtype: torch.dtype, quantization: str = "none") -> Machine:
    """Measure both limits; takes under a second on a GPU, a few on a CPU."""
    cuda = device.type == "cuda"
    count = 2**30 if cuda else 2**26
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = median_seconds(device, lambda: target.copy_(source))
    side = 8192 if cuda else 512
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    if cuda and quantization == "fp8":
        scale = torch.ones((), device=device)
        rows, columns = (one.to(torch.float8_e4m3fn) for one in (left, right))
        multiply = partial(torch._scaled_mm, rows, columns.t(), scale, scale, out_dtype=dtype)
    else:
        multiply = partial(torch.matmul, left, right)
    product = median_seconds(device, multiply)
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    return Machine(name, 2 * count / copy, 2 * side**3 / product)


Stage = tuple[float, float, int]
"""Weights, their bytes, and rows that each is multiplied with."""


def floor_ms(machine: Machine, stages: Iterable[Stage]) -> float:
    """Return a lower bound in milliseconds: the larger of arithmetic and bytes, stage by stage."""
    seconds = (
        max(2 * count * rows / machine.flops_per_s, size / machine.bytes_per_s) for count, size, rows in stages
    )
    return 1e3 * sum(seconds)


def module_stage(module: torch.nn.Module, rows: int) -> Stage:
    count = sum(parameter.numel() for parameter in module.parameters())
    return count, count * next(module.parameters()).element_size(), rows


def decoder_stage(weights: DecoderWeights, rows: int) -> Stage:
    """Return one pass of a decoder, whose weights may be quantised."""
    return _stage([matrix for layer in weights.layers for matrix in layer.matrices], rows)


def cross_stage(weights: DecoderWeights, rows: int) -> Stage:
    """Return the projections of another model's keys and values, which are computed once for a chunk."""
    return _stage([matrix for layer in weights.layers for matrix in layer.cross or ()], rows)


def _stage(matrices: Sequence[Matrix], rows: int) -> Stage:
    return sum(one.outputs * one.inputs for one in matrices), sum(one.nbytes for one in matrices), rows


def openvla_stages(
    model: OpenVLAModel, weights: DecoderWeights, sequence: int, passes: int, images: int = 1
) -> list[Stage]:
    """Return the stages of one action: ``passes`` after a prefill of ``sequence`` tokens with patches."""
    towers = model.vision_backbone.towers
    vision = [module_stage(one, images * (one.shape.patches + one.shape.prefix_tokens)) for one in towers]
    matrices = sum(matrix.outputs * matrix.inputs for layer in weights.layers for matrix in layer.matrices)
    decoder = [(matrices, weights.nbytes, rows) for rows in (sequence, *[1] * passes)]
    return [*vision, module_stage(model.projector, images * model.architecture.patches), *decoder]


def memory_gb(device: torch.device) -> float:
    """Return the peak memory of this process so far, in gigabytes."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def synchronize(device: torch.device) -> None:
    """Wait for the device: between measurements, never within one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(device: torch.device, work: Callable[[], object], repeats: int = 7) -> float:
    """Return the median time of ``work`` in seconds, until the device has finished it."""
    times = []
    for _ in range(repeats + 2):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])
