"""Compares tiles on a GPU: its own, those of a smaller GPU, and those that `vla-ros tune` finds from blank tables.

    python -m benchmarks.tiles [--models openvla,openvla-int8,pi05] [--simulate 8.9] [--tune]

Published sizes, random weights. With the tiles of another GPU the engine runs whole: graphs, drafts, checks. Tokens
must be equal up to near-ties, chunks within rounding, and the time at most 1.25 times that of the GPU's own tiles.
After tuning from blank tables, in which all kernels have the same tile, each pass must come within 2 % of the
package's tables. ``--warm`` only compiles, over few layers, for a later run.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from benchmarks.models.pi import make_processing, random_network
from benchmarks.models.subject import OPENVLA_7B, make_prompt, random_model
from vla_ros_models.engine import tile_configs
from vla_ros_models.engine.flow_engine import FlowRequest
from vla_ros_models.engine.kernel_check import checked
from vla_ros_models.engine.tile import Tile
from vla_ros_models.engine.tile_configs import SIMULATE, gpu_of, unmeasured
from vla_ros_models.engine.token_engine import EngineRequest
from vla_ros_models.engine.tolerances import TOLERANCES, relative_error
from vla_ros_models.engine.triton_ops import TritonOps
from vla_ros_models.engine.tune import Search, tune
from vla_ros_models.engine.weights import fuse
from vla_ros_models.openvla.inference import make_engine as make_openvla
from vla_ros_models.pi.architecture import PUBLISHED
from vla_ros_models.pi.inference import make_engine as make_pi

CUDA = torch.device("cuda:0")
IMAGES, STEPS = 6, 30
NEAR = TOLERANCES[torch.bfloat16]

Answer = tuple[Any, float]
"""Answers to :data:`IMAGES` images, and the median milliseconds of a step."""


@contextmanager
def simulated(name: str) -> Iterator[None]:
    """Use the tiles of another GPU; of this one if ``name`` is empty."""
    with mock.patch.dict(os.environ, {SIMULATE: name}):
        gpu_of.cache_clear()
        yield
    gpu_of.cache_clear()


def blank() -> Any:
    """Replace the package's tables by one tile for every kernel of a family."""
    few = dict.fromkeys(tile_configs.DECODE_TILES, Tile())
    flow = dict.fromkeys(tile_configs.FLOW_TILES, (Tile(), Tile())) | {
        "": (Tile(16, stages=2, block_m=16, splits=8),) * 2
    }
    return mock.patch.multiple(
        tile_configs, DECODE_TILES=few, FLOW_TILES=flow, FLOW_SIZES={}, GEMM_TILES={},
        ATTEND_TILE=Tile(32, stages=1, block_m=16), PREFIX_TILE=Tile(16, stages=2, block_m=16),
    )  # fmt: skip


def timed(answer: Callable[[int], Any]) -> Answer:
    found, times = [answer(index) for index in range(IMAGES)], []
    for index in range(STEPS):
        began = time.perf_counter()
        answer(index % IMAGES)
        times.append(1e3 * (time.perf_counter() - began))
    return found, statistics.median(times)


class OpenVLA:
    """OpenVLA-7B and its images."""

    def __init__(self, kind: str, layers: int) -> None:
        sizes = replace(OPENVLA_7B, llm=replace(OPENVLA_7B.llm, layers=layers))
        self.model = random_model(sizes, CUDA, torch.bfloat16)
        self.weights = fuse(self.model.language_model, kind, keep=False)
        self.images = np.random.default_rng(0).integers(0, 256, (IMAGES, 224, 224, 3), dtype=np.uint8)
        self.prompt = make_prompt(sizes, 22)

    def engine(self) -> Any:
        ops = checked(TritonOps(), self.weights, strict=True)
        return make_openvla(self.model, 7, weights=self.weights, ops=ops)

    def answers(self, engine: Any) -> Answer:
        engine.warm_up([len(self.prompt)])

        def answer(index: int) -> Any:
            [found] = engine.answer([EngineRequest(self.images[index], self.prompt)])
            return found

        return timed(answer)

    def compare(self, ours: list[Any], theirs: list[Any]) -> tuple[bool, str]:
        """Only the first difference of an answer counts, because later tokens follow another prefix."""
        margins = []
        for one, other in zip(ours, theirs, strict=True):
            differing = np.flatnonzero(one.tokens != other.tokens)
            margins += [float(other.margins[differing[0]])] if differing.size else []
        equal = f"{len(ours) - len(margins)} of {len(ours)} answers equal"
        return max(
            margins, default=0.0
        ) <= NEAR.near_tie, f"{equal}, near-ties {[round(one, 3) for one in margins]}"


