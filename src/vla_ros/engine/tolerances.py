"""Numerical tolerances by data type, used by the start-up checks and by tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerances:
    """Bounds for one data type."""

    # Relative error of a matrix product: several times what another order of rounding makes of it (1e-2 was seen
    # behind two products in bfloat16).
    product: float
    # Error of a single number of a product, as a share of itself and of the mean (3.5e-2 was seen in bfloat16); a
    # few wrong numbers do not show in the norm.
    element: float
    # Relative error of patch embeddings. Another order of the norms' sums moves those of random weights in
    # OpenVLA's sizes by 1e-6 (float32) and 1.2e-2 (bfloat16), as much as rounding itself does; a step left out, by
    # far more.
    vision: float
    # Logit margin up to which another order of rounding may choose another token. In bfloat16 a drafted prefill and
    # decoding lay 0.12 apart at most; the other layers add to that.
    near_tie: float
    guard: float  # minimum logit margin for accepting a drafted row of a prefill


TOLERANCES = {
    torch.float32: Tolerances(product=1e-4, element=5e-4, vision=1e-4, near_tie=1e-3, guard=1e-3),
    torch.bfloat16: Tolerances(product=2e-2, element=1e-1, vision=1e-1, near_tie=0.5, guard=0.25),
    torch.float16: Tolerances(product=2e-2, element=1e-1, vision=1e-1, near_tie=0.5, guard=0.06),
}

SEES = 1e-4
"""Least change of a logit between two images, as a share of the logits' spread. Rounding stays below it."""

GUARD_SLACK = 3.0
"""The guard in units of the largest difference that two images showed: others may show more."""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the error in the norm; NaN stays NaN and fails every ``<=``."""
    found, expected = found.double(), expected.double()
    return float(((found - expected).norm() / expected.norm()).item())
