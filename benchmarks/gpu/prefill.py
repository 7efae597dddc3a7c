"""Products of a prompt's many rows with quantised weights: which cut is right, and which is fastest."""

from __future__ import annotations

import time
from dataclasses import astuple, replace
from typing import Any

from gpu.common import BOUND_S, Session, relative, shape_of

ROWS = 288
"""A prompt of 22 tokens with its picture and a draft, padded."""


def tiles() -> list[Any]:
    """Cuts to try for weights of 4 bits; None dequantises the weight first."""
    from vla_ros.engine.launches import Tile

    wide = [Tile(rows=rows, tail=tail) for rows, tail in ((128, 16), (64, 32), (64, 16), (256, 32))]
    deep = [replace(tile, stages=3) for tile in wide[1:3]]
    # Two programs of a processor: half the registers each, or half the outputs.
    two = [replace(tile, registers=128) for tile in (*deep, *wide[1:3])]
    narrow = [replace(tile, outputs=64, warps=4) for tile in (*wide[:2], *deep)]
    return [*two, None, *wide, *deep, *narrow]


def stage_gemm(session: Session) -> dict[str, Any]:
    """The four products of a layer at 288 rows: dense, int8 both ways, and int4 with every tile that is right."""
    torch = session.torch
    if session.dry:
        return {"skipped": "needs CUDA"}
    from vla_ros.engine.triton_ops import TritonOps
    from vla_ros.engine.weights import QUANTIZE, Matrix, dequantize

    deadline, shape, result = time.monotonic() + BOUND_S["gemm"] - 20, shape_of(session), {}
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    shapes = {
        "qkv": (heads, shape.hidden_size), "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "output": (shape.hidden_size, shape.heads * shape.head_dim),
        "down": (shape.hidden_size, shape.intermediate_size),
    }  # fmt: skip
    kept: dict[str, Any] = {}
    for kind in session.kinds:
        for role, (outputs, inputs) in shapes.items():
            where = {"device": session.device, "dtype": torch.bfloat16}
            weight = torch.randn(outputs, inputs, **where) / inputs**0.5
            matrix = QUANTIZE[kind](weight)
            # Several in turn, so that none is found in the cache.
            many = [matrix, *(Matrix(matrix.data.clone(), matrix.kind, inputs, matrix.scale) for _ in range(3))]
            rows = torch.randn(1, ROWS, inputs, **where)
            expected = rows.float() @ dequantize(matrix, torch.float32).t()
            ways = {"none": [("library", TritonOps())]}.get(kind) or [
                ("separate" if tile is None else str(list(astuple(tile))), tile) for tile in (tiles())
            ]
            tried = []
            for name, way in ways:
                if time.monotonic() > deadline:
                    break
                ops = way
                if kind != "none":
                    ops = TritonOps(fused_gemm=way is not None, tile=way)
                try:
                    error = relative(ops._product(rows, matrix), expected)
                    ms = 1e9
                    if error <= 1e-2:
                        ms = session.time_ms(lambda o=ops, m=many, x=rows: [o._product(x, one) for one in m], 20)
                except Exception as failure:  # one that does not fit must not end the search
                    error, ms = str(failure).strip().splitlines()[-1][:80], 1e9
                tried.append((ms / len(many), name, error, way))
            tried.sort(key=lambda entry: entry[0])
            if not tried:
                continue
            if kind != "none" and tried[0][0] < 1e6:
                best = tried[0][3]
                kept[f"tile {kind} {ROWS} {outputs} {inputs}"] = None if best is None else list(astuple(best))
            flops = 2 * ROWS * outputs * inputs
            result[f"{kind} {role}"] = [
                {"way": name, "us": 1e3 * ms, "tflops": flops / ms / 1e9, "error": error}
                for ms, name, error, _ in tried
            ]  # fmt: skip
            for ms, name, error, _ in tried[:4]:
                print(f"{kind:5} {role:8} {1e3 * ms:8.1f} us {flops / ms / 1e9:6.0f} TFLOP/s  {name}  {error}")
            print("  wrong or failed:", [(name, error) for ms, name, error, _ in tried if ms > 1e6] or "none")
    for kind in session.kinds:
        best_us = [result[f"{kind} {role}"][0]["us"] for role in shapes if f"{kind} {role}" in result]
        result[f"{kind} products_ms"] = shape_layers(best_us)
        print(f"{kind}: {result[f'{kind} products_ms']:.2f} ms for the products of 32 layers")
    session.keep(kept)
    return result


def shape_layers(microseconds: list[float]) -> float:
    """Milliseconds of OpenVLA-7B's 32 layers."""
    return 32 * sum(microseconds) / 1e3
