"""The search for launch sizes, first product by product, then inside a whole pass."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

from gpu.common import BOUND_S, Session, compile_ahead, make_layer, relative, shape_of

ATTENTION_CUTS = ((64, 4, 3, 1), (32, 2, 2, 9), (64, 4, 2, 5), (64, 4, 1, 5), (64, 2, 1, 5), (128, 4, 1, 3))
"""Of :class:`~vla_ros.engine.launches.AttentionLaunch`."""


INPUTS = {"none": (128, 256, 512), "int8": (128, 256, 512, 1024), "int4": (256, 512, 1024, 2048)}
"""Of :class:`~vla_ros.engine.launches.Launch`, by kind of weight."""


def candidates(kinds: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Role, kind of weight and launch of everything that ``tune`` tries."""
    from vla_ros.engine.launches import Launch

    for kind in kinds:
        for role in ("gate_up", "down", "output", "qkv", *(("head",) if kind == "none" else ())):
            pairs = 2 if role in ("qkv", "gate_up") else 1
            for outputs in (8, 16, 32, 64) if pairs == 2 else (16, 32, 64):
                for inputs in INPUTS[kind]:
                    for warps in (1, 2, 4) if kind == "none" else (2, 4, 8):
                        for stages in (3, 4, 6):
                            launch = Launch(outputs, inputs, warps, stages)
                            if _sensible(launch, kind, pairs):
                                yield role, kind, launch


