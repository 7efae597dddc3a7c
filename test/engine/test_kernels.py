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
    pytest.mark.timeout(1300),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (extra 'dev')"),
]
HERE = Path(__file__).parent


def run(script, *words, **environment):
    """What a script says; it must succeed."""
    command = [sys.executable, str(HERE / script), *words]
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1260, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_equal_torch_in_the_interpreter(dtype):
    said = run("interpret_kernels.py", dtype, TRITON_INTERPRET="1")
    quantized = ["int8", "int4"] if dtype == "float32" else ["int4", "fp8"]
    assert re.findall(r"equal (\w+)", said) == ["none", *quantized, "towers"]


def compiled(capability):
    """Names of kernels to what the compiler says of them."""
    lines = re.findall(r"kernel (.*): (registers .*)", run("compile_kernels.py", capability))
    return {name: dict(re.findall(r"(\S+) (\S+)", words)) for name, words in lines}


def test_kernels_compile_for_hopper():
    """At most 64 bytes are spilled, by products that have at most 128 registers."""
    made = compiled("9.0")
    assert {one["fits"] for one in made.values()} == {"True"}, made
    # Unpacking must find every number where the tensor cores want it: see engine/lowbit.py.
    packed = {name: one for name, one in made.items() if "KIND int" in name or name.startswith("gemm_fp8")}
    assert len(packed) >= 12
    assert {one["moves"] for one in packed.values()} == {"0"}, packed
    products = {name: one for name, one in packed.items() if name.startswith("gemm")}
    assert {(one["serialized"], one["hazards"]) for one in products.values()} == {("0", "0")}, products
    gemma = {name: one for name, one in made.items() if name.startswith(("flow", "attend"))}
    assert len(gemma) == 5
    fast = [one for one in (*products.values(), *gemma.values()) if one["wgmma"] != "0"]
    assert len(fast) == len(products) + len(gemma), made
    assert "0" not in {one["cp.async"] for one in gemma.values()}, gemma


@pytest.mark.parametrize("capability", ["8.9", "12.0"])
def test_kernels_fit_into_the_shared_memory_of_an_rtx_card(capability):
    """RTX 4090 and 5090 have 99 KiB for a program; a kernel that does not fit is replaced by torch."""
    made = compiled(capability)
    assert len(made) == 7
    assert {one["fits"] for one in made.values()} == {"True"}, made
    assert {one["wgmma"] for one in made.values()} == {"0"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gemmas_kernels_equal_torch_in_the_interpreter(dtype):
    said = run("interpret_gemma.py", dtype, TRITON_INTERPRET="1")
    assert re.findall(r"equal (\w+)", said) == ["pi0", "pi05"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_groots_kernels_equal_torch_in_the_interpreter(dtype):
    said = run("interpret_groot.py", dtype, TRITON_INTERPRET="1")
    assert re.findall(r"equal (\w+)", said) == ["none", "fp8"]
