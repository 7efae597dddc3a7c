"""Products of a prompt's many rows with quantised weights: which cut is right, and which is fastest."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import astuple, replace
from typing import Any

from gpu.common import BOUND_S, Session, compile_ahead, relative, shape_of

ROWS = 288
"""A prompt of 22 tokens with its picture and a draft, padded."""


def tiles(kind: str, role: str) -> list[Any]:
    """Cuts to try, the best guesses first; None dequantises the weight first.

    Guesses are by how evenly programs fill 132 processors, and by instructions per multiplication.
    """
    from vla_ros.engine.launches import Tile

    deep = 4 if kind == "int8" else 3  # steps of int8 are half as long
    three = Tile(128, 64, 32, 8, deep, 128)  # three times 96 rows, two programs on a processor
    two = Tile(128, 128, 16, 8, deep, 128 if kind == "int8" else None)  # twice 144 rows
    small = Tile(64, 128, 16, 4, 3, 168)  # the same, three programs on a processor
    whole = Tile(64, 256, 32, 4, 3, None)  # every weight is unpacked once
    wide = Tile(128, 256, 32, 8, 3, None)
    found = [three, small, two, whole, wide]
    if kind == "int8":
        found += [
            replace(small, registers=128),
            replace(three, parts=2, stages=3),
            replace(small, parts=2, stages=2),
        ]
        found += [replace(tile, stages=tile.stages - 1) for tile in (three, two)]
    else:
        found += [
            replace(whole, stages=2),
            replace(wide, stages=2),
            replace(three, stages=2),
            replace(small, stages=2),
        ]
        found += [replace(small, registers=None), replace(three, parts=2, stages=2)]
    if role in ("output", "down"):  # few outputs: programs share the inputs
        shared = [
            (small, 3),
            (two, 2),
            (whole, 4),
            (wide, 4),
            (two, 4),
            (three, 2),
            (small, 4),
            (whole, 2),
            (small, 2),
        ]
        found = [*(replace(tile, splits=splits) for tile, splits in shared), *found]
    found += [Tile(64, 64, 32, 4, deep, 128), Tile(128, 64, 16, 8, deep, 128), Tile(64, 128, 16, 8, 3, None)]
    found += [replace(three, registers=None), Tile(128, 128, 32, 8, 3, None), Tile(128, 128, 0, 8, 3, None)]
    return list(dict.fromkeys([*found[:4], None, *found[4:]]))


def stage_compile_gemm(session: Session) -> dict[str, Any]:
    """Compile what ``gemm`` tries, on all cores, with a few outputs of each weight; part of ``gemm``."""
    torch = session.torch
    from vla_ros.engine.triton_ops import TritonOps
    from vla_ros.engine.weights import QUANTIZE

    part, parts = (int(word) for word in os.environ["PART"].split("/"))
    where = {"device": session.device, "dtype": torch.bfloat16}
    tried = {
        (kind, inputs, tile)
        for kind in session.kinds if kind != "none"
        for role, (_, inputs) in _shapes(session).items()
        for tile in tiles(kind, role) if tile is not None
    }  # fmt: skip
    for kind, inputs, tile in sorted(tried, key=str)[part::parts]:
        matrix = QUANTIZE[kind](torch.randn(128, inputs, **where))
        with contextlib.suppress(Exception):  # gemm meets it again and says so
            TritonOps(tile=tile)._product(torch.randn(1, ROWS, inputs, **where), matrix)
    return {}


def stage_gemm(session: Session) -> dict[str, Any]:
    """The four products of a layer at 288 rows: dense, and packed with every tile that is right."""
    torch = session.torch
    if session.dry:
        return {"skipped": "needs CUDA"}
    from vla_ros.engine.triton_ops import TritonOps
    from vla_ros.engine.weights import QUANTIZE, Matrix, dequantize

    began, shapes, result = time.monotonic(), _shapes(session), {}
    compile_ahead(session, "compile_gemm")
    compiled = time.monotonic()
    result["compiled_s"] = round(compiled - began, 1)
    works = [(kind, role) for kind in session.kinds for role in shapes]
    each = (began + BOUND_S["gemm"] - 20 - compiled) / len(works)
    kept: dict[str, Any] = {}
    for number, (kind, role) in enumerate(works):
        outputs, inputs = shapes[role]
        where = {"device": session.device, "dtype": torch.bfloat16}
        weight = torch.randn(outputs, inputs, **where) / inputs**0.5
        matrix = QUANTIZE[kind](weight)
        # Several in turn, so that none is found in the cache.
        many = [matrix, *(Matrix(matrix.data.clone(), matrix.kind, inputs, matrix.scale) for _ in range(3))]
        rows = torch.randn(1, ROWS, inputs, **where)
        expected = rows.float() @ dequantize(matrix, torch.float32).t()
        tried = []
        for tile in tiles(kind, role) if kind != "none" else (None,):
            if time.monotonic() > compiled + (number + 1) * each:
                break
            ops = TritonOps(fused_gemm=tile is not None, tile=tile)
            try:
                error = relative(ops._product(rows, matrix), expected)
                ms = 1e9
                if error <= 3e-3:
                    ms = session.time_ms(lambda o=ops, m=many, x=rows: [o._product(x, one) for one in m], 20)
            except Exception as failure:  # one that does not fit must not end the search
                error, ms = str(failure).strip().splitlines()[-1][:80], 1e9
            tried.append((ms / len(many), tile, error))
        tried.sort(key=lambda entry: entry[0])
        if not tried:
            continue
        names = {tile: "library" if tile is None else str(list(astuple(tile))) for _, tile, _ in tried}
        if kind != "none" and tried[0][0] < 1e6:
            best = tried[0][1]
            kept[f"tile {kind} {ROWS} {outputs} {inputs}"] = None if best is None else list(astuple(best))
        flops = 2 * ROWS * outputs * inputs
        result[f"{kind} {role}"] = [
            {"way": names[tile], "us": 1e3 * ms, "tflops": flops / ms / 1e9, "error": error}
            for ms, tile, error in tried
        ]  # fmt: skip
        for ms, tile, error in tried[:5]:
            print(f"{kind:5} {role:8} {1e3 * ms:8.1f} us {flops / ms / 1e9:6.0f} TFLOP/s  {names[tile]}  {error}")
        print(f"  {len(tried)} tried; wrong:", [(names[t], e) for ms, t, e in tried if ms > 1e6] or "none")
    for kind in session.kinds:
        best_us = [result[f"{kind} {role}"][0]["us"] for role in shapes if f"{kind} {role}" in result]
        result[f"{kind} products_ms"] = shape_layers(best_us)
        print(f"{kind}: {result[f'{kind} products_ms']:.2f} ms for the products of 32 layers")
    session.keep(kept)
    return result


def _shapes(session: Session) -> dict[str, tuple[int, int]]:
    shape = shape_of(session)
    return {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden_size),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "output": (shape.hidden_size, shape.heads * shape.head_dim),
        "down": (shape.hidden_size, shape.intermediate_size),
    }


def shape_layers(microseconds: list[float]) -> float:
    """Milliseconds of OpenVLA-7B's 32 layers."""
    return 32 * sum(microseconds) / 1e3
