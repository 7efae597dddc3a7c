"""What the stages share: sizes, random weights, inputs, and times of graphs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

BOUND_S = {
    "kernels": 150, "tune": 120, "in_place": 150, "profile": 90, "tokens": 150, "bf16": 180, "int8": 120,
    "int4": 120, "guard": 90, "batch": 120, "steady": 480, "receiver": 60, "gemm": 180,
}  # fmt: skip
"""Stage to the most seconds that it may take."""


KINDS = ("none", "int4", "int8")
"""Of weights, as ``weights.QUANTIZE`` names them."""

QUANTIZATIONS = {"none": "none", "int8": "int8", "int4": "nf4"}
"""As ``policy.quantization`` names them."""


class Session:
    """What every stage needs: the device, sizes, and where results go.

    Args:
        out: Folder of the results.
        dry: On a CPU with a tiny model.
        kinds: Of weights that stages of kernels look at.
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
        self._subjects: dict[Any, Any] = {}
        if not dry:
            self._use(self.found())

    def found(self) -> dict[str, Any]:
        """What earlier stages left in launches.json."""
        tuned = self.out / "launches.json"
        return dict(json.loads(tuned.read_text())) if tuned.exists() else {}

    def keep(self, found: dict[str, Any]) -> None:
        """Add to launches.json, for the stages that follow."""
        (self.out / "launches.json").write_text(json.dumps({**self.found(), **found}, indent=1))

    def _use(self, found: dict[str, Any]) -> None:
        from vla_ros.engine import launches

        for key, values in found.items():
            match key.split():
                case ["attention"]:
                    launches.ATTENTION = launches.AttentionLaunch(*values)
                case ["tile", kind, rows, outputs, inputs]:
                    tile = None if values is None else launches.Tile(*values)
                    launches.TILED[kind, int(rows), int(outputs), int(inputs)] = tile
                case [role, kind]:
                    launches.LAUNCHES[role, kind] = launches.Launch(*values)

    def subject(self, kind: str = "none") -> Any:
        """The 7B with random weights, or the tiny model, made once; quantised kinds without the dense decoder."""
        from vla_ros.bench.models import open_quantized, open_subject

        if kind not in self._subjects:
            self._subjects[kind] = (
                open_subject(self.name, self.device, self.dtype)
                if kind == "none"
                else open_quantized(self.name, self.device, self.dtype, QUANTIZATIONS[kind])
            )
        return self._subjects[kind]

    def engine(self, subject: Any, kind: str = "none", drafts: str = "prefill", keep: bool = True) -> Any:
        """An engine over it."""
        from vla_ros.policies.openvla.fast import make_engine

        return make_engine(
            subject.model, 7, QUANTIZATIONS.get(kind, kind), drafts, keep=keep, weights=subject.weights
        )

    def inputs(self, subject: Any, count: int, seed: int = 0, lengths: tuple[int, int] = (22, 22)) -> list[Any]:
        """Random pictures [1, H, W, 3] and prompts."""
        import numpy as np

        rng = np.random.default_rng(seed)
        architecture = subject.model.architecture
        size, made = architecture.image_size, []
        for _ in range(count):
            words = rng.integers(
                3, architecture.action_vocab_size // 2, rng.integers(lengths[0], lengths[1] + 1) - 2
            )
            image = rng.integers(0, 256, (1, size, size, 3), dtype=np.uint8)
            made.append((image, np.array([1, *words, architecture.empty_token], dtype=np.int64)))
        return made

    def time_ms(self, work: Callable[[], Any], repeats: int = 50) -> float:
        """Median of graph replays on a GPU (gaps between launches left out), of calls on a CPU."""
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


def compile_ahead(session: Session, stage: str) -> None:
    """Run ``stage`` in a process per core, 14 at most: each compiles its PART for the cache of all."""
    parts = min(14, max(1, (os.cpu_count() or 2) - 2))  # each holds a context of the GPU
    words = [sys.executable, sys.argv[0], "--stage", stage, "--out", str(session.out), "--kinds"]
    helpers = [
        subprocess.Popen([*words, ",".join(session.kinds)], env=os.environ | {"PART": f"{part}/{parts}"})
        for part in range(parts)
    ]
    for helper in helpers:
        helper.wait(120)


def relative(ours: Any, theirs: Any) -> float:
    """Error in the norm; NaN stays NaN and fails every bound."""
    return float(((ours.double() - theirs.double()).norm() / theirs.double().norm()).item())


def make_layer(session: Session, kind: str, dtype: Any, shape: Any) -> Any:
    """Random decoder weights of one layer with OpenVLA-7B's sizes."""
    from vla_ros.engine.weights import QUANTIZE, DecoderWeights, Layer, dense, rotary_tables

    torch, device = session.torch, session.device

    def noise(*size: int) -> Any:
        return (torch.randn(*size, device=device) / size[-1] ** 0.5).to(dtype)

    quantize, hidden = QUANTIZE[kind], shape.hidden_size
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = Layer(
        1 + 0.1 * noise(hidden, 1)[:, 0], quantize(noise(heads, hidden)),
        quantize(noise(hidden, shape.heads * shape.head_dim)), 1 + 0.1 * noise(hidden, 1)[:, 0],
        quantize(noise(2 * shape.intermediate_size, hidden)), quantize(noise(hidden, shape.intermediate_size)),
    )  # fmt: skip
    cosine, sine = (table.to(device, dtype) for table in rotary_tables(shape))
    embedding = torch.randn(shape.vocab_size, hidden, device=device).to(dtype)
    head = dense(noise(shape.vocab_size, hidden))
    return DecoderWeights(shape, embedding, (layer,), layer.attention_norm, head, cosine, sine)


def shape_of(session: Session) -> Any:
    """Sizes of one decoder layer."""
    from vla_ros.bench.models import OPENVLA_7B
    from vla_ros.policies.openvla.tiny import tiny_architecture

    return replace((tiny_architecture() if session.dry else OPENVLA_7B).llm, layers=1)


def wide(weights: Any) -> Any:
    """The same weights, dequantised, in float64: the reference."""
    from vla_ros.engine.weights import Layer, dense, dequantize

    def cast(value: Any) -> Any:
        return value.double()

    layers = tuple(
        Layer(cast(one.attention_norm), *(dense(cast(dequantize(m, weights.dtype))) for m in (one.qkv, one.output)),
              cast(one.mlp_norm), *(dense(cast(dequantize(m, weights.dtype))) for m in (one.gate_up, one.down)))
        for one in weights.layers
    )  # fmt: skip
    return replace(
        weights, embedding=cast(weights.embedding), layers=layers, norm=cast(weights.norm),
        head=dense(cast(weights.head.data)), cosine=cast(weights.cosine), sine=cast(weights.sine),
    )  # fmt: skip
