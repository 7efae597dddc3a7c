"""The Triton kernels in Triton's interpreter against torch.

Float16 stands for bfloat16, which the interpreter cannot multiply. The interpreter is chosen by an environment
variable when Triton is first imported, so the checks run in a process of their own; that the kernels also compile
for the GPU is checked in another (no GPU is needed for that).
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (it comes with torch for CUDA)"
)


def run(script: str, *words: str, **environment: str) -> str:
    command = [sys.executable, str(Path(__file__).with_name(script)), *words]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={**os.environ, **environment}, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_in_the_interpreter(kind, dtype):
    assert "equal" in run("interpret_kernels.py", kind, dtype, TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_vision_towers_in_the_interpreter(dtype):
    assert "equal" in run("interpret_towers.py", dtype, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_spills():
    output = run("compile_kernels.py")
    lines = [line for line in output.splitlines() if line.startswith("kernel ")]
    assert len(lines) >= 15
    assert all(" spills 0 " in f"{line} " for line in lines), output
    # What unpacks must find every number where the matrix units want it: see engine/lowbit.py.
    packed = [line for line in lines if re.match(r"kernel (?!dequantize|sum).* int[48] ", line)]
    assert len(packed) >= 20
    assert all(line.endswith(" moves 0") for line in packed), output
    products = [line for line in packed if line.startswith("kernel gemm")]
    assert all(" wgmma 0 " not in line and " serialized 0 hazards 0 " in line for line in products), output
