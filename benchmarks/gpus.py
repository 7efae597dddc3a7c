"""Compiles every kernel of every model for each GPU and prints what it needs; no GPU is needed.

    python benchmarks/gpus.py --json gpus.json
    python benchmarks/gpus.py --gpus 8.6,12.0 --models pi0.5

A kernel that needs more shared memory than the GPU has, or spills more than 64 bytes of registers, is a misfit: the
engine would use torch instead, or be slow. A kernel that several models launch is compiled once. The file is
written after each kernel, so that an interrupted run keeps what it has found.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.runtime.errors import PTXASError

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from benchmarks.kernels import MODELS, Launch, compiled, launches, runs
from vla_ros_models.engine.tile_configs import GPUS

_found: dict[tuple[str, str], tuple[str, Launch]] = {}
"""Model and launch by GPU and key; forked processes inherit it, since kernels cannot be sent to another process."""
_unknown: set[str] = set()


def find(name: str, models: list[str], wanted: str) -> None:
    """Record the kernels of models on a GPU whose names match ``wanted``."""
    for model in models:
        for key, launch in (launches(GPUS[name], model) if runs(GPUS[name], model) else {}).items():
            if re.match(wanted, launch.name):
                _found.setdefault((name, key), (model, launch))


def examine(task: tuple[str, str]) -> dict[str, Any] | None:
    """Compile a kernel; None if the assembler does not know the GPU."""
    (name, _), (model, launch) = task, _found[task]
    if name in _unknown:
        return None
    try:
        made = compiled(launch, GPUS[name])
    except PTXASError as error:
        if "is not defined for option 'gpu-name'" not in str(error):
            raise
        _unknown.add(name)
        return None
    return {
        "gpu": name, "model": model, "kernel": launch.name, "registers": made.registers, "spills": made.spills,
        "shared": made.shared, "fits": made.fits(GPUS[name]),
    }  # fmt: skip


@contextmanager
def examined(processes: int) -> Iterator[Iterator[dict[str, Any] | None]]:
    """Compile every kernel found."""
    if processes == 1:
        yield map(examine, _found)
        return
    with get_context("fork").Pool(processes) as pool:
        yield pool.imap_unordered(examine, _found)


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
    parser.add_argument("--processes", type=int, default=1, help="that compile; 1 by default")
    options = parser.parse_args()
    names, words = options.gpus.split(","), options.models.split(",")
    models = [model for model in MODELS if any(word in model for word in words)]
    for name in names:
        find(name, models, options.kernels)
    rows: list[dict[str, Any]] = []
    with examined(options.processes) as made:
        for row in made:
            if row is None:
                continue
            rows.append(row)
            misfits = sum(not row["fits"] for row in rows)
            print(*row.values(), sep=", ", file=sys.stdout if not row["fits"] else sys.stderr, flush=True)
            if options.json:
                table = {"triton": triton.__version__, "misfits": misfits, "kernels": rows}
                options.json.write_text(json.dumps(table, indent=1), encoding="utf-8")
    print(
        "| GPU | kernels | registers | spills, bytes | shared memory, bytes | misfits |\n|---|---|---|---|---|---|"
    )
    for name in names:
        print(summary(name, [row for row in rows if row["gpu"] == name]))
    unknown = [name for name in names if not any(row["gpu"] == name for row in rows)]
    misfits = sum(not row["fits"] for row in rows)
    print(f"misfits {misfits}")
    if unknown:
        print(f"the assembler of Triton {triton.__version__} does not know {', '.join(unknown)}")
    return int(misfits > 0 or bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
