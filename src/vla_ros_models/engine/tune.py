"""Measures tiles on a GPU. The search of ``vla-ros tune``.

A tile that is fastest alone is not always the fastest in a pass, so every candidate is timed inside a captured pass
over a few layers, after a pass over one layer was compared with torch's. The best tile of a kernel stays while the
next kernel is tuned. Kernels are compiled by several threads beforehand.
"""

import logging
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from vla_ros_models.engine.kernel_check import require_close
from vla_ros_models.engine.lowbit import BITS, k_group
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.runner import CudaRunner
from vla_ros_models.engine.tile import Tile
from vla_ros_models.engine.tile_configs import (
    FP8_ROWS,
    GEMM_CANDIDATES,
    GEMM_TILES,
    Gpu,
    MeasuredTile,
    Work,
    choose_tile,
    fit_tile,
)
from vla_ros_models.engine.tolerances import TOLERANCES

logger = logging.getLogger(__name__)

LAYERS = 4
"""Layers of a timed pass: more weights than the L2 cache holds."""

LEAST_GAIN = 0.995
"""A candidate must take at most this share of the best time; less is noise."""

DEPTHS = (2, 3, 4, 6, 8)
"""Pipeline stages that are tried with the best shape."""

MakePasses = Callable[[Ops, int], Mapping[str, Callable[[], Tensor]]]
"""Returns the passes of an engine over its first layers: functions whose result shows whether they are correct."""

MakeOps = Callable[[MeasuredTile], Ops]


class Search:
    """The tiles found so far, beside those that were measured earlier, and the times of each pass."""

    def __init__(self, passes: MakePasses, make_ops: MakeOps, device: torch.device, earlier: MeasuredTile) -> None:
        self._passes, self._make_ops, self._device, self._earlier = passes, make_ops, device, earlier
        self.best: dict[str, Tile] = {}
        self.before: dict[str, float] = {}  # milliseconds with the tiles before the search
        self.after: dict[str, float] = {}
        with torch.inference_mode():
            self._expected = {name: run() for name, run in passes(Ops(), 1).items()}
        bounds = TOLERANCES[torch.bfloat16]
        self._bounds = replace(bounds, product=4 * bounds.product, element=4 * bounds.element)  # a whole layer
        self._runner = CudaRunner(device)
        # The last graph: a pool of graphs' memory ends with its last graph, and cannot be used again.
        self._replay: Callable[[], None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The passes."""
        return tuple(self._expected)

    def tile(self, work: Work) -> Tile | None:
        """Return the measured tile of some work, if any."""
        return self.best.get(work.key) or self._earlier(work)

    def works(self, name: str) -> dict[str, Work]:
        """Return the kernels of a pass that have tiles, by key; runs it."""
        found: dict[str, Work] = {}

        def note(work: Work) -> Tile | None:
            found.setdefault(work.key, work)
            return self.tile(work)

        self._passes(self._make_ops(note), 1)[name]()
        return found

    def check(self, name: str, tiles: Mapping[str, Tile]) -> None:
        """Compile a pass with ``tiles``; raise EngineMismatchError if it differs from torch's."""
        with torch.cuda.device(self._device), torch.inference_mode():
            found = self._passes(self._ops(tiles), 1)[name]()
            require_close(f"the pass '{name}'", found, self._expected[name], self._bounds)

    def milliseconds(self, name: str, tiles: Mapping[str, Tile]) -> float:
        """Return the median time of a captured pass."""
        run = self._passes(self._ops(tiles), LAYERS)[name]

        def stage() -> None:
            run()

        self._replay = replay = self._runner.capture(stage)
        times = []
        with self._runner.stream():
            for _ in range(8):
                start = self._runner.mark()
                for _ in range(5):
                    replay()
                times.append(self._runner.milliseconds(start, self._runner.mark()) / 5)
        return statistics.median(times[1:])

    def _ops(self, tiles: Mapping[str, Tile]) -> Ops:
        return self._make_ops(lambda work: tiles.get(work.key) or self.tile(work))


@torch.inference_mode()
def tune(search: Search, gpu: Gpu, progress: Callable[[float, str], None]) -> None:
    """Search the fastest tiles of all kernels, for :attr:`Search.best`."""
    plan = {work.key: (name, work) for name in reversed(search.names) for work in search.works(name).values()}
    search.before = {name: search.milliseconds(name, {}) for name in search.names}
    search.after = dict(search.before)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 2)) as pool:
        for number, (key, (name, work)) in enumerate(plan.items()):
            for candidates in (shapes, depths):
                tile = choose_tile(gpu, work, search.tile)
                others = dict.fromkeys(fit_tile(one, gpu, work) for one in candidates(work, tile))
                for one in _checked(search, name, work, [one for one in others if one != tile], pool):
                    took = search.milliseconds(name, {key: one})
                    if took < LEAST_GAIN * search.after[name]:
                        search.best[key], search.after[name] = one, took
            progress((number + 1) / len(plan), f"{key}: {name} takes {search.after[name]:.3f} ms")


