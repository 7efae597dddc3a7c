"""Measures this machine's bandwidth and arithmetic rate, and derives a lower bound for one inference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vla_ros.engine.weights import DecoderWeights
from vla_ros.policies.openvla.model import OpenVLAModel


@dataclass(frozen=True)
class Machine:
    """Measured limits of a machine.

    Attributes:
        name: Device.
        bytes_per_s: Of a large copy, bytes read plus bytes written.
        flops_per_s: Of a large matrix product of the model's type, on random data.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure both limits; takes under a second on a GPU, a few on a CPU."""
    cuda = device.type == "cuda"
    count = 2**30 if cuda else 2**26
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _median(device, lambda: target.copy_(source))
    side = 8192 if cuda else 512
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    product = _median(device, lambda: left @ right)
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    return Machine(name, 2 * count / copy, 2 * side**3 / product)


def floor_ms(
    machine: Machine, model: OpenVLAModel, weights: DecoderWeights, sequence: int, passes: int, batch: int = 1
) -> float:
    """Return a lower bound in milliseconds: the larger of arithmetic and bytes, stage by stage.

    ``sequence`` counts the tokens of the prompt with patches, ``passes`` the decoder passes after the prefill.
    """
    seconds = 0.0
    stages = [
        (_parameters(tower), tower.shape.patches + tower.shape.prefix_tokens)
        for tower in model.vision_backbone.towers
    ]
    stages.append((_parameters(model.projector), model.architecture.patches))
    item = weights.embedding.element_size()
    for count, tokens in stages:
        seconds += max(2 * count * tokens * batch / machine.flops_per_s, count * item / machine.bytes_per_s)
    matrices = sum(matrix.outputs * matrix.inputs for layer in weights.layers for matrix in layer.matrices)
    read = weights.nbytes / machine.bytes_per_s
    seconds += max(2 * matrices * sequence * batch / machine.flops_per_s, read)
    return 1e3 * (seconds + passes * max(read, 2 * matrices * batch / machine.flops_per_s))


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


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _median(device: torch.device, work: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])
