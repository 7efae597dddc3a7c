"""Numerical tolerances by data type, used by the start-up checks and by tests."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerances:
    """Allowed differences between two ways to compute the same, for one data type."""

    # Relative error of a matrix product: several times the effect of a different order of rounding (1e-2 was
    # measured after two products in bfloat16).
    product: float
    # Error of a single value of a product, relative to its magnitude plus the root mean square of all values
    # (3.5e-2 was measured in bfloat16). The relative error of the product hardly changes if a few values are wrong.
    element: float
    # Relative error of patch embeddings. With random weights in OpenVLA's sizes, a different order of the norms'
    # sums changes them by 1e-6 (float32) and 1.2e-2 (bfloat16), as much as rounding does; a missing step changes
    # them by far more.
    vision: float
    # Logit margin up to which a different order of rounding may choose a different token. In bfloat16, the logits
    # of a drafted prefill and of decoding differed by at most 0.12; the engine and the reference path may differ
    # more.
    near_tie: float
    guard: float  # minimum logit margin for accepting a drafted row of a prefill


TOLERANCES = {
    torch.float32: Tolerances(product=1e-4, element=5e-4, vision=1e-4, near_tie=1e-3, guard=1e-3),
    torch.bfloat16: Tolerances(product=2e-2, element=1e-1, vision=1e-1, near_tie=0.5, guard=0.25),
    torch.float16: Tolerances(product=2e-2, element=1e-1, vision=1e-1, near_tie=0.5, guard=0.06),
}

SEES = 1e-4
"""Minimum change of logits between two images, relative to the logits' spread; rounding changes them less."""

GUARD_SLACK = 3.0
"""Ratio of the guard to the largest difference measured on two images; other images may differ more."""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the error's norm relative to the norm of ``expected``; NaN stays NaN and so fails every ``<=``."""
    found, expected = found.double(), expected.double()
    return float(((found - expected).norm() / expected.norm()).item())
