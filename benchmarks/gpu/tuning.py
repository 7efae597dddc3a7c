"""Searches for tile configurations, product by product and then in a whole pass, and profiles kernels."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any

from gpu.common import BOUND_S, Session, compile_ahead, make_layer, relative_error, shape_of
from vla_ros.engine.lowbit import BITS

ATTENTION = ((64, 4, 3, 1), (32, 2, 2, 9), (64, 4, 2, 5), (64, 4, 1, 5), (64, 2, 1, 5), (128, 4, 1, 3))
"""Of :class:`~vla_ros.engine.tile_configs.AttentionConfig`."""

BLOCK_K = {
    "none": (128, 256, 512),
    "fp8": (128, 256, 512, 1024),
    "int8": (128, 256, 512, 1024),
    "int4": (256, 512, 1024, 2048),
}
ROWS = 288
"""A prompt of 22 tokens with its image and a draft, padded."""


def skinny_candidates(kinds: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Every role, kind of weight and configuration that ``tune`` tries."""
    from vla_ros.engine.tile_configs import SkinnyConfig

    for kind in kinds:
        for role in ("gate_up", "down_proj", "o_proj", "qkv", *(("lm_head",) if kind == "none" else ())):
            pairs = 2 if role in ("qkv", "gate_up") else 1
            for block_n in (8, 16, 32, 64) if pairs == 2 else (16, 32, 64):
                for block_k in BLOCK_K[kind]:
                    for warps in (1, 2, 4) if kind in ("none", "fp8") else (2, 4, 8):
                        for stages in (3, 4, 6, 8):
                            config = SkinnyConfig(block_n, block_k, warps, stages)
                            if _sensible(config, kind, pairs):
                                yield role, kind, config