class Pi:
    """pi0.5 and its images."""

    def __init__(self, kind: str, layers: int) -> None:
        sizes = PUBLISHED["pi05"]
        few = {part: replace(getattr(sizes, part), layers=min(18, layers)) for part in ("prefix", "expert")}
        self.kind, self.network = kind, random_network(replace(sizes, horizon=50, **few), CUDA, torch.bfloat16)
        self.processing = make_processing(3)
        self.images = np.random.default_rng(0).integers(0, 256, (IMAGES, 3, 224, 224, 3), dtype=np.uint8)
        self.words = np.random.default_rng(0).integers(3, sizes.vocabulary, 22)

    def engine(self) -> Any:
        ops = TritonOps()
        engine = make_pi(self.network, self.processing, 10, quantization=self.kind, ops=ops)
        checked(ops, engine.model, strict=True)
        return engine

    def answers(self, engine: Any) -> Answer:
        engine.warm_up([len(self.words)], 3)
        state = np.zeros(engine.model.action_dim)

        def answer(index: int) -> Any:
            [found] = engine.answer([FlowRequest(list(self.images[index]), self.words, lambda: state, index)])
            return torch.from_numpy(found.actions)

        return timed(answer)

    def compare(self, ours: list[Any], theirs: list[Any]) -> tuple[bool, str]:
        error = max(relative_error(one, other) for one, other in zip(ours, theirs, strict=True))
        return error <= NEAR.vision, f"relative error {error:.2g}"


MODELS: dict[str, Callable[[int], Any]] = {
    "openvla": lambda layers: OpenVLA("none", layers),
    "openvla-int8": lambda layers: OpenVLA("int8", layers),
    "openvla-int4": lambda layers: OpenVLA("int4", layers),
    "pi05": lambda layers: Pi("none", layers),
}


def compare_simulated(name: str, model: Any, other: str) -> bool:
    """Run a model with its own tiles and with those of another GPU."""
    answers = []
    for gpu in ("", other):
        with simulated(gpu):
            engine = model.engine()
            answers.append(model.answers(engine))
            engine.close()
    (own, took), (theirs, slower) = answers
    good, text = model.compare(theirs, own)
    good = good and slower <= 1.25 * took
    print(
        f"{name}: own tiles {took:.2f} ms, tiles of {other} {slower:.2f} ms, ratio {slower / took:.3f}; {text}: "
        f"{'good' if good else 'MISSED'}",
        flush=True,
    )
    return bool(good)


def compare_tuned(name: str, model: Any) -> bool:
    """Tune from blank tables, and time each pass with the tiles found and with those of the package."""
    began, engine = time.perf_counter(), model.engine()
    table = Search(engine.passes, TritonOps, CUDA, unmeasured)
    with blank():
        search = Search(engine.passes, TritonOps, CUDA, unmeasured)
        tune(search, gpu_of(CUDA), lambda share, what: print(f"  {share:4.0%} {what}", flush=True))
    found = dict.fromkeys(search.names, (9e9, 9e9))
    with torch.inference_mode():
        for one in [*found] * 3:  # alternating, because a GPU's clock changes
            with blank():
                ours = search.milliseconds(one, {})
            found[one] = min(found[one][0], ours), min(found[one][1], table.milliseconds(one, {}))
    engine.close()
    ratio = sum(one for one, _ in found.values()) / sum(one for _, one in found.values())
    for one, (ours, theirs) in found.items():
        print(f"  {one}: blank {search.before[one]:.3f} ms, tuned {ours:.3f}, by the tables {theirs:.3f}")
    good = max(ours / theirs for ours, theirs in found.values()) <= 1.02
    print(
        f"{name}: tuned in {time.perf_counter() - began:.0f} s, {ratio:.3f} times the tables' time: "
        f"{'good' if good else 'MISSED'}",
        flush=True,
    )
    return bool(good)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="openvla,pi05", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--simulate", default="", metavar="X.Y", help="compare with the tiles of this GPU")
    parser.add_argument("--tune", action="store_true", help="tune from blank tables")
    parser.add_argument("--warm", action="store_true", help="only compile")
    options = parser.parse_args()
    good = True
    for name in options.models.split(","):
        model = MODELS[name](2 if options.warm else 32)
        if options.warm:
            for gpu in ("", options.simulate):
                with simulated(gpu):
                    model.answers(model.engine())
            continue
        if options.simulate:
            good &= compare_simulated(name, model, options.simulate)
        if options.tune:
            good &= compare_tuned(name, model)
        del model
        torch.cuda.empty_cache()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
