"""Searches for the tiles of :mod:`vla_ros.engine.tile_configs` on a GPU.

    python benchmarks/tune_tiles.py                       # few rows: decoding and drafts
    python benchmarks/tune_tiles.py --rows 288 --kinds int8,int4

Every candidate must agree with torch and is timed inside a pass over four layers of OpenVLA-7B with random weights,
because the tile that is fastest alone is not always the fastest in a pass. The best tile of a product stays while
the next product is tuned. Kernels are compiled on all cores beforehand.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import islice
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.models.machine import median_seconds
from benchmarks.models.subject import OPENVLA_7B, random_model
from vla_ros.engine import tile_configs
from vla_ros.engine.decoder import prefill, verify
from vla_ros.engine.kernel_check import check_products
from vla_ros.engine.lowbit import BITS, k_group
from vla_ros.engine.runner import CudaRunner
from vla_ros.engine.stream import KVCache
from vla_ros.engine.tile_configs import SKINNY, GemmConfig, SkinnyConfig
from vla_ros.engine.triton_ops import TritonOps
from vla_ros.engine.weights import QUANTIZATIONS, DecoderWeights, Matrix, fuse

LAYERS = 4  # with 4 bits 400 MB: more than the L2 cache holds
CUDA = torch.device("cuda")
Config = SkinnyConfig | GemmConfig


@cache
def weights_of(kind: str) -> DecoderWeights:
    few = replace(OPENVLA_7B, llm=replace(OPENVLA_7B.llm, layers=LAYERS))
    return fuse(random_model(few, CUDA, torch.bfloat16).language_model, kind, keep=False)


def matrices(weights: DecoderWeights) -> list[Matrix]:
    """The products to tune; the head is dense whatever the kind of the layers."""
    layer = weights.layers[0].matrices
    return [*layer, weights.lm_head] if layer[0].kind == "dense" else list(layer)


def few_rows(matrix: Matrix) -> Iterator[SkinnyConfig]:
    """Tiles that fit into shared memory and keep every warp busy."""
    pairs, bits = 2 if matrix.role in ("qkv", "gate_up") else 1, BITS.get(matrix.kind, 0)
    for block_n in (8, 16, 32, 64)[pairs % 2 :]:
        for block_k in (128, 256, 512, 1024, 2048):
            for warps in (1, 2, 4, 8):
                for stages in (3, 4, 6, 8):
                    outputs, item = block_n * pairs, bits / 8 if bits else matrix.data.element_size()
                    if (outputs * item + 16) * block_k * (stages - 1) > 200_000:
                        continue
                    if bits:  # a warp has one or two K-groups, and 64 outputs of them in registers
                        good = block_k // k_group(bits) in (warps, 2 * warps) and 16 <= outputs <= 64
                    else:
                        good = outputs <= 64 * warps and 2048 * warps <= outputs * block_k
                    if good:
                        yield SkinnyConfig(block_n, block_k, warps, stages)


def many_rows(matrix: Matrix) -> Iterator[GemmConfig]:
    """Tiles of a prompt's products; few outputs leave room for programs that share the inputs."""
    for block_n, warps in ((64, 4), (128, 8)):
        for block_m, tail_m in ((64, 16), (64, 32), (128, 16), (128, 32), (256, 32)):
            for stages, registers in ((2, None), (3, None), (3, 128), (4, 128)):
                for split_k in (1, 2, 4) if matrix.outputs <= 4096 else (1,):
                    yield GemmConfig(block_n, block_m, tail_m, warps, stages, registers, split_k)


def entry(matrix: Matrix, rows: int) -> tuple[dict[Any, Any], tuple[object, ...]]:
    """Return the table of a product's tile, and its key."""
    if rows <= SKINNY:
        return tile_configs.SKINNY_CONFIGS, (matrix.role, matrix.kind)
    kind = "int4 fp8" if matrix.kind == "int4" else matrix.kind
    return tile_configs.GEMM_CONFIGS, (kind, rows, matrix.outputs, matrix.inputs)


def make_pass(weights: DecoderWeights, rows: int) -> Callable[[], None]:
    """One pass of a few rows behind a cache, or of a prompt."""
    ops, cache = TritonOps(), KVCache.allocate(weights, 1, rows + SKINNY)
    tokens = torch.zeros(1, rows, dtype=torch.int64, device=CUDA)
    last = torch.tensor([SKINNY if rows <= SKINNY else rows - 1], dtype=torch.int32, device=CUDA)
    patches = torch.empty(1, 0, weights.shape.hidden_size, dtype=weights.dtype, device=CUDA)
    if rows <= SKINNY:
        return lambda: ops.choose(verify(weights, ops, cache, tokens, last)) and None
    return lambda: ops.choose(prefill(weights, ops, cache, patches, tokens, last, 1)) and None


@torch.inference_mode()
def compile_one(kind: str, rows: int, number: int, config: Config) -> None:
    """Compile a candidate in a process of its own; the search reports its errors."""
    table, key = entry(matrices(weights_of(kind))[number], rows)
    table[key] = config
    make_pass(weights_of(kind), rows)()


@torch.inference_mode()
def tune(kind: str, rows: int, most: int | None, processes: int) -> None:
    """Search and print the best tile of each product of one kind of weight."""
    weights = weights_of(kind)
    products: list[tuple[Matrix, list[Config]]] = []
    for matrix in matrices(weights):
        candidates: Iterator[Config] = few_rows(matrix) if rows <= SKINNY else many_rows(matrix)
        products.append((matrix, list(islice(candidates, most))))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for number, (_, configs) in enumerate(products):
            for config in configs:
                pool.submit(compile_one, kind, rows, number, config)

    def measure() -> float:
        replay = CudaRunner(CUDA).capture(make_pass(weights, rows))  # each graph has a memory pool of its own
        return 1e6 * median_seconds(CUDA, replay, 40) / LAYERS

    best = measure()
    print(f"{kind}: {best:.2f} us a layer", flush=True)
    for matrix, configs in products:
        table, key = entry(matrix, rows)
        chosen = table.get(key)
        for config in configs:
            table[key] = config
            try:
                check_products(TritonOps(), weights)
                took = measure()
            except Exception as error:  # one that does not fit must not end the search
                print(f"  {matrix.role:9} {config}: {str(error).strip().splitlines()[-1][:100]}")
                continue
            if took < best:
                best, chosen = took, config
        table[key] = chosen
        if chosen is None:
            del table[key]
        print(f"  {matrix.role:9} {len(configs)} tried, {best:.2f} us a layer with {chosen}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(QUANTIZATIONS), help=f"some of {', '.join(QUANTIZATIONS)}")
    parser.add_argument("--rows", type=int, default=1, help=f"of a pass; more than {SKINNY}: a prompt")
    parser.add_argument("--most", type=int, help="candidates of each product; all by default")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 2), help="for compiling")
    options = parser.parse_args()
    for kind in options.kinds.split(","):
        if options.rows > SKINNY and kind not in BITS:
            print(f"{kind}: the library multiplies a prompt")
        else:
            tune(kind, options.rows, options.most, options.processes)


if __name__ == "__main__":
    main()
