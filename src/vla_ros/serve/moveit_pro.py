"""The server's end of MoveIt Pro's ``POST /infer``."""

from __future__ import annotations

import json
from dataclasses import replace

from vla_ros.config import Config
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.policies.remote.dialect import Message, Request, Response, ServedDialect
from vla_ros.policies.remote.moveit_pro import MoveItPro, decode_request
from vla_ros.serve.requests import RequestSchema, split_state

_EXECUTED = ("joint_position", "gripper")  # parts of an action that ExecutePolicy can execute


class Objective(MoveItPro, ServedDialect):
    """Reads an objective's observations by the policy's names, and writes chunks as it executes them."""

    greets, reset_response = False, b""

    def __init__(self, schema: RequestSchema, config: Config) -> None:
        self._schema, self._control = schema, config.control

    def decode_request(self, message: Message) -> Request:
        self._period()  # and not after an inference
        request = decode_request(message)
        vectors = split_state(request.features["state"], self._schema.spec.state)
        return replace(request, features={**request.features, **vectors})

    def encode_response(self, response: Response) -> bytes:
        """Write a chunk; ``action_chunk_raw`` repeats it, so that its rest can come back, if the policy continues.

        Servers of LeRobot's policies put normalised actions there. The client does not interpret them.
        """
        actions = response.actions["actions"].tolist()
        raw = {"action_chunk_raw": actions} if self._schema.spec.continues_chunks else {}
        return json.dumps({"action_chunk": actions, **raw, "dt": self._period()}).encode()

    def encode_error(self, text: str) -> bytes:
        return json.dumps({"error": text}).encode()

    def encode_metadata(self, name: str, spec: PolicySpec) -> bytes:
        return b""

    def _period(self) -> float:
        """Return the duration of a step; raises ConfigError if MoveIt Pro cannot execute the policy's actions."""
        spec = self._schema.spec
        other = [str(part.quantity) for part in spec.action if part.quantity not in _EXECUTED]
        if other:
            raise ConfigError(
                "MoveIt Pro executes joint positions and a gripper, but the policy's actions have "
                f"{', '.join(other)}"
            )
        rate = self._control.rate_hz if self._control.rate_hz >= 0 else spec.rate_hz
        if not rate:
            raise ConfigError(
                "the rate of the policy's actions is unknown; start the server with -p control.rate_hz:=HZ"
            )
        return 1 / rate
