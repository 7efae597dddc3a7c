"""Measure the engine's tiles on this GPU for a checkpoint, about a minute, and use them from then on.

vla-ros tune --checkpoint DIR
vla-ros tune --config robot.yaml -p policy.quantization:=int8

Every tile is compared with torch before it is timed. The best ones are stored in ~/.cache/vla_ros/tiles (or in
XDG_CACHE_HOME) for this GPU, driver and Triton; `vla-ros doctor` shows them. Delete the file to forget them.
"""

import argparse
import os
import time
from typing import Any

import torch

from vla_ros.config import load
from vla_ros.config.show import add_config_arguments
from vla_ros.errors import ConfigError
from vla_ros.policies.base import checkpoint_options, create
from vla_ros_models.engine import tile_store
from vla_ros_models.engine.device_ops import measured_on
from vla_ros_models.engine.graph_engine import GraphEngine
from vla_ros_models.engine.tile_configs import SIMULATE, gpu_of
from vla_ros_models.engine.tune import LAYERS, Search, tune
from vla_ros_models.network_policy import NetworkPolicy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--policy", metavar="NAME", help="policy by its entry-point name (policy.name)")
    parser.add_argument("--checkpoint", metavar="DIR", help="checkpoint of the policy (policy.checkpoint)")


def run(arguments: argparse.Namespace) -> int:
    options = checkpoint_options(arguments.policy, arguments.checkpoint, arguments.config)
    config = load(arguments.config, [*options, *arguments.param])
    policy = create(config)
    policy.load()
    engine = policy.loaded.engine if isinstance(policy, NetworkPolicy) else None
    if engine is None:
        raise ConfigError(
            f"policy '{config.policy.name}' does not run on the engine, so it has no tiles to measure"
        )
    try:
        tune_engine(engine)
    finally:
        policy.close()
    return 0


def tune_engine(engine: GraphEngine[Any, Any]) -> Search:
    """Measure the tiles of an engine's kernels, and store those that are faster than before."""
    from vla_ros_models.engine.triton_ops import TritonOps

    device = engine.device
    if device.type != "cuda" or os.environ.get(SIMULATE):
        raise ConfigError(f"tiles are measured on an NVIDIA GPU; found {device}, {SIMULATE} must not be set")
    gpu, name, began = gpu_of(device), torch.cuda.get_device_name(device), time.perf_counter()
    search = Search(engine.passes, TritonOps, device, measured_on(device))

    def progress(share: float, what: str) -> None:
        print(f"{time.perf_counter() - began:4.0f} s {share:4.0%} {what}", flush=True)

    tune(search, gpu, progress)
    if not search.before:
        print("this model has no kernels with tiles to choose")
        return search
    path = tile_store.write_tiles(name, search.best)
    tile_store.tiles_of.cache_clear()
    for key, before in search.before.items():
        print(f"{key}: {before:.3f} ms before, {search.after[key]:.3f} ms now ({LAYERS} layers)")
    print(f"{len(search.best)} faster tiles for {name}, stored in {path}")
    return search
