"""Trains the demo's checkpoint in one session: data, training, export, evaluation, one archive.

    python benchmarks/train_session.py --work WORK --out OUT [--limit 570] [--steps N] [-- options of "fit"]

Every stage resumes where it stopped: repeat the command until it prints "complete". With `--limit` the call
ends in time on machines that are rented by the minute; the result so far is exported and packed.
`--seconds` lets the script choose the number of steps from the measured speed; the model card states the result.

OUT receives `session.json` (times and figures) and `session.tar.NN`, pieces of at most 15 MiB: the checkpoint, the
logs and the figures. Join them with `cat session.tar.* | tar x`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

PIECE = 15 * 1024 * 1024
RESERVE = 25.0  # s at the end of a call for export and packing
UNFINISHED = 3
_PROBE_STEPS = 150


class Session:
    """Stages of one session, their times and the time left."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.monotonic()
        self.data, self.run_folder, self.checkpoint = (
            arguments.work / name for name in ("data", "run", "checkpoint")
        )
        self.journal = arguments.work / "session.json"
        arguments.work.mkdir(parents=True, exist_ok=True)
        self.facts: dict[str, Any] = {"calls": [], "stages": {}}
        if self.journal.exists():
            self.facts = json.loads(self.journal.read_text(encoding="utf-8"))
        self.facts["calls"].append({"began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})

    @property
    def left(self) -> float:
        """Seconds until this call must end, minus the time for packing."""
        if not self.arguments.limit:
            return 1e9
        return float(self.arguments.limit) - (time.monotonic() - self.began) - RESERVE

    def note(self) -> None:
        """Write the results so far."""
        self.facts["calls"][-1]["seconds"] = round(time.monotonic() - self.began, 1)
        self.journal.write_text(json.dumps(self.facts, indent=1) + "\n", encoding="utf-8")

    def stage(self, name: str, *words: str) -> bool:
        """Run one `python -m tools.train` command until the time limit; True if it is complete."""
        if self.left < 5:
            return False
        began = time.monotonic()
        command = [sys.executable, "-m", "tools.train", *words]
        print(f"[{name}] {' '.join(words)}", flush=True)
        # A group of its own, so that its simulations end with it.
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                status = process.wait(self.left if self.arguments.limit else None)
            except BaseException as error:  # also Ctrl-C; finished shards and states are on disk
                os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                status = UNFINISHED
        stages = self.facts["stages"].setdefault(name, {"seconds": 0.0})
        stages["seconds"] = round(stages["seconds"] + time.monotonic() - began, 1)
        stages["status"] = status
        self.note()
        if status not in (0, UNFINISHED):
            raise SystemExit(f"[{name}] ended with status {status}")
        return status == 0


def main() -> int:
    """Run the remaining stages; returns 0 when all are complete, 3 when the limit was reached first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder that stays between calls")
    parser.add_argument("--out", type=Path, required=True, help="folder for the archive")
    parser.add_argument("--limit", type=float, default=0.0, metavar="S", help="seconds for this call; 0: no limit")
    parser.add_argument("--episodes", type=int, default=8000, help="demonstrations")
    parser.add_argument("--tasks", nargs="+", default=["pick"], help="tasks of the demonstrations")
    parser.add_argument("--steps", type=int, default=0, help="optimiser steps; 0: as many as fit into --seconds")
    parser.add_argument("--seconds", type=float, default=480.0, help="of training, where --steps is 0")
    parser.add_argument("--evaluate", type=int, default=100, metavar="N", help="episodes per control")
    parser.add_argument("--processes", type=int, default=0, help="simulations at a time; 0: one per core")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the training step")
    parser.add_argument("fit", nargs="*", metavar="-- OPTION", help="further options of `tools.train fit`")
    arguments = parser.parse_args()
    session = Session(arguments)
    session.facts["machine"] = machine()
    session.note()
    try:
        complete = run(session)
    finally:
        session.note()
        pack(session)
    print("complete" if complete else "not complete: call the same line again", flush=True)
    return 0 if complete else UNFINISHED


def run(session: Session) -> bool:
    """Run the stages in order; True when all are complete."""
    arguments = session.arguments
    workers = ("--processes", str(arguments.processes))
    demonstrations = ("--episodes", str(arguments.episodes), "--tasks", *arguments.tasks)
    if not session.stage("data", "data", str(session.data), *workers, *demonstrations):
        return False
    steps = arguments.steps or chosen_steps(session)
    if not steps:
        return False
    session.facts["steps"] = steps
    limit = ("--time-limit", str(max(1.0, session.left - 30))) if arguments.limit else ()  # 30 s: reading frames
    options = (*compiled(session), "--steps", str(steps), *limit, *arguments.fit)
    trained = session.stage("fit", "fit", str(session.data), str(session.run_folder), *options)
    if (session.run_folder / "state.safetensors").exists():
        export(session)
    if not trained:
        return False
    figures = session.arguments.work / "evaluation.json"
    return session.stage(
        "evaluate",
        *("evaluate", str(session.checkpoint), "--episodes", str(arguments.evaluate), "--json", str(figures)),
        *workers,
    )


def compiled(session: Session) -> tuple[str, ...]:
    """The option that enables compilation, unless it was disabled."""
    return () if session.arguments.no_compile else ("--compile",)


def chosen_steps(session: Session) -> int:
    """Return the steps that fit into ``--seconds`` at the speed of a short probe; 0 if the probe did not finish."""
    if "chosen_steps" in session.facts:
        return int(session.facts["chosen_steps"])
    probe = session.arguments.work / "probe"
    shutil.rmtree(probe, ignore_errors=True)
    words = ("--steps", str(_PROBE_STEPS), "--log-every", "25", *compiled(session), *session.arguments.fit)
    if not session.stage("probe", "fit", str(session.data), str(probe), *words):
        return 0
    lines = [json.loads(line) for line in (probe / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    paces = sorted(line["frames_per_s"] for line in lines if line["kind"] == "step" and line["step"] > 50)
    fit = json.loads((probe / "recipe.json").read_text(encoding="utf-8"))["fit"]
    per_step = fit["batch"] * fit["accumulate"] / paces[len(paces) // 2]
    steps = max(200, int(session.arguments.seconds / per_step) // 100 * 100)
    session.facts |= {"chosen_steps": steps, "seconds_per_step": round(per_step, 5), "frames_per_s": paces}
    session.note()
    return steps


def export(session: Session) -> None:
    """Export the latest checkpoint, regardless of the limit: it is the purpose of the session."""
    command = [sys.executable, "-m", "tools.train", "export", str(session.run_folder)]
    subprocess.run([*command, str(session.checkpoint)], check=True, timeout=60)


def pack(session: Session) -> None:
    """Pack checkpoint, logs and figures into a tar archive in pieces."""
    out, work = session.arguments.out, session.arguments.work
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("session.tar*"):
        stale.unlink()
    whole = out / "session.tar"
    with tarfile.open(whole, "w") as archive:
        for path in (
            session.checkpoint,
            session.journal,
            session.run_folder / "log.jsonl",
            session.run_folder / "recipe.json",
            work / "evaluation.json",
            session.data / "dataset.json",
        ):
            if path.exists():
                archive.add(path, str(path.relative_to(work)))
    with whole.open("rb") as stream:
        for number, piece in enumerate(iter(lambda: stream.read(PIECE), b"")):
            (out / f"session.tar.{number:02d}").write_bytes(piece)
    whole.unlink()
    shutil.copy(session.journal, out / "session.json")


def machine() -> dict[str, Any]:
    """The machine that this runs on."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    sys.exit(main())
