"""How kernels are cut and pipelined, and the cuts that are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vla_ros.engine.lowbit import WIDTH

SKINNY = 64
"""Up to this many rows a product is bound by its weight, and the kernels of ``linear`` are used."""

PACKED_ROWS = 32
"""Rows that one program multiplies with packed weights; of more rows, each 32 have programs of their own."""


@dataclass(frozen=True)
class Launch:
    """How a kernel of ``linear`` is cut and pipelined.

    Attributes:
        outputs: Outputs per program (pairs for ``qkv`` and ``gate_up``).
        inputs: Inputs per step. Of packed weights each stretch is summed apart, spread over the warps, until the
            end.
        warps: Warps per program.
        stages: Steps whose loads are in flight, and the one that is multiplied.
    """

    outputs: int = 16
    inputs: int = 256
    warps: int = 4
    stages: int = 4

    def fit(self, outputs: int, inputs: int, step_bytes: Callable[[Launch], int], shared: int) -> Launch:
        """The nearest launch that divides a weight [outputs, inputs] and whose loads in flight find room.

        Fewer steps in flight, then shorter ones; neither changes the order in which products are added up.

        Args:
            outputs: Of the weight, pairs for ``qkv`` and ``gate_up``.
            inputs: Of the weight.
            step_bytes: What one step loads.
            shared: Bytes of shared memory that a program may have.
        """
        fitting = replace(self, outputs=divisor(outputs, self.outputs), inputs=divisor(inputs, self.inputs))
        fitting = fitting._shallower(step_bytes, shared)
        while step_bytes(fitting) > shared and fitting.inputs > 32:
            fitting = replace(fitting, inputs=fitting.inputs // 2)
        return fitting

    def fit_packed(
        self, outputs: int, step_bytes: Callable[[Launch, int], int], rows: int, shared: int, least: int = 16
    ) -> Launch:
        """As :meth:`fit`, for packed weights.

        What a step takes decides the order in which products are added up: it must not depend on the rows, or
        verifying several would not give the bits of decoding one. So the most rows of a program decide it.

        Args:
            outputs: Of the weight, pairs for ``qkv`` and ``gate_up``.
            step_bytes: What one step loads for so many rows.
            rows: Rows of a program.
            shared: Bytes of shared memory that a program may have.
            least: Outputs of one matrix instruction, 8 where they are pairs.
        """
        fitting = replace(self, outputs=divisor(outputs, self.outputs))
        while step_bytes(fitting, PACKED_ROWS) > shared and fitting.inputs > WIDTH:
            fitting = replace(fitting, inputs=fitting.inputs // 2, warps=max(1, fitting.warps // 2))
        if rows > 16:
            # Sums of many rows fill the registers of a warp: half as many outputs, but whole matrix instructions.
            fitting = replace(fitting, outputs=max(fitting.outputs // 2, min(fitting.outputs, least)))
        return fitting._shallower(lambda launch: step_bytes(launch, rows), shared)

    def _shallower(self, step_bytes: Callable[[Launch], int], shared: int) -> Launch:
        fitting = self
        while (fitting.stages - 1) * step_bytes(fitting) > shared and fitting.stages > 2:
            fitting = replace(fitting, stages=fitting.stages - 1)
        return fitting


LAUNCHES: dict[tuple[str, str], Launch] = {
    ("qkv", "dense"): Launch(16, 128, 1, 4),
    ("output", "dense"): Launch(16, 512, 2, 3),
    ("gate_up", "dense"): Launch(32, 128, 4, 3),
    ("down", "dense"): Launch(16, 512, 1, 6),
    ("head", "dense"): Launch(32, 128, 1, 3),
    ("qkv", "int8"): Launch(16, 512, 4, 3),
    ("output", "int8"): Launch(32, 256, 4, 4),
    ("gate_up", "int8"): Launch(32, 256, 4, 3),
    ("down", "int8"): Launch(32, 1024, 8, 4),
    ("qkv", "int4"): Launch(16, 512, 4, 3),
    ("output", "int4"): Launch(32, 1024, 4, 3),
    ("gate_up", "int4"): Launch(32, 512, 4, 3),
    ("down", "int4"): Launch(32, 1024, 4, 3),
}
"""By role and kind of weight, as ``benchmarks/gpu_session.py`` found them on an H200."""


@dataclass(frozen=True)
class AttentionLaunch:
    """How the attention of a few rows is cut.

    Attributes:
        columns: Positions per step.
        warps: Warps per program.
        stages: Steps whose loads are in flight.
        splits: Programs that share a head, each with every so many-th step. It decides the order of sums: it must
            not depend on the rows.
    """

    columns: int = 64
    warps: int = 4
    stages: int = 1
    splits: int = 5


ATTENTION = AttentionLaunch()
"""As the benchmark found it on an H200."""


@dataclass(frozen=True)
class Tile:
    """How a product of many rows with a packed weight is cut.

    Attributes:
        outputs: Outputs per program.
        rows: Rows per program, a power of two.
        tail: Rows beyond these, 0 or a power of two from 16 on.
        warps: Warps per program.
        stages: Steps whose loads are in flight.
        registers: Most registers per thread; None leaves it to the compiler. 128 lets two programs of 8 warps run
            on one processor.
        splits: Programs that share the inputs; each leaves float32 sums, which one kernel more adds in their order.
        parts: Stretches per step, see :mod:`vla_ros.engine.lowbit`; more of them need fewer
            instructions each, and more shared memory.
    """

    outputs: int = 128
    rows: int = 128
    tail: int = 16
    warps: int = 8
    stages: int = 2
    registers: int | None = None
    splits: int = 1
    parts: int = 1


_THREE = Tile(64, 128, 16, 4, 3, 168)
_SHARED = Tile(128, 128, 16, 8, 4, 128, splits=4)

TILED: dict[tuple[str, int, int, int], Tile | None] = {
    ("int8", 288, 12288, 4096): _THREE,
    ("int8", 288, 22016, 4096): Tile(128, 64, 32, 8, 3, 128, parts=2),
    ("int8", 288, 4096, 4096): _SHARED,
    ("int8", 288, 4096, 11008): _SHARED,
    ("int4", 288, 12288, 4096): _THREE,
    ("int4", 288, 22016, 4096): Tile(128, 64, 32, 8, 3, 128),
    ("int4", 288, 4096, 4096): _THREE,
    ("int4", 288, 4096, 11008): Tile(128, 128, 16, 8, 3, None, splits=2),
}
"""Kind of weight, rows, outputs and inputs to the tile that ``benchmarks/gpu_session.py`` found best on an H200,
for OpenVLA-7B with a usual prompt; None dequantises first."""

TILED_FOR = 132
"""Processors of the GPUs that these hold for: H100 and H200 (SXM)."""

TILES = (
    Tile(rows=64, tail=32, stages=3, registers=128),
    Tile(rows=64, tail=16, stages=3, registers=128),
    Tile(rows=128, tail=16),
    Tile(rows=128, tail=32),
    Tile(rows=128, tail=64),
    Tile(rows=128, tail=0),
)
"""What :func:`choose_tile` chooses from; reckoned, not measured."""


def choose_tile(kind: str, rows: int, outputs: int, inputs: int, processors: int) -> Tile | None:
    """The tile for a product; None where dequantising the weight first is known to be better.

    What was not measured (:data:`TILED`) is chosen by a model: waves of programs over the processors, times rows of
    a program. Unpacking and filling the pipeline count like 24 rows.
    """
    if processors == TILED_FOR and (kind, rows, outputs, inputs) in TILED:
        return TILED[kind, rows, outputs, inputs]

    def cost(tile: Tile) -> int:
        programs = -(-rows // (tile.rows + tile.tail)) * -(-outputs // tile.outputs)
        return -(-programs // processors) * (tile.rows + tile.tail + 24)

    return min(TILES, key=cost)


def divisor(number: int, most: int) -> int:
    """Largest power of two that divides ``number`` and is at most ``most``."""
    return min(most, number & -number)