def _sensible(launch: Any, kind: str, pairs: int) -> bool:
    """What has room and gives every warp something to do."""
    from vla_ros.engine.lowbit import BITS, stretch

    outputs = launch.outputs * pairs
    if kind != "none":
        # A warp has one or two parts, and 64 outputs of them in registers.
        bits = BITS[kind]
        parts, shared = (
            launch.inputs // stretch(bits),
            (outputs * bits // 8 + 16) * launch.inputs * (launch.stages - 1),
        )
        return shared < 220_000 and parts // 2 <= launch.warps <= parts and 16 <= outputs <= 64
    # Weights and rows in flight; registers of one warp hold 64 outputs at most.
    return (outputs + 16) * launch.inputs * 2 * launch.stages < 200_000 and outputs <= 64 * launch.warps


class Bed:
    """One layer's products on random weights; several layers in turn, so that none is found in the cache.

    Args:
        session: The session.
        kind: Of the weights.
        copies: Layers.
    """

    def __init__(self, session: Session, kind: str, copies: int) -> None:
        torch, shape = session.torch, shape_of(session)
        self.sets = [make_layer(session, kind, torch.bfloat16, shape) for _ in range(copies)]
        self.stored = {"none": "dense"}.get(kind, kind)
        where = {"device": session.device, "dtype": torch.bfloat16}
        self.at = torch.full((1, 1), 290, dtype=torch.int32, device=session.device)
        self.hidden, self.first = torch.randn(1, shape.hidden_size, **where), self.at.long() * 0
        self.mixed = torch.randn(1, 1, shape.intermediate_size, **where)
        self.attended = torch.randn(1, 1, shape.heads * shape.head_dim, **where)
        self.cache = torch.zeros(2, 1, shape.kv_heads, 320, shape.head_dim, **where)

    def work(self, role: str, ops: Any) -> None:
        """One product of every layer."""
        stream = ops.pick(self.hidden, self.first, self.sets[0].norm)
        for one in self.sets:
            self._product(role, ops, one, stream)

    def error(self, role: str, ops: Any) -> float:
        """How far a product lies from torch's, relatively; products of more rows than one must hold its bits."""
        from vla_ros.engine.ops import TorchOps

        one = self.sets[0]
        ours, theirs = (
            self._product(role, how, one, how.pick(self.hidden, self.first, one.norm)) for how in (ops, TorchOps())
        )
        return relative(ours, theirs)

    def _product(self, role: str, ops: Any, one: Any, stream: Any) -> Any:
        layer = one.layers[0]
        if role == "qkv":
            return ops.qkv(one, layer, stream, self.at, self.cache[0], self.cache[1])
        if role == "down":
            return ops.add_linear(stream, self.mixed, layer.down, layer.mlp_norm).hidden
        if role == "output":
            return ops.add_linear(stream, self.attended, layer.output, layer.mlp_norm).hidden
        return ops.gate_up(one, layer, stream) if role == "gate_up" else ops.head(one, stream)

    def nbytes(self, role: str) -> int:
        """Weights that one product reads."""
        one = self.sets[0]
        layer = one.layers[0]
        return int((one.head if role == "head" else getattr(layer, role)).nbytes)


def stage_compile(session: Session) -> dict[str, Any]:
    """Compile what ``tune`` tries, on all cores; part of ``tune``."""
    from vla_ros.engine.triton_ops import TritonOps

    part, parts = (int(word) for word in os.environ["PART"].split("/"))
    beds = {kind: Bed(session, kind, 1) for kind in session.kinds}
    for role, kind, launch in list(candidates(session.kinds))[part::parts]:
        with contextlib.suppress(Exception):  # tune meets it again and says so
            beds[kind].work(role, TritonOps({(role, beds[kind].stored): launch}))
    return {}


def stage_tune(session: Session) -> dict[str, Any]:
    """Every role and kind with many launches; the best are kept in launches.json."""
    torch = session.torch
    if session.dry:
        return {"skipped": "needs CUDA"}
    from vla_ros.engine.launches import LAUNCHES
    from vla_ros.engine.triton_ops import TritonOps

    began = time.monotonic()
    compile_ahead(session, "compile")
    best, found = {}, {}
    table: dict[str, Any] = {"compiled_s": round(time.monotonic() - began, 1)}
    deadline, kind_now, bed = began + BOUND_S["tune"] - 20, "", None
    for role, kind, launch in candidates(session.kinds):
        if time.monotonic() > deadline:
            break
        if kind != kind_now:
            bed, kind_now = None, kind
            torch.cuda.empty_cache()
            bed = Bed(session, kind, {"none": 3, "int8": 5, "int4": 8}[kind])  # 1.2 GB: more than the L2
        assert bed is not None
        ops, key = TritonOps({(role, bed.stored): launch}), (role, bed.stored)
        try:
            wrong = bed.error(role, ops)
            if not wrong <= 1e-2:
                table.setdefault("wrong", []).append([*key, *astuple(launch), wrong])
                continue
            ms = session.time_ms(lambda r=role, o=ops, b=bed: b.work(r, o), 12) / len(bed.sets)
        except Exception:  # one launch that does not fit must not end the search
            ms = 1e9
        found.setdefault(key, []).append((ms, launch, bed.nbytes(role)))
    for (role, stored), tried in found.items():
        tried.sort(key=lambda entry: entry[0])
        ms, launch, nbytes = tried[0]
        now = [entry[0] for entry in tried if entry[1] == LAUNCHES[role, stored]]
        best[f"{role} {stored}"] = list(astuple(launch))
        table[f"{role} {stored}"] = {
            "us": 1e3 * ms, "gb_per_s": nbytes / ms / 1e6, "launch": best[f"{role} {stored}"],
            "default_us": 1e3 * now[0] if now else None, "tried": len(tried),
            "next": [(round(1e3 * entry[0], 2), *astuple(entry[1])) for entry in tried[1:6]],
        }  # fmt: skip
        print(f"{role:8} {stored:6} {1e3 * ms:7.1f} us {nbytes / ms / 1e9:5.2f} TB/s  {best[f'{role} {stored}']}")
    print("wrong numbers:", table.get("wrong", "none"))
    session.keep(best)
    return table


def _attends(session: Session, ops: Any, shape: Any, cache: Any) -> bool:
    """Whether six rows of attention are torch's, and the last of them alone has the same bits."""
    from vla_ros.engine.ops import TorchOps

    torch, keys, values = session.torch, cache.keys[0], cache.values[0]
    query = torch.randn(1, 6, shape.heads, shape.head_dim, device=keys.device).to(keys.dtype)
    at = torch.arange(283, 289, dtype=torch.int32, device=keys.device)[None]
    try:
        together = ops.attend(query, keys, values, at, cache.arrived)
        alone = ops.attend(query[:, 5:].contiguous(), keys, values, at[:, 5:].contiguous(), cache.arrived)
    except Exception:  # does not fit
        return False
    near = relative(together, TorchOps().attend(query, keys, values, at)) <= 1e-2
    return near and bool(torch.equal(together[:, 5:], alone))


def stage_in_place(session: Session) -> dict[str, Any]:
    """The best launches of ``tune`` (if it ran) inside a whole pass of the 7B, role by role; cuts of attention."""
    if session.dry:
        return {"skipped": "needs CUDA"}
    from vla_ros.engine import launches as cuts
    from vla_ros.engine import triton_ops
    from vla_ros.engine.decoder import Cache, verify

    torch, subject = session.torch, session.subject()
    tuned = session.out / "tune.json"
    found = json.loads(tuned.read_text()) if tuned.exists() else {}
    chosen = session.found()
    result: dict[str, Any] = {}
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=session.device)
    start = torch.full((1,), 283, dtype=torch.int32, device=session.device)
    deadline = time.monotonic() + BOUND_S["in_place"] - 40
    for kind in session.kinds:
        stored = {"none": "dense"}.get(kind, kind)
        weights = session.engine(subject, {"int4": "nf4"}.get(kind, kind), drafts="none").weights
        cache = Cache.allocate(weights, 1, 304)
        for part in (*cache.keys, *cache.values):
            part.normal_()

        def measure(ops: Any, weights: Any = weights, cache: Any = cache) -> float:
            try:
                return session.time_ms(lambda: ops.choose(verify(weights, ops, cache, tokens, start)), 40)
            except Exception:  # does not fit
                return 1e9

        launches = {
            tuple(key.split()): cuts.Launch(*values) for key, values in chosen.items() if key.count(" ") == 1
        }
        attention = cuts.AttentionLaunch(*chosen["attention"]) if "attention" in chosen else cuts.ATTENTION
        best = measure(triton_ops.TritonOps(launches, attention=attention))
        result[stored] = entry = {"tuned_alone": best}
        for role in ("gate_up", "down", "output", "qkv", "head"):
            key = (role, stored if (role, stored) in launches else "dense")
            tried = found.get(" ".join(key))
            if tried is None:  # of a kind that was not tuned
                continue
            shapes = [tuple(tried["launch"][:4]), *(tuple(near[1:5]) for near in tried["next"])]
            for shape in dict.fromkeys(shapes):
                if time.monotonic() > deadline:
                    break
                other = {**launches, key: cuts.Launch(*shape)}
                ms = measure(triton_ops.TritonOps(other, attention=attention))
                if ms < best:
                    best, launches = ms, other
            entry[role] = [best, *astuple(launches[key])]
        if kind == session.kinds[0]:
            for cut in ATTENTION_CUTS:
                variant = cuts.AttentionLaunch(*cut)
                ops = triton_ops.TritonOps(launches, attention=variant)
                if not _attends(session, ops, weights.shape, cache):
                    entry[f"attention {cut}"] = "wrong, or does not fit"
                    continue
                ms = measure(ops)
                entry[f"attention {cut}"] = ms
                if ms < best:
                    best, attention = ms, variant
            entry["attention"] = [best, *astuple(attention)]
        # Passes of seven rows, as drafts need them.
        rows = torch.zeros(1, 6, dtype=torch.int64, device=session.device)
        ops = triton_ops.TritonOps(launches, attention=attention)
        entry["six_rows"] = session.time_ms(lambda o=ops, r=rows, w=weights, c=cache: verify(w, o, c, r, start), 15)
        session.keep({" ".join(key): list(astuple(launch)) for key, launch in launches.items()})
        session.keep({"attention": list(astuple(attention))})
        chosen = session.found()
        entry["pass_ms"], entry["gb_per_s"] = best, weights.nbytes / best / 1e6
        print(f"{stored}: {best:.3f} ms a pass, {entry['six_rows']:.3f} with six rows")
    return result


