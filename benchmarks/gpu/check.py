"""Checks correctness before anything is timed: every kernel against float64, and the required guard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu.common import Session, make_layer, relative_error, shape_of, wide

RELATIVE = {"float32": 1e-5, "bfloat16": 6e-3}
FP8_PROMPT = 8e-2
TOWERS = {"float32": 1e-5, "bfloat16": 3e-2}
"""Over all blocks; another order of the norms' sums makes 1e-6 and 1.2e-2 of it on a CPU."""


def stage_kernels(session: Session) -> dict[str, Any]:
    """Check every kernel against float64 with new random inputs; a row must not depend on its neighbours."""
    from vla_ros.engine.device_ops import make_ops

    torch, result = session.torch, {}
    for name in ("bfloat16", "float32"):
        for what in (*session.kinds, "towers"):
            try:
                entry = _towers(session, name) if what == "towers" else _against_float64(session, name, what)
            except Exception as error:  # one kind that fails must not hide the others
                entry = {"failed": str(error).strip().splitlines()[-1][:200], "ok": False}
            result[f"{name} {what}"] = entry
            print(name, what, entry)
    table = torch.randn(1, 9, 32064, device=session.device)
    table[0, 3, [5, 32000]], table[0, 4, 7] = 9.0, float("nan")
    tokens, margins = make_ops(session.device).choose(table)
    keep = [0, 1, 2, 3, 5, 6, 7, 8]
    good = torch.equal(tokens[0, keep].cpu(), table[0, keep].cpu().argmax(-1)) and bool(margins[0, 4].isnan())
    result["choose"] = {"ok": good}
    result["ok"] = all(entry["ok"] for entry in result.values())
    return result


def _against_float64(session: Session, name: str, kind: str) -> dict[str, Any]:
    """Errors of a layer's prefill and verification of six tokens, and whether rows computed alone are equal."""
    from vla_ros.engine.decoder import prefill, verify
    from vla_ros.engine.device_ops import make_ops
    from vla_ros.engine.ops import KVCache, Ops

    torch = session.torch
    weights = make_layer(session, kind, getattr(torch, name), shape_of(session))
    exact, ops, reference = wide(weights), make_ops(session.device), Ops()
    patches = torch.randn(2, 64, weights.shape.hidden_size, device=session.device).to(weights.dtype)
    text = torch.randint(0, 300, (2, 40), device=session.device)
    last = torch.tensor([90, 95], dtype=torch.int32, device=session.device)
    fed = torch.randint(0, 300, (2, 6), device=session.device)
    outputs = []
    for one, how in ((weights, ops), (exact, reference)):
        cache = KVCache.allocate(one, 2, 128)
        for part in (*cache.keys, *cache.values):
            part.fill_(1e4)  # poison: what is not written shows
        first = prefill(one, how, cache, patches.to(one.dtype), text, last, 7)
        outputs.append((first, verify(one, how, cache, fed, last + 1), cache))
    errors = [relative_error(a, b) for a, b in zip(outputs[0][:2], outputs[1][:2], strict=True)]
    cache = outputs[0][2]
    alone = torch.cat([verify(weights, ops, cache, fed[:, i : i + 1], last + 1 + i) for i in range(6)], dim=1)
    bits = torch.equal(alone, outputs[0][1])
    again = verify(weights, ops, cache, fed, last + 1)
    # FP8's reference does not quantise the prompt's activations, which the last layer's keys and values come from.
    allowed = (FP8_PROMPT, FP8_PROMPT) if kind == "fp8" else (RELATIVE[name], RELATIVE[name])
    good = (
        all(one <= most for one, most in zip(errors, allowed, strict=True))
        and torch.equal(again, outputs[0][1])
        and (bits or session.dry)
    )
    return {"prefill": errors[0], "verify": errors[1], "rows_equal": bits, "ok": good}


def _towers(session: Session, name: str) -> dict[str, Any]:
    """Compare the vision encoder with the reference path on random images, both as graphs."""
    from vla_ros.bench.models import OPENVLA_7B, random_model
    from vla_ros.engine.towers import TowerOps
    from vla_ros.policies.openvla.tiny import tiny_architecture
    from vla_ros.policies.openvla.vision_encoder import VisionEncoder

    torch, dtype = session.torch, getattr(session.torch, name)
    whole = tiny_architecture() if session.dry else OPENVLA_7B
    model = random_model(replace(whole, llm=replace(whole.llm, layers=1)), session.device, dtype)
    size, errors, result = whole.image_size, [], {}
    with torch.inference_mode():
        fused, plain = VisionEncoder(model), VisionEncoder(model, TowerOps())
        for batch in (1, 1, 2):
            images = torch.randint(0, 256, (batch, size, size, 3), device=session.device).to(torch.uint8)
            errors.append(relative_error(fused(images), model.embed_image(model.normalize(images))))
        image = images[:1].contiguous()
        for what, encode in (("fused_ms", fused), ("plain_ms", plain)):
            result[what] = session.time_ms(lambda encode=encode: encode(image))
    return {"errors": errors, **result, "ok": all(error <= TOWERS[name] for error in errors)}


def stage_guard(session: Session) -> dict[str, Any]:
    """Measure by how much logits of a drafted prefill and of decoding differ; the guard must exceed this."""
    import numpy as np

    engine, rng = session.engine(), np.random.default_rng(1)
    cases = session.inputs(session.subject(), 2 if session.dry else 40)
    found = [engine.draft_error(image, prompt, rng.integers(0, 300, 7)) for image, prompt in cases]
    return {"max": max(found), "median": float(np.median(found)), "guard": engine.guard}
