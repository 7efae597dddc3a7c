"""Names of the checkpoints that come with the package, and the policies that run them."""

from pathlib import Path

SHIPPED = {"demo": "openvla", "demo-pi": "pi"}
"""Maps ``policy.checkpoint`` to ``policy.name``. All were trained on the simulated table."""


def folder_of(name: str) -> Path:
    return Path(__file__).resolve().parent / SHIPPED[name] / "demo_checkpoint"