def _checked(search: Search, name: str, work: Work, tiles: list[Tile], pool: ThreadPoolExecutor) -> list[Tile]:
    """Return the tiles that compile, fit and agree with torch."""

    def error(tile: Tile) -> Exception | None:
        try:
            search.check(name, {work.key: tile})
        except Exception as problem:  # one that does not fit must not end the search
            return problem
        return None

    good = []
    for tile, problem in zip(tiles, pool.map(error, tiles), strict=True):
        if problem is None:
            good.append(tile)
        else:
            logger.debug("%s: %s: %s", work.key, tile, problem)
    return good


def depths(work: Work, tile: Tile) -> Iterator[Tile]:
    """Return ``tile`` with other numbers of stages."""
    return (replace(tile, stages=stages) for stages in DEPTHS)


def shapes(work: Work, tile: Tile) -> Iterator[Tile]:
    """Return tiles of other shapes, with a typical number of stages."""
    if work.kernel == "gemm":
        yield from (FP8_ROWS, *GEMM_CANDIDATES, *GEMM_TILES.values())
        for splits in (1, 2, 4):
            yield Tile(64, warps=4, stages=4, block_m=64, tail_m=32, splits=splits)
            yield Tile(128, warps=8, stages=4, max_registers=128, splits=splits)
    elif work.kernel == "attend":
        for block_n in (32, 64, 128):
            for splits in (3, 5, 8):
                yield replace(tile, block_n=block_n, splits=splits)
    elif work.kernel.startswith("attend"):
        for block_m in (16, 64, 128):
            for block_n, warps in ((32, 4), (64, 4), (64, 8)):
                yield replace(tile, block_n=block_n, block_m=block_m, warps=warps)
        if work.outputs:  # one program for all blocks, or one for each
            for splits in (1, 8):
                yield from (
                    replace(tile, block_m=block_m, splits=splits, warps=warps)
                    for block_m in (16, 32, 64)
                    for warps in (2, 4)
                )
    elif work.kernel == "flow":
        splitting = work.pairs == 1
        for block_n in (16, 32, 64) if splitting else (8, 16, 32, 64):
            for block_k in (64, 128) if splitting else (64, 128, 256):
                for splits in (3, 4, 5, 8) if splitting else (1,):
                    yield Tile(block_n, block_k, splits=splits)
    else:
        yield from _decoding_shapes(work)


def _decoding_shapes(work: Work) -> Iterator[Tile]:
    """Every warp has work: of packed weights one or two K-groups, and few enough outputs for its registers."""
    group = k_group(BITS[work.kind]) if work.kind in BITS else 128
    for block_n in (8, 16, 32)[work.pairs % 2 :]:
        for groups in (1, 2, 4, 8):
            for warps in (1, 2, 4):
                if groups in (warps, 2 * warps):
                    yield Tile(block_n, group * groups, warps)
