"""The Triton kernels in Triton's interpreter against torch, and what its compiler makes of them for Hopper.

Float16 stands for bfloat16, which the interpreter cannot multiply. The interpreter is chosen by an environment
variable when Triton is first imported, so each check is a process. No GPU is needed.
"""

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


def run(script, *words, **environment):
    """What a script says; it must succeed."""
    command = [sys.executable, str(HERE / script), *words]
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_equal_torch_in_the_interpreter(dtype):
    said = run("interpret_kernels.py", dtype, TRITON_INTERPRET="1")
    assert re.findall(r"equal (\w+)", said) == ["none", "int8", "int4", "fp8", "towers"]


def test_kernels_compile_for_hopper_without_spills():
    output = run("compile_kernels.py")
    lines = [line for line in output.splitlines() if line.startswith("kernel ")]
    assert len(lines) >= 90
    assert all(" spills 0 " in f"{line} " for line in lines), output
    # Unpacking must find every number where the tensor cores want it: see engine/lowbit.py.
    packed = [line for line in lines if re.match(r"kernel (?!norm|silu).* int[48] ", line)]
    assert len(packed) >= 20
    assert all(line.endswith(" moves 0") for line in packed), output
    products = [line for line in packed if line.startswith("kernel gemm")]
    assert all(" wgmma 0 " not in line and " serialized 0 hazards 0 " in line for line in products), output
    gemma = [
        line for line in lines if re.match(r"kernel gemma_((qkv|gate_up|o_proj|down_proj)_few|attend_many):", line)
    ]
    assert len(gemma) == 5
    assert all(" wgmma 0 " not in line and " cp.async 0 " not in line for line in gemma), output


@pytest.mark.parametrize("capability", ["86", "89", "120"])
def test_pis_kernels_fit_into_the_shared_memory_of_an_rtx_card(capability):
    """RTX 3090, 4090 and 5090 have 99 KiB for a program; a kernel that does not fit is replaced by torch."""
    lines = [line for line in run("compile_kernels.py", capability).splitlines() if line.startswith("kernel ")]
    assert len(lines) == 17
    needs = [(line, *map(int, re.search(r"spills (\d+) shared (\d+)", line).groups())) for line in lines]
    assert [line for line, spilled, shared in needs if spilled > 64 or shared > 99 * 1024] == []


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gemmas_kernels_equal_torch_in_the_interpreter(dtype):
    said = run("interpret_gemma.py", dtype, TRITON_INTERPRET="1")
    assert re.findall(r"equal (\w+)", said) == ["pi0", "pi05"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_groots_kernels_equal_torch_in_the_interpreter(dtype):
    said = run("interpret_groot.py", dtype, TRITON_INTERPRET="1")
    assert re.findall(r"equal (\w+)", said) == ["none", "fp8"]
