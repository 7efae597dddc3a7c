"""Shared by the stages: sizes, random weights, inputs, and timing of captured graphs."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_ros.engine.tolerances import relative_error
from vla_ros.engine.weights import KINDS

__all__ = ["BOUND_S", "KINDS", "Session", "compile_ahead", "make_layer", "relative_error", "shape_of", "wide"]

BOUND_S = {
    "kernels": 150, "guard": 90, "gemm": 180, "tune": 120, "in_place": 150, "profile": 90, "bf16": 300, "int8": 120,
    "int4": 120, "fp8": 120, "oft": 300, "batch": 120, "steady": 480,
}  # fmt: skip
"""Stage to the most seconds that it may take."""


class Session:
    """The device, sizes and output folder that every stage needs.

    Args:
        out: Folder of the results.
        dry: On a CPU with a tiny model.
        kinds: Kinds of weights for the kernel stages.
        seconds: After which the stage is ended.

    Attributes:
        deadline: By the monotonic clock, when a long stage should come to its end by itself.
    """

    def __init__(self, out: Path, dry: bool, kinds: tuple[str, ...] = KINDS, seconds: float = float("inf")) -> None:
        self.deadline = time.monotonic() + seconds - 30  # the interpreter's start, and writing the result
        import torch

        self.torch, self.out, self.dry, self.kinds = torch, out, dry, kinds
        self.device = torch.device("cpu" if dry else "cuda:0")
        self.name = "tiny" if dry else "openvla-7b"
        self.dtype = torch.float32 if dry else torch.bfloat16
        self._subjects: dict[str, Any] = {}
        if not dry:
            self._use(self.found())

    def found(self) -> dict[str, Any]:
        """Return the contents of configs.json, written by earlier stages."""
        tuned = self.out / "configs.json"
        return dict(json.loads(tuned.read_text())) if tuned.exists() else {}

    def keep(self, found: dict[str, Any]) -> None:
        """Add to configs.json for later stages."""
        (self.out / "configs.json").write_text(json.dumps({**self.found(), **found}, indent=1))

    def _use(self, found: dict[str, Any]) -> None:
        from vla_ros.engine import tile_configs

        for key, values in found.items():
            match key.split():
                case ["attention"]:
                    tile_configs.ATTENTION_CONFIG = tile_configs.AttentionConfig(*values)
                case ["gemm", *kind, rows, n, k]:
                    tile_configs.GEMM_CONFIGS[" ".join(kind), int(rows), int(n), int(k)] = tile_configs.GemmConfig(
                        *values
                    )
                case [role, kind]:
                    tile_configs.SKINNY_CONFIGS[role, kind] = tile_configs.SkinnyConfig(*values)

    def subject(self, kind: str = "none") -> Any:
        """Return the 7B model with random weights, or the tiny model; quantised kinds lack the dense decoder."""
        from vla_ros.bench.models import open_subject

        if kind not in self._subjects:
            self._subjects[kind] = open_subject(self.name, self.device, self.dtype, kind)
        return self._subjects[kind]

    def engine(self, kind: str = "none", drafts: str = "prefill", subject: Any = None) -> Any:
        """Return an engine over the model, or over ``subject`` with quantised weights beside its dense ones."""
        from vla_ros.policies.openvla.build_engine import make_engine

        subject = self.subject(kind) if subject is None else subject
        return make_engine(subject.model, 7, kind, drafts, weights=subject.weights)

    def inputs(self, subject: Any, count: int, seed: int = 0, lengths: tuple[int, int] = (22, 22)) -> list[Any]:
        """Random images [H, W, 3] and prompts."""
        import numpy as np

        from vla_ros.bench.inputs import make_prompt

        rng, architecture = np.random.default_rng(seed), subject.model.architecture
        size = architecture.image_size
        return [
            (
                rng.integers(0, 256, (size, size, 3), dtype=np.uint8),
                make_prompt(architecture, int(rng.integers(lengths[0], lengths[1] + 1)), int(rng.integers(2**31))),
            )
            for _ in range(count)
        ]

    def time_ms(self, work: Callable[[], Any], repeats: int = 50) -> float:
        """Median time of graph replays on a GPU, without the gaps between launches, or of one call on a CPU."""
        torch = self.torch
        if self.dry:
            began = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - began)
        from vla_ros.engine.runner import CudaRunner

        replay = CudaRunner(self.device).capture(work)
        times = []
        for _ in range(repeats + 5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times[5:])

    def try_ms(self, work: Callable[[], Any], repeats: int) -> float:
        """:meth:`time_ms`, or infinity for a configuration that does not fit the device."""
        with contextlib.suppress(Exception):
            return self.time_ms(work, repeats)
        return float("inf")


def compile_ahead(session: Session, stage: str, works: Iterable[Callable[[], Any]] = ()) -> None:
    """Compile everything that a stage will try, on all cores; each process runs a share of ``works`` once.

    In the stage it starts the processes; in one of these (environment variable PART) it does the work.
    """
    part = os.environ.get("PART")
    if part is not None:
        index, count = (int(word) for word in part.split("/"))
        for work in list(works)[index::count]:
            with contextlib.suppress(Exception):  # the stage itself reports the error
                work()
        sys.exit(0)
    count = min(14, max(1, (os.cpu_count() or 2) - 2))  # each holds a context of the GPU
    words = [sys.executable, sys.argv[0], "--stage", stage, "--out", str(session.out), "--kinds"]
    helpers = [
        subprocess.Popen([*words, ",".join(session.kinds)], env=os.environ | {"PART": f"{part}/{count}"})
        for part in range(count)
    ]
    for helper in helpers:
        helper.wait(120)


def make_layer(session: Session, kind: str, dtype: Any, shape: Any) -> Any:
    """Random decoder weights of one layer with OpenVLA-7B's sizes."""
    from vla_ros.engine.llama import LlamaDecoder
    from vla_ros.engine.weights import fuse

    torch = session.torch
    with torch.device(session.device):
        decoder = LlamaDecoder(shape).to(dtype)
    for parameter in decoder.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 1 + 0.1 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5
    decoder.model.embed_tokens.weight.data.mul_(shape.hidden_size**0.5)
    return fuse(decoder, kind, keep=False)


def shape_of(session: Session) -> Any:
    """Return the sizes of one decoder layer."""
    from vla_ros.bench.models import OPENVLA_7B
    from vla_ros.policies.openvla.tiny import tiny_architecture

    return replace((tiny_architecture() if session.dry else OPENVLA_7B).llm, layers=1)


def wide(weights: Any) -> Any:
    """Return the same weights dequantised to float64, as the reference."""
    from vla_ros.engine.weights import Layer, dequantize, quantize

    def exact(matrix: Any) -> Any:
        return quantize(dequantize(matrix, weights.dtype).double(), "none", matrix.role)

    layers = tuple(
        Layer(
            attention_norm=one.attention_norm.double(),
            mlp_norm=one.mlp_norm.double(),
            **{matrix.role: exact(matrix) for matrix in one.matrices},
        )
        for one in weights.layers
    )
    return replace(
        weights, embedding=weights.embedding.double(), layers=layers, norm=weights.norm.double(),
        lm_head=exact(weights.lm_head), cosine=weights.cosine.double(), sine=weights.sine.double(),
    )  # fmt: skip