def _sensible(config: Any, kind: str, pairs: int) -> bool:
    """Return True if the configuration fits into shared memory and keeps every warp busy."""
    from vla_ros.engine.lowbit import k_group

    outputs = config.block_n * pairs
    if kind in BITS:
        # A warp has one or two K-groups, and 64 outputs of them in registers.
        bits = BITS[kind]
        groups = config.block_k // k_group(bits)
        shared = (outputs * bits // 8 + 16) * config.block_k * (config.stages - 1)
        return shared < 220_000 and groups // 2 <= config.warps <= groups and 16 <= outputs <= 64
    # Weights and rows in flight; registers of one warp hold 64 outputs at most.
    held = (outputs * (1 if kind == "fp8" else 2) + 32) * config.block_k * config.stages
    return held < 200_000 and outputs <= 64 * config.warps and outputs * config.block_k >= 4096 * config.warps


class Layers:
    """The products of a layer on random weights.

    ``copies`` layers run in turn, so that no weights are in the L2 cache.
    """

    def __init__(self, session: Session, kind: str, copies: int) -> None:
        from vla_ros.engine.ops import KVCache

        torch, shape = session.torch, shape_of(session)
        self.sets = [make_layer(session, kind, torch.bfloat16, shape) for _ in range(copies)]
        where = {"device": session.device, "dtype": torch.bfloat16}
        self.at = torch.full((1, 1), 290, dtype=torch.int32, device=session.device)
        self.hidden, self.first = torch.randn(1, shape.hidden_size, **where), self.at.long() * 0
        rows = {"device": session.device, "dtype": self.sets[0].rows_dtype}
        self.rows = {
            "down_proj": torch.randn(1, 1, shape.intermediate_size, **rows),
            "o_proj": torch.randn(1, 1, shape.heads * shape.head_dim, **rows),
        }
        self.cache = KVCache.allocate(self.sets[0], 1, 320)

    def run(self, role: str, ops: Any) -> None:
        """Run one product of every layer."""
        stream = ops.gather(self.hidden, self.first, self.sets[0].norm, self.sets[0].rows_dtype)
        for one in self.sets:
            self._product(role, ops, one, stream)

    def error(self, role: str, ops: Any) -> float:
        """Return the relative error of a product against torch's."""
        from vla_ros.engine.ops import Ops

        one = self.sets[0]
        ours, theirs = (
            self._product(role, how, one, how.gather(self.hidden, self.first, one.norm, one.rows_dtype))
            for how in (ops, Ops())
        )
        return relative_error(ours, theirs)

    def matrix(self, role: str) -> Any:
        """Return the matrix of the first layer."""
        one = self.sets[0]
        return one.lm_head if role == "lm_head" else getattr(one.layers[0], role)

    def _product(self, role: str, ops: Any, one: Any, stream: Any) -> Any:
        layer = one.layers[0]
        if role == "qkv":
            return ops.qkv(one, 0, stream, ops.locate(one, self.cache, self.at), self.cache)
        if role in self.rows:
            return ops.add_linear(stream, self.rows[role], getattr(layer, role), layer.mlp_norm).hidden
        return ops.gate_up(one, 0, stream) if role == "gate_up" else ops.lm_head(one, stream)


def stage_tune(session: Session) -> dict[str, Any]:
    """Time many configurations of every role and kind; the best go to configs.json."""
    torch = session.torch
    if session.dry:
        return {"skipped": "needs CUDA"}
    from vla_ros.engine.tile_configs import SKINNY_CONFIGS
    from vla_ros.engine.triton_ops import TritonOps

    began, once = time.monotonic(), {}

    def compiling() -> Iterator[Any]:
        for kind in session.kinds:
            once[kind] = Layers(session, kind, 1)
        for role, kind, config in skinny_candidates(session.kinds):
            stored = once[kind].matrix(role).kind
            yield lambda r=role, k=kind, c=config, s=stored: once[k].run(r, TritonOps({(r, s): c}))

    compile_ahead(session, "tune", compiling())
    best, found = {}, {}
    table: dict[str, Any] = {"compiled_s": round(time.monotonic() - began, 1)}
    deadline, kind_now, layers = began + BOUND_S["tune"] - 20, "", None
    for role, kind, config in skinny_candidates(session.kinds):
        if time.monotonic() > deadline:
            break
        if kind != kind_now:
            layers, kind_now = None, kind
            torch.cuda.empty_cache()
            layers = Layers(
                session, kind, {"none": 3, "int8": 5, "fp8": 5, "int4": 8}[kind]
            )  # 1.2 GB: more than the L2
        assert layers is not None
        key = (role, layers.matrix(role).kind)
        ops, ms = TritonOps({key: config}), float("inf")
        try:
            wrong = layers.error(role, ops)
            if not wrong <= 1e-2:
                table.setdefault("wrong", []).append([*key, *astuple(config), wrong])
                continue
            ms = session.time_ms(lambda r=role, o=ops, b=layers: b.run(r, o), 12) / len(layers.sets)
        except Exception:  # one that does not fit must not end the search
            print("does not fit:", *key, config)
        found.setdefault(key, []).append((ms, config, layers.matrix(role).nbytes))
    for (role, stored), tried in found.items():
        tried.sort(key=lambda entry: entry[0])
        ms, config, nbytes = tried[0]
        now = [entry[0] for entry in tried if entry[1] == SKINNY_CONFIGS[role, stored]]
        best[f"{role} {stored}"] = list(astuple(config))
        table[f"{role} {stored}"] = {
            "us": 1e3 * ms, "gb_per_s": nbytes / ms / 1e6, "config": best[f"{role} {stored}"],
            "default_us": 1e3 * now[0] if now else None, "tried": len(tried),
            "next": [(round(1e3 * entry[0], 2), *astuple(entry[1])) for entry in tried[1:6]],
        }  # fmt: skip
        print(f"{role:9} {stored:6} {1e3 * ms:7.1f} us {nbytes / ms / 1e9:5.2f} TB/s  {best[f'{role} {stored}']}")
    print("wrong numbers:", table.get("wrong", "none"))
    session.keep(best)
    return table


def gemm_candidates(kind: str, role: str) -> list[Any]:
    """Return the configurations to try, the most promising first.

    They are ranked by how evenly their programs fill 132 multiprocessors, and by instructions per multiplication.
    """
    from vla_ros.engine.tile_configs import GemmConfig

    deep = 4 if kind == "int8" else 3  # K-groups of int8 are half as long
    three = GemmConfig(128, 64, 32, 8, deep, 128)  # three times 96 rows, two programs on a multiprocessor
    two = GemmConfig(128, 128, 16, 8, deep, 128 if kind == "int8" else None)  # twice 144 rows
    small = GemmConfig(64, 128, 16, 4, 3, 168)  # the same, three programs on a multiprocessor
    whole = GemmConfig(64, 256, 32, 4, 3, None)  # every weight is unpacked once
    large = GemmConfig(128, 256, 32, 8, 3, None)
    found = [three, small, two, whole, large, replace(three, k_groups=2, stages=3 if kind == "int8" else 2)]
    if kind == "int8":
        found += [replace(small, max_registers=128), replace(small, k_groups=2, stages=2)]
        found += [replace(one, stages=one.stages - 1) for one in (three, two)]
    else:
        found += [
            *(replace(one, stages=2) for one in (whole, large, three, small)),
            replace(small, max_registers=None),
        ]
    if role in ("o_proj", "down_proj"):  # few outputs: programs share the inputs
        splits = (
            (small, 3),
            (two, 2),
            (whole, 4),
            (large, 4),
            (two, 4),
            (three, 2),
            (small, 4),
            (whole, 2),
            (small, 2),
        )
        found = [*(replace(one, split_k=split_k) for one, split_k in splits), *found]
    found += [GemmConfig(64, 64, 32, 4, deep, 128), GemmConfig(128, 64, 16, 8, deep, 128)]
    found += [GemmConfig(64, 128, 16, 8, 3, None), replace(three, max_registers=None)]
    found += [GemmConfig(128, 128, 32, 8, 3, None), GemmConfig(128, 128, 0, 8, 3, None)]
    return list(dict.fromkeys(found))


def stage_gemm(session: Session) -> dict[str, Any]:
    """Time the four products of a layer at 288 rows: dense, and packed with every correct configuration."""
    torch, shape = session.torch, shape_of(session)
    if session.dry:
        return {"skipped": "needs CUDA"}
    from vla_ros.engine.ops import rounded, rounds
    from vla_ros.engine.triton_ops import TritonOps
    from vla_ros.engine.weights import dequantize, quantize

    began, kept, result = time.monotonic(), {}, {}
    where = {"device": session.device, "dtype": torch.bfloat16}
    sizes = {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden_size),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "o_proj": (shape.hidden_size, shape.heads * shape.head_dim),
        "down_proj": (shape.hidden_size, shape.intermediate_size),
    }

    def compiling() -> Iterator[Any]:
        tried = {
            (kind, k, config)
            for kind in session.kinds if kind in BITS
            for role, (_, k) in sizes.items() for config in gemm_candidates(kind, role)
        }  # fmt: skip
        for kind, k, config in sorted(tried, key=str):
            yield lambda kind=kind, k=k, config=config: TritonOps(gemm=config)._product(
                torch.randn(1, ROWS, k, **where),
                quantize(torch.randn(128, k, **where), kind, "qkv"),
                torch.empty(1, ROWS, 128, **where),
            )

    compile_ahead(session, "gemm", compiling())
    compiled = time.monotonic()
    works = [(kind, role) for kind in session.kinds for role in sizes]
    each = (began + BOUND_S["gemm"] - 20 - compiled) / len(works)
    for number, (kind, role) in enumerate(works):
        n, k = sizes[role]
        # Several in turn, so that none is found in the L2 cache.
        many = [quantize(torch.randn(n, k, **where) / k**0.5, kind, role) for _ in range(4)]
        rows, tried = torch.randn(1, ROWS, k, **where), []
        expected = rounded(rows, many[0]).float() @ dequantize(many[0], torch.float32).t()
        out = torch.empty(1, ROWS, n, **where)
        for config in gemm_candidates(kind, role) if kind in BITS else (None,):
            if time.monotonic() > compiled + (number + 1) * each:
                break
            ops = TritonOps(gemm=config)
            try:
                found = ops._product(rows, many[0], out)
                error: Any = relative_error(_summed(found, many[0]), expected)
                right = error <= 4e-3
            except Exception as failure:  # one that does not fit must not end the search
                error, right = str(failure).strip().splitlines()[-1][:80], False
            ms = (
                session.try_ms(lambda o=ops, m=many, x=rows, y=out: [o._product(x, one, y) for one in m], 20)
                if right
                else 1e9
            )
            tried.append((ms / len(many), config, error))
        tried.sort(key=lambda entry: entry[0])
        names = {config: "library" if config is None else str(list(astuple(config))) for _, config, _ in tried}
        if kind in BITS and tried and tried[0][0] < 1e6:
            best = tried[0][1]
            name = "int4 fp8" if rounds(rows, many[0]) and kind == "int4" else kind
            kept[f"gemm {name} {ROWS} {n} {k}"] = list(astuple(best))
        flops = 2 * ROWS * n * k
        result[f"{kind} {role}"] = [
            {"way": names[config], "us": 1e3 * ms, "tflops": flops / ms / 1e9, "error": error}
            for ms, config, error in tried
        ]  # fmt: skip
        for ms, config, error in tried[:5]:
            print(f"{kind:5} {role:9} {1e3 * ms:8.1f} us {flops / ms / 1e9:6.0f} TFLOP/s  {names[config]}  {error}")
        print(f"  {len(tried)} tried; wrong:", [(names[c], e) for ms, c, e in tried if ms > 1e6] or "none")
    session.keep(kept)
    return result