def stage_profile(session: Session) -> dict[str, Any]:
    """What each kernel of a plain answer and of a verifying pass costs, by name, in microseconds per answer."""
    torch, subject = session.torch, session.subject()
    activity = torch.profiler.ProfilerActivity
    result: dict[str, Any] = {}
    for kind in ("none", "nf4"):
        engine = session.engine(subject, kind, drafts="none")
        engine.warm_up([22])
        ((image, prompt),) = session.inputs(subject, 1)
        rounds = 2 if session.dry else 8
        for _ in range(3):
            answer = engine.answer(image, [prompt])[0]
        result[f"{kind} stages_ms"] = answer.stages_ms
        with torch.profiler.profile(activities=[activity.CPU if session.dry else activity.CUDA]) as profiler:
            for _ in range(rounds):
                engine.answer(image, [prompt])
        rows = []
        for event in profiler.key_averages():
            spent = event.self_cpu_time_total if session.dry else event.self_device_time_total
            if spent > 0:
                rows.append((round(spent / rounds, 1), event.count // rounds, event.key[:100]))
        rows.sort(reverse=True)
        result[kind] = rows[:28]
        print(kind, answer.stages_ms)
        for row in rows[:28]:
            print(*row)
        engine.close()
        del engine
        torch.cuda.empty_cache()
    return result
