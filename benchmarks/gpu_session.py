"""Runs correctness checks and then timings on a GPU, and prints a short table.

    python benchmarks/gpu_session.py                                # every stage
    python benchmarks/gpu_session.py --stages kernels,tune,bf16
    python benchmarks/gpu_session.py --kinds int4 --stages kernels,gemm,tune,in_place,int4
    python benchmarks/gpu_session.py --dry                          # on a CPU with a tiny model, to try the script

Needs torch with CUDA, Triton and transformers; the package is imported from ../src. Results are JSON files in $OUT
or ``--out``. Every stage is a process with a time limit, and a failed one does not stop the others. ``tune`` and
``in_place`` write configs.json there, which later stages in the same folder use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gpu import check, tuning, whole
from gpu.common import BOUND_S, KINDS, Session

STAGES = {
    "kernels": check.stage_kernels,
    "guard": check.stage_guard,
    "gemm": tuning.stage_gemm,
    "tune": tuning.stage_tune,
    "in_place": tuning.stage_in_place,
    "profile": tuning.stage_profile,
    "bf16": whole.stage_bf16,
    "int8": whole.stage_int8,
    "int4": whole.stage_int4,
    "fp8": whole.stage_fp8,
    "oft": whole.stage_oft,
    "batch": whole.stage_batch,
    "steady": whole.stage_steady,
}
"""In the order in which they run; the bound of each is in ``common.BOUND_S``."""


def run_stage(name: str, out: Path, dry: bool, kinds: tuple[str, ...], seconds: float) -> int:
    """Run one stage in this process and write its result to ``out/NAME.json``."""
    began = time.monotonic()
    try:
        result = STAGES[name](Session(out, dry, kinds, seconds))
    except Exception:
        traceback.print_exc()
        result = {"failed": traceback.format_exc().splitlines()[-1]}
    result["seconds"] = round(time.monotonic() - began, 1)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1, default=str))
    return int("failed" in result)


def summary(out: Path, names: list[str]) -> str:
    """Return a line per stage."""
    lines = []
    for name in names:
        path = out / f"{name}.json"
        result = json.loads(path.read_text()) if path.exists() else {"failed": "ended without a result"}
        if "total_ms" in result:
            keep = ("total_ms", "in_and_out_ms", "between_ms", "accepted_ms", "accepted_steps", "accepted_share",
                    "verified_ms", "baseline_ms", "baseline_steps", "compiled_ms", "compiled_left_out",
                    "speedup", "accepted_speedup", "floor_ms",
                    "tokens_equal", "token_match", "memory_gb")  # fmt: skip
            result = {key: result[key] for key in keep}
        lines.append(f"{name:<9}{json.dumps(result, default=str)[:600]}")
    return "\n".join(lines)


def main() -> int:
    """Run the requested stages, each in its own process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES), help=f"some of {', '.join(STAGES)}")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_session")))
    parser.add_argument("--seconds", type=float, default=570.0, help="for all stages together")
    parser.add_argument(
        "--kinds",
        default=",".join(KINDS),
        help="weights for kernels, tune, in_place and gemm; steady takes the first",
    )
    parser.add_argument("--dry", action="store_true", help="on a CPU, with a tiny model")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kinds = tuple(options.kinds.split(","))
    if set(kinds) - set(KINDS):
        parser.error(f"--kinds: {options.kinds}, expected some of {', '.join(KINDS)}")
    if options.stage:
        return run_stage(options.stage, options.out, options.dry, kinds, options.seconds)
    names, status, deadline = options.stages.split(","), 0, time.monotonic() + options.seconds
    unknown = sorted(set(names) - set(STAGES))
    if unknown:
        parser.error(f"--stages: {unknown} are none of {list(STAGES)}")
    for name in names:
        left = min(BOUND_S[name], deadline - time.monotonic() - 5)
        if left < 15:
            print(f"== {name}: no time left", flush=True)
            continue
        print(f"== {name}", flush=True)
        command = [sys.executable, __file__, "--stage", name, "--out", str(options.out), "--kinds", options.kinds]
        command += ["--seconds", str(left)]
        try:
            status |= subprocess.run(
                [*command, *(["--dry"] if options.dry else [])], timeout=left, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"== {name}: ended after {left:.0f} s", flush=True)
            status = 1
    print(summary(options.out, names))
    return status


if __name__ == "__main__":
    sys.exit(main())
