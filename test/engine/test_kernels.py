"""The Triton kernels in Triton's interpreter against torch, and what its compiler makes of them for Hopper.

Float16 stands for bfloat16, which the interpreter cannot multiply. The interpreter is chosen by an environment
variable when Triton is first imported, so each check is a process; they run beside each other. No GPU is needed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (extra 'dev')"),
]
HERE = Path(__file__).parent
CHECKS = {
    "float32": ["interpret_kernels.py", "float32"],
    "float16": ["interpret_kernels.py", "float16"],
    "compiled": ["compile_kernels.py"],
    "gemma_float32": ["interpret_gemma.py", "float32"],
    "gemma_float16": ["interpret_gemma.py", "float16"],
    "gemma_compiled": ["compile_gemma.py"],
}


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """All checks, started at once: a function that waits for one and gives its output."""
    folder, running = tmp_path_factory.mktemp("kernels"), {}
    for name, (script, *words) in CHECKS.items():
        interpret = {} if name.endswith("compiled") else {"TRITON_INTERPRET": "1"}
        with (folder / name).open("w") as output:
            running[name] = subprocess.Popen(
                [sys.executable, str(HERE / script), *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **interpret},
            )

    def finish(name):
        status = running[name].wait(560)
        said = (folder / name).read_text()
        assert status == 0, said
        return said

    yield finish
    for process in running.values():
        process.kill()
        process.wait(30)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_equal_torch_in_the_interpreter(checks, dtype):
    assert re.findall(r"equal (\w+)", checks(dtype)) == ["none", "int8", "int4", "fp8", "towers"]


def test_kernels_compile_for_hopper_without_spills(checks):
    output = checks("compiled")
    lines = [line for line in output.splitlines() if line.startswith("kernel ")]
    assert len(lines) >= 15
    assert all(" spills 0 " in f"{line} " for line in lines), output
    # Unpacking must find every number where the tensor cores want it: see engine/lowbit.py.
    packed = [line for line in lines if re.match(r"kernel (?!dequantize|sum).* int[48] ", line)]
    assert len(packed) >= 20
    assert all(line.endswith(" moves 0") for line in packed), output
    products = [line for line in packed if line.startswith("kernel gemm")]
    assert all(" wgmma 0 " not in line and " serialized 0 hazards 0 " in line for line in products), output


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gemmas_kernels_equal_torch_in_the_interpreter(checks, dtype):
    assert re.findall(r"equal (\w+)", checks(f"gemma_{dtype}")) == ["pi0", "pi05"]


def test_gemmas_kernels_compile_for_hopper_without_spills(checks):
    lines = [line for line in checks("gemma_compiled").splitlines() if line.startswith("kernel ")]
    assert len(lines) >= 10
    assert all(" spills 0 " in f"{line} " for line in lines), lines
    products = [
        line for line in lines if re.match(r"kernel gemma_(qkv|gate_up|o_proj|down_proj|attend_many)", line)
    ]
    assert all(" wgmma 0 " not in line and " cp.async 0 " not in line for line in products), lines
