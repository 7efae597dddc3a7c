"""The recordings, as a module that all tests of this folder import."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("msgpack", reason="the library msgpack is not installed (extra 'remote')")

spec = importlib.util.spec_from_file_location("wire_golden", Path(__file__).with_name("golden.py"))
assert spec is not None
assert spec.loader is not None
sys.modules["wire_golden"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
