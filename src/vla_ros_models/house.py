"""The house of the models: its commands, and what ``vla-ros doctor`` reports about it."""

import os
import shutil
import subprocess
from collections.abc import Iterator

from vla_ros.errors import ConfigError, install
from vla_ros.houses import GOOD, NOTE, WRONG, Finding, House, SubCommand, check_library, installed
from vla_ros_models.engine import tile_store


def examine() -> Iterator[Finding]:
    """Yield what concerns the models: torch, tokenizers, the GPU, the engine and its tiles."""
    for package in ("torch", "tokenizers"):
        yield check_library(package, package, NOTE, f"{install('openvla')} (needed by OpenVLA policies)")
    yield from _gpu()


def _gpu() -> Iterator[Finding]:
    command = shutil.which("nvidia-smi")
    if command is None:
        yield Finding("GPU", "no nvidia-smi: policies run on the CPU", NOTE)
        return
    query = ["--query-gpu=name,memory.free,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run([command, *query], capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        yield Finding("GPU", f"nvidia-smi failed: {error}", WRONG, "check the driver: nvidia-smi")
        return
    yield Finding("GPU", "; ".join(answer.stdout.strip().splitlines()))
    yield _engine()
    for name in dict.fromkeys(line.split(",")[0].strip() for line in answer.stdout.strip().splitlines()):
        yield _tiles(name)


def _engine() -> Finding:
    triton = installed("triton")
    if triton is None:
        fix = "pip install triton, or a torch for CUDA, which includes it"
        return Finding("engine", "Triton is not installed: OpenVLA runs without its engine", NOTE, fix)
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
        return Finding("engine", f"Triton {triton} finds no C compiler", NOTE, "sudo apt-get install gcc")
    return Finding("engine", f"Triton {triton} and a C compiler")


def _tiles(gpu: str) -> Finding:
    try:
        found = tile_store.read_tiles(gpu)
    except ConfigError as error:
        return Finding("tiles", str(error), WRONG, "vla-ros tune --checkpoint DIR")
    if not found:
        return Finding("tiles", f"built in; none were measured on {gpu}", GOOD, "vla-ros tune --checkpoint DIR")
    return Finding("tiles", f"{len(found)} measured on {gpu}: {tile_store.path_of(gpu)}")


HOUSE = House(
    "the models",
    {
        "convert": SubCommand("vla_ros_models.convert", "write a checkpoint as safetensors, merged"),
        "tune": SubCommand("vla_ros_models.tune", "measure the engine's tiles on this GPU"),
    },
    examine,
)
