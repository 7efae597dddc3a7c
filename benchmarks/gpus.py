"""Compiles every kernel of every model for each GPU and prints what it needs; no GPU is needed.

    python benchmarks/gpus.py --json gpus.json
    python benchmarks/gpus.py --gpus 8.6,12.0 --models pi0.5

A kernel that needs more shared memory than the GPU has, or spills more than 64 bytes of registers, is a misfit: the
engine would use torch instead, or be slow. A kernel that several models launch is compiled once (per process).
"""

import argparse
import json
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.runtime.errors import PTXASError

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from benchmarks.kernels import MODELS, compiled, launches, runs
from vla_ros.engine.tile_configs import GPUS

_seen: set[tuple[str, str]] = set()


def examine(name: str, model: str, wanted: str) -> list[dict[str, Any]]:
    """Return a row per kernel of a model on a GPU whose name matches ``wanted``, except those already compiled."""
    gpu, rows, began = GPUS[name], [], time.perf_counter()
    for key, launch in (launches(gpu, model) if runs(gpu, model) else {}).items():
        if (name, key) in _seen or not re.match(wanted, launch.name):
            continue
        _seen.add((name, key))
        try:
            made = compiled(launch, gpu)
        except PTXASError as error:
            if "is not defined for option 'gpu-name'" not in str(error):
                raise
            print(f"{name}: the assembler of Triton {triton.__version__} does not know this GPU", flush=True)
            return []
        rows.append({
            "gpu": name, "model": model, "kernel": launch.name, "registers": made.registers, "spills": made.spills,
            "shared": made.shared, "fits": made.fits(gpu),
        })  # fmt: skip
        if not made.fits(gpu):
            print(f"misfit {rows[-1]}", flush=True)
    print(
        f"{name} {model}: {len(rows)} kernels in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True
    )
    return rows


def summary(name: str, rows: list[dict[str, Any]]) -> str:
    """Return a GPU's row of the table."""
    most = {what: max((row[what] for row in rows), default=0) for what in ("registers", "spills", "shared")}
    misfits = sum(not row["fits"] for row in rows)
    return (
        f"| {name} | {len(rows)} | {most['registers']} | {most['spills']} | {most['shared']:,} of "
        f"{GPUS[name].limit:,} | {misfits} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--gpus", default=",".join(GPUS), help="compute capabilities; all by default")
    parser.add_argument("--models", default="", help="words in the names of models; all by default")
    parser.add_argument("--kernels", default="", help="regular expression of kernels' names; all by default")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    names, words = options.gpus.split(","), options.models.split(",")
    models = [model for model in MODELS if any(word in model for word in words)]
    tasks = [(name, model, options.kernels) for name in names for model in models]
    if options.processes > 1:
        with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
            found = list(pool.map(examine, *zip(*tasks, strict=True)))
    else:
        found = [examine(*task) for task in tasks]
    rows = [row for part in found for row in part]
    print(
        "| GPU | kernels | registers | spills, bytes | shared memory, bytes | misfits |\n|---|---|---|---|---|---|"
    )
    for name in names:
        print(summary(name, [row for row in rows if row["gpu"] == name]))
    unknown = [name for name in names if not any(row["gpu"] == name for row in rows)]
    misfits = sum(not row["fits"] for row in rows)
    if options.json:
        options.json.write_text(json.dumps({"misfits": misfits, "kernels": rows}, indent=1), encoding="utf-8")
    print(f"misfits {misfits}" + (f", not compiled: {', '.join(unknown)}" if unknown else ""))
    return int(misfits > 0 or bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