def _summed(found: Any, matrix: Any) -> Any:
    """Return a product whose inputs programs may have shared."""
    if len(found) == 1:
        return found
    return found.sum(0) * (matrix.scale.view(-1) if matrix.kind == "int8" else 1.0)


def _attends(session: Session, ops: Any, weights: Any, cache: Any) -> bool:
    """Return True if six rows of attention match torch's and the last one computed alone has the same bits."""
    from vla_ros.engine.ops import Ops

    torch, shape = session.torch, weights.shape
    query = torch.randn(1, 6, shape.heads, shape.head_dim, device=weights.device).to(weights.dtype)
    at = torch.arange(283, 289, dtype=torch.int32, device=weights.device)[None]

    def attend(how: Any, rows: slice) -> Any:
        return how.attend(
            query[:, rows].contiguous(), cache, 0, how.locate(weights, cache, at[:, rows].contiguous())
        )

    try:
        together, alone = attend(ops, slice(None)), attend(ops, slice(5, None))
    except Exception:  # does not fit
        return False
    near = relative_error(together, attend(Ops(), slice(None))) <= 1e-2
    return near and bool(torch.equal(together[:, 5:], alone))


def stage_in_place(session: Session) -> dict[str, Any]:
    """Try the best of ``tune`` (if it ran) inside a whole pass of the 7B model, role by role, and attention."""
    if session.dry:
        return {"skipped": "needs CUDA"}
    from vla_ros.engine.decoder import verify
    from vla_ros.engine.ops import KVCache
    from vla_ros.engine.tile_configs import ATTENTION_CONFIG, AttentionConfig, SkinnyConfig
    from vla_ros.engine.triton_ops import TritonOps

    torch, subject = session.torch, session.subject()
    tuned = session.out / "tune.json"
    found = json.loads(tuned.read_text()) if tuned.exists() else {}
    chosen, result = session.found(), {}
    configs = {tuple(key.split()): SkinnyConfig(*chosen[key]) for key in chosen if key.count(" ") == 1}
    attention = AttentionConfig(*chosen["attention"]) if "attention" in chosen else ATTENTION_CONFIG
    start = torch.full((1,), 283, dtype=torch.int32, device=session.device)
    deadline = time.monotonic() + BOUND_S["in_place"] - 40
    for kind in session.kinds:
        weights = session.engine(kind, "none", subject).weights
        cache = KVCache.allocate(weights, 1, 304)
        for part in (*cache.keys, *cache.values):
            part.normal_()

        def measure(ops: Any, rows: int = 1, weights: Any = weights, cache: Any = cache) -> float:
            tokens = torch.zeros(1, rows, dtype=torch.int64, device=session.device)
            return session.try_ms(lambda: ops.choose(verify(weights, ops, cache, tokens, start)), 40)

        best = measure(TritonOps(configs, attention=attention))
        result[kind] = entry = {"tuned_alone": best}
        for matrix in (*weights.layers[0].matrices, weights.lm_head):
            key = (matrix.role, matrix.kind)
            tried = found.get(" ".join(key))
            for shape in [] if tried is None else [tried["config"], *(near[1:5] for near in tried["next"])]:
                if time.monotonic() > deadline:
                    break
                other = {**configs, key: SkinnyConfig(*shape)}
                ms = measure(TritonOps(other, attention=attention))
                if ms < best:
                    best, configs = ms, other
            entry[matrix.role] = [best, *(astuple(configs[key]) if key in configs else ())]
        for values in ATTENTION if kind == session.kinds[0] else ():
            ops = TritonOps(configs, attention=AttentionConfig(*values))
            ms = measure(ops) if _attends(session, ops, weights, cache) else float("inf")
            entry[f"attention {values}"] = ms
            if ms < best:
                best, attention = ms, AttentionConfig(*values)
        entry["six_rows"] = measure(TritonOps(configs, attention=attention), rows=6)  # as drafts need them
        session.keep({" ".join(key): list(astuple(config)) for key, config in configs.items()})
        session.keep({"attention": list(astuple(attention))})
        entry["pass_ms"], entry["gb_per_s"] = best, weights.nbytes / best / 1e6
        print(f"{kind}: {best:.3f} ms a pass, {entry['six_rows']:.3f} with six rows")
    return result


def stage_profile(session: Session) -> dict[str, Any]:
    """Return the time of each kernel in a plain answer, by name, in microseconds per answer."""
    from vla_ros.engine.executor import Request

    torch, subject = session.torch, session.subject()
    activity = torch.profiler.ProfilerActivity
    result: dict[str, Any] = {}
    for kind in session.kinds:
        engine = session.engine(kind, "none", subject)
        engine.warm_up([22])
        requests, rounds = [Request(*case) for case in session.inputs(subject, 1)], 2 if session.dry else 8
        for _ in range(3):
            answer = engine.answer(requests)[0]
        with torch.profiler.profile(activities=[activity.CPU if session.dry else activity.CUDA]) as profiler:
            for _ in range(rounds):
                engine.answer(requests)
        rows = []
        for event in profiler.key_averages():
            spent = event.self_cpu_time_total if session.dry else event.self_device_time_total
            if spent > 0:
                rows.append((round(spent / rounds, 1), event.count // rounds, event.key[:100]))
        rows.sort(reverse=True)
        result[kind] = {"stages_ms": answer.stages_ms, "kernels": rows[:28]}
        print(kind, answer.stages_ms, *rows[:28], sep="\n")
        engine.close()
        del engine
        torch.cuda.empty_cache()
    return result
