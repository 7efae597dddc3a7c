"""The server's end of vla-eval's protocol: one benchmark on one connection."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from vla_ros.config import Config
from vla_ros.contract import benchmark as benchmarks
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.policies.remote.dialect import Message, Request, Response, ServedDialect
from vla_ros.policies.remote.messages import WireError, described
from vla_ros.policies.remote.vla_eval import EvalMessage, VlaEval, check_hello, hello, pack_message, unpack_message
from vla_ros.serve.requests import RequestSchema, split_state

logger = logging.getLogger(__name__)

_PATIENCE = 28.0  # s that a request may take; vla-eval's client waits for 30
_MAX_CONTROL = 1 << 20  # bytes of a message other than an observation
_STATES = ("states", "state", "joint_state")
_INSTRUCTION, _RESTART = "task_description", "episode_restart"


class Evaluation(VlaEval, ServedDialect):
    """Reads a benchmark's observations by the policy's names, and writes actions as the benchmark executes them.

    Attributes:
        reset_response: The answer to the latest message that was no observation; empty for none.
    """

    greets, row_by_row = False, True

    def __init__(self, schema: RequestSchema, config: Config) -> None:
        self._schema, self._config = schema, config
        self._seq, self.reset_response = 0, b""
        self._convert: benchmarks.ActionConverter | None = None  # to the benchmark's action; None if it is unknown
        self._refused = ""  # why the policy does not fit the benchmark

    def decode_request(self, message: Message) -> Request:
        self._seq, self.reset_response = 0, b""
        received = unpack_message(message)
        self._seq = received.seq
        begins = received.payload.get(_RESTART) is True
        if self._convert is not None and (begins or received.kind != "observation"):
            self._convert.reset()
        if received.kind != "observation":
            if len(message) > _MAX_CONTROL:
                raise WireError(f"found {received.kind} of {len(message)} bytes, allowed {_MAX_CONTROL}")
            if received.kind == "hello":
                self.reset_response = self._greeting(received)
            elif received.kind == "error":
                logger.warning("a benchmark reports: %s", str(received.payload.get("error"))[:300])
            elif received.kind == "action":
                raise WireError("found an action, expected an observation")
            return Request(reset=True)
        if self._refused:
            raise ConfigError(self._refused)
        instruction = received.payload.get(_INSTRUCTION)
        if instruction is not None and not isinstance(instruction, str):
            raise WireError(f"the {_INSTRUCTION} is {described(instruction)}, expected the instruction as text")
        features = dict(_features(received.payload, self._schema))
        return Request(features, instruction, begins=begins, number=received.seq, deadline_s=_PATIENCE)

    def encode_response(self, response: Response) -> bytes:
        actions = response.actions["actions"]
        action = actions[0] if self._convert is None else self._convert(actions[0])
        return pack_message("action", {"actions": action}, self._seq)

    def encode_error(self, text: str) -> Message:
        return pack_message("error", {"error": text}, self._seq)

    def encode_metadata(self, name: str, spec: PolicySpec) -> bytes:
        return b""  # said in the answer to hello

    def _greeting(self, found: EvalMessage) -> bytes:
        """Return the answer to a hello; raises ConfigError if the policy's actions do not fit the benchmark."""
        check_hello(found.payload)
        name, spec, config = str(found.payload.get("benchmark", ""))[:200], self._schema.spec, self._config
        package, benchmark = benchmarks.benchmark_of(name)
        executed: benchmarks.Executed = ()
        self._convert, self._refused = None, ""
        if benchmark is not None:
            try:
                executed = benchmarks.fitting(spec, benchmark, name)
            except ConfigError as error:
                self._refused = str(error)
                logger.warning("%s", error)
                raise
            self._convert = benchmarks.ActionConverter(spec, executed, config.gripper)
        params = benchmarks.observation_params(spec, package, config.policy.name, executed)
        answer = hello(
            harness_version=found.payload.get("harness_version"),
            model_server=f"vla_ros {config.policy.name}",
            capabilities={},
            observation_params=params,
            action_spec=benchmarks.action_spec(spec, config, executed),
            observation_spec=benchmarks.observation_spec(spec, benchmark),
        )
        logger.info("benchmark %s: parameters %s", name or "without a name", params)
        return pack_message("hello", answer, found.seq)


def _features(payload: Mapping[str, Any], schema: RequestSchema) -> Iterator[tuple[str, Any]]:
    """Yield the observation's features by names that the schema knows, then all others by their own.

    A feature takes what has one of its names (``vla-ros serve --image KEY=NAME``, or the policy's with a usual
    prefix). Of the rest, images of a wrist go to the policy's wrist images, the others in order, as vla-eval's own
    model servers take them; ``states``, ``state`` or ``joint_state`` holds the policy's state vectors
    in turn.
    """
    images, state = payload.get("images"), payload.get("state")
    sent: dict[str, Any] = dict(images) if isinstance(images, dict) else {}
    others = {key: value for key, value in payload.items() if not isinstance(value, dict)}
    others |= state if isinstance(state, dict) else {}
    yield from sent.items()
    yield from others.items()

    def open_keys(keys: Iterator[str], given: Mapping[str, Any]) -> list[str]:
        free = [key for key in keys if key not in schema.aliases]
        return [key for key in free if not any(name in given for name in schema.names[key])]

    left = open_keys(iter(schema.spec.image_keys), sent)
    taken = {name for names in schema.names.values() for name in names}
    rest = [name for name in sent if name not in taken]
    for key, name in benchmarks.pair_images(left, rest).items():
        yield key, sent[name]
    keys = open_keys((feature.key for feature in schema.spec.state), others)
    vector = next((others[name] for name in _STATES if name in others), None)
    if vector is not None:
        yield from split_state(vector, [feature for feature in schema.spec.state if feature.key in keys]).items()
