"""The Triton kernels in Triton's interpreter against torch, and what its compiler makes of them for Hopper.

Float16 stands for bfloat16, which the interpreter cannot multiply. The interpreter is chosen by an environment
variable when Triton is first imported, so they run in a process. No GPU is needed.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = [
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


def test_kernels_equal_torch_in_the_interpreter():
    said = run("interpret.py", "float32", "float16", TRITON_INTERPRET="1")
    first = ["none", "int8", "int4", "towers", "pi0", "pi05", "GR00T none"]
    second = ["none", "int4", "fp8", "towers", "pi0", "pi05", "GR00T fp8"]
    assert re.findall(r"equal (.+)", said) == first + second


def test_kernels_compile():
    made = defaultdict(dict)
    said = run("compile_kernels.py", "9.0", "8.9", "12.0")
    for capability, name, words in re.findall(r"(\S+) kernel (.*): (registers .*)", said):
        made[capability][name] = dict(re.findall(r"(\S+) (\S+)", words))
    check_hopper(made["9.0"])
    for capability, count in (("8.9", 4), ("12.0", 6)):
        check_rtx_card(made[capability], count)


def check_hopper(made):
    """At most 64 bytes are spilled, by products that have at most 128 registers."""
    assert {one["fits"] for one in made.values()} == {"True"}, made
    # Unpacking must find every number where the tensor cores want it: see engine/lowbit.py.
    packed = {name: one for name, one in made.items() if "KIND int" in name or name.startswith("gemm_fp8")}
    assert len(packed) == 11
    assert {one["moves"] for one in packed.values()} == {"0"}, packed
    products = {name: one for name, one in packed.items() if name.startswith("gemm")}
    assert {(one["serialized"], one["hazards"]) for one in products.values()} == {("0", "0")}, products
    gemma = {name: one for name, one in made.items() if name.startswith(("flow", "attend"))}
    assert len(gemma) == 4
    fast = [one for one in (*products.values(), *gemma.values()) if one["wgmma"] != "0"]
    assert len(fast) == len(products) + len(gemma), made
    assert "0" not in {one["cp.async"] for one in gemma.values()}, gemma


def check_rtx_card(made, count):
    """RTX 4090 and 5090 have 99 KiB for a program; a kernel that does not fit is replaced by torch."""
    assert len(made) == count
    assert {one["fits"] for one in made.values()} == {"True"}, made
    assert {one["wgmma"] for one in made.values()} == {"0"}
