"""Compiles every kernel of every model for each GPU and prints what it needs; no GPU is needed.

    python benchmarks/gpus.py --json gpus.json
    python benchmarks/gpus.py --gpus 8.6,12.0 --models pi0.5

A kernel that needs more shared memory than the GPU has, or spills more than 64 bytes of registers, is a misfit: the
engine would use torch instead, or be slow. A kernel that several models launch is compiled once.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.kernels import MODELS, Made, compiled, launches, runs
from vla_ros.engine.tile_configs import GPUS


def examine(gpus: list[str], models: list[str], wanted: str) -> list[dict[str, Any]]:
    """Return a row per GPU and kernel whose name matches ``wanted``; prints each GPU's largest needs."""
    rows = []
    for name in gpus:
        gpu, made, began = GPUS[name], dict[str, Made](), time.perf_counter()
        for model in models:
            if not runs(gpu, model):
                continue
            for key, launch in launches(gpu, model).items():
                if key not in made and re.match(wanted, launch.name):
                    made[key] = compiled(launch, gpu)
                    one = made[key]
                    rows.append({
                        "gpu": name, "model": model, "kernel": launch.name, "registers": one.registers,
                        "spills": one.spills, "shared": one.shared, "fits": one.fits(gpu),
                    })  # fmt: skip
                    if not one.fits(gpu):
                        print(f"misfit {rows[-1]}", flush=True)
            print(f"{name} {model}: {len(made)} kernels so far", file=sys.stderr, flush=True)
        own = [row for row in rows if row["gpu"] == name]
        print(
            f"{name}: {len(own)} kernels, at most {max(row['registers'] for row in own)} registers, "
            f"{max(row['spills'] for row in own)} bytes spilled, {max(row['shared'] for row in own):,} of "
            f"{gpu.limit:,} bytes shared; misfits {sum(not row['fits'] for row in own)} "
            f"({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--gpus", default=",".join(GPUS), help="compute capabilities; all by default")
    parser.add_argument("--models", default="", help="words in the names of models; all by default")
    parser.add_argument("--kernels", default="", help="regular expression of kernels' names; all by default")
    options = parser.parse_args()
    words = options.models.split(",")
    rows = examine(
        options.gpus.split(","), [name for name in MODELS if any(word in name for word in words)], options.kernels
    )
    misfits = sum(not row["fits"] for row in rows)
    if options.json:
        options.json.write_text(json.dumps({"misfits": misfits, "kernels": rows}, indent=1), encoding="utf-8")
    print(f"misfits {misfits}")
    return int(misfits > 0)


if __name__ == "__main__":
    sys.exit(main())
