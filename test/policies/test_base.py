"""How a policy is found by its name, and what is said where it cannot be."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from vla_ros.config import load
from vla_ros.errors import ConfigError, MissingDependencyError, VlaRosError
from vla_ros.policies.base import Policy, create
from vla_ros.types import ActionChunk, Observation


def test_a_name_that_nobody_installed_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"found 'opnvla', expected one of .*did you mean 'openvla'\?"):
        load((), ["policy.name:=opnvla"])


def test_a_policy_whose_library_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("vla_ros.policies.openvla.")]:
        if not name.endswith(".options"):  # a class that others compare with
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"'openvla' needs .*torch.*pip install 'vla.ros\[openvla\]'"):
        create(load())


def test_a_policy_that_infers_one_by_one_asks_for_no_batches() -> None:
    class Single(Policy):
        def infer(self, session: Any, observation: Observation) -> ActionChunk:
            raise NotImplementedError

    class Batched(Single):
        def infer_batch(self, requests: Any) -> list[ActionChunk | VlaRosError]:
            raise NotImplementedError

    assert not Single().prepare(2)
    assert Batched().prepare(2)
