"""Shared parts of the tables of all measurements."""

from typing import Any

from vla_ros_lab.bench.times import row


def heading(result: dict[str, Any], *words: str) -> str:
    """Return a heading that names the measurement and the machine."""
    about = (result["dtype"], f"quantisation {result['quantization']}", *words, f"{result['steps']} steps")
    return f"{result['model']} on {result['machine']}, {', '.join(about)}, {result['graphs']}"


def stage_rows(result: dict[str, Any]) -> list[str]:
    """Return the rows of the stages, the time between them, and the whole step."""
    rows = {**result["stages_ms"], "between stages": result["between_ms"]}
    rows |= {f"total {name}": value for name, value in result["total_ms"].items()}
    return [*(row(name, value) for name, value in rows.items()), *share_rows(result)]


def share_rows(result: dict[str, Any]) -> list[str]:
    """Return p50 and p99 of what the device, the upload and the host take of a step, and of a message's arrival."""
    named = {"device": "device_ms", "upload": "upload_ms", "host": "host_ms", "arrival": "slot_ms"}
    return [row(f"{name} p50, p99", *result[key].values()) for name, key in named.items()]


def footing(result: dict[str, Any]) -> str:
    return (
        f"measured: copy {result['bandwidth_gb_per_s']:.0f} GB/s, product {result['tflops']:.2f} TFLOP/s; "
        f"memory {result['memory_gb']:.2f} GB; load {result['load_s']:.1f} s, "
        f"first action after {result['first_action_s']:.1f} s"
    )
