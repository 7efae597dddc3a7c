"""The policy server without its transport: one worker for any number of robots."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vla_ros.config import Config
from vla_ros.contract.features import complete_spec
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.policies.base import Policy, Progress, no_progress
from vla_ros.policies.remote.dialect import Message, Request, Response, ServedDialect
from vla_ros.policies.remote.messages import WireError, pack
from vla_ros.policies.remote.moveit_pro import MOVEIT_PRO
from vla_ros.policies.remote.openpi import OPENPI
from vla_ros.policies.remote.vla_eval import PATH
from vla_ros.process import keep_freed_memory
from vla_ros.serve.moveit_pro import Objective
from vla_ros.serve.requests import RequestSchema, check_request, observation, pixels_to_decode
from vla_ros.serve.vla_eval import Evaluation
from vla_ros.serve.worker import BusyError, Done, ExpiredError, InferenceWorker, Job, RobotState, WorkerState
from vla_ros.types import ActionChunk, FloatArray, Observation

logger = logging.getLogger(__name__)

T = TypeVar("T")

Send = Callable[[Message, str], Awaitable[None]]
"""Sends an answer, given the outcome of the request as in the metrics."""

POST = "POST "
"""Precedes the path of an HTTP request with a body in :meth:`Service.http` and :meth:`Service.converse`."""
_SPOKEN = {PATH: Evaluation, POST + MOVEIT_PRO.path: Objective}
"""Maps ends of paths to dialects."""

_OUTCOMES = {BusyError: "refused", ExpiredError: "expired"}
_LARGE = 1 << 20  # pixels above which a request's JPEGs are decoded where they delay no others
# Pause after an invalid message, for each of up to _IN_A_ROW in a row: in times that it took, in seconds per byte.
_PAUSE, _PAUSE_PER_BYTE, _IN_A_ROW, _MOST_PAUSE = 5, 1e-6, 20, 2.0
_NAMESPACE = "vla_ros_serve"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Limits:
    """Limits of one server."""

    max_batch: int = 16  # requests in one call of the policy
    max_robots: int = 256  # connections at a time
    max_message: int = 16 << 20  # bytes of one request
    seconds: float = 10.0  # deadline of requests that do not state one
    max_pixels: int = 1 << 22  # of one JPEG


class Metrics:
    """The server's Prometheus metrics, in a separate registry."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("requests", "Requests by outcome", ["outcome"], _NAMESPACE, registry=own)
        self.robots = Gauge("robots", "Connections", (), _NAMESPACE, registry=own)
        self.waiting = Gauge("waiting", "Requests that wait for the policy", (), _NAMESPACE, registry=own)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, (), _NAMESPACE, registry=own, buckets=buckets)

        self.batch = histogram("batch", "Requests in a batch", _BATCHES)
        self.inference = histogram("inference_seconds", "Duration of a batch", _SECONDS)
        self.queued = histogram("queued_seconds", "Wait of a request before its batch", _SECONDS)


def _give_way() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


@dataclass
class _Conversation:
    """The state of one connection."""

    connected: Callable[[], bool]  # False once the robot has disconnected
    dialect: ServedDialect
    robot: RobotState
    session: str = ""  # the client's name for the current episode
    instruction: str | None = None  # of the latest request
    rows: deque[FloatArray] = field(default_factory=deque)  # actions [D] that follow without an inference
    restart: bool = False  # True if the next answered request begins an episode
    seconds: float = 0.0  # duration of the previous request; 0 before the first request
    invalid: int = 0  # invalid messages since the last valid one


class Service:
    """Loads a policy and answers robots on an event loop.

    ``config`` names the policy and completes its features; ``aliases`` maps feature keys to the names that robots
    use; ``read_metadata`` replaces the server's metadata, for clients that expect certain keys (RoboArena);
    ``dialect`` is the protocol of the robots; at the path ``/vla-eval`` it is vla-eval's, and in a ``POST`` to
    ``/infer`` MoveIt Pro's.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits | None = None,
        config: Config | None = None,
        aliases: Mapping[str, str] | None = None,
        read_metadata: Mapping[str, object] | None = None,
        dialect: ServedDialect = OPENPI,
    ) -> None:
        self._dialect = dialect
        self.limits, self.metrics = limits or Limits(), Metrics()
        self.worker = InferenceWorker(policy, self._deliver, self.limits.max_batch)
        self._config, self._aliases = config or Config(), aliases or {}
        self.metadata = pack(read_metadata) if read_metadata else b""
        self._futures: dict[Job, asyncio.Future[Done]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool = ThreadPoolExecutor(2, "vla_jpeg")
        self._large = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4), "vla_large_jpeg", _give_way)
        self.robots = self.answering = 0

    def load(self, progress: Progress = no_progress) -> None:
        """Load the policy, which may take minutes.

        Raises ConfigError if an alias does not name a feature of the policy, or if the policy needs points or
        depth: before it is loaded if the policy can describe its features then.
        """
        described = None
        with contextlib.suppress(VlaRosError):  # load() reports the same error
            described = self.worker.policy.describe()
        if described and described.images and not described.takes_any_state:
            self._check(described)
        keep_freed_memory()
        self.worker.start(progress)
        try:
            spec = complete_spec(self.worker.policy.spec, self._config)
            self._check(spec)
            if not self.worker.policy.spec.images:  # those of the options: a policy of states alone needs none
                spec = replace(spec, images=tuple(replace(image, required=False) for image in spec.images))
        except VlaRosError:
            self.worker.stop()
            raise
        usual = self._config.policy.instruction
        self.schema = RequestSchema(spec, self._aliases, usual, self.limits.max_pixels)
        self.metadata = self.metadata or self._dialect.encode_metadata(self._config.policy.name, spec)

    def close(self, timeout: float) -> bool:
        """Answer waiting requests and stop; return False if this exceeds ``timeout`` seconds."""
        self._pool.shutdown(wait=False)
        self._large.shutdown(wait=False)
        return self.worker.stop(timeout)

    def healthy(self) -> bool:
        """Return True while the server can answer requests."""
        return self.worker.state is WorkerState.READY

    def http(self, path: str, key: str, given: Sequence[bytes]) -> tuple[int, bytes] | None:
        """Return the status and body for an HTTP request, or None to accept a websocket.

        ``key`` is the API key ("" for none), ``given`` the request's ``Authorization`` headers.
        """
        unavailable = 503, f"the server is {self.worker.state.value}\n".encode()
        if path.endswith(("/healthz", "/health")):
            return (200, b"OK\n") if self.healthy() else unavailable
        kind = MOVEIT_PRO.authorization if path.startswith(POST) else "Api-Key"
        if key and not (len(given) == 1 and hmac.compare_digest(given[0], f"{kind} {key}".encode())):
            return 401, f"a valid API key is needed: Authorization: {kind} KEY\n".encode()
        if path.startswith(POST) and not path.endswith(tuple(_SPOKEN)):
            return 404, f"found {path[:200]}, expected {', '.join(one for one in _SPOKEN if ' ' in one)}\n".encode()
        if path.endswith("/metrics"):
            self.metrics.waiting.set(self.worker.waiting)
            self.metrics.robots.set(self.robots)
            return 200, generate_latest(self.metrics.registry)
        if path.endswith("/config"):  # vla-eval's, which changes settings by a GET; this one only shows them
            shown = {"applied": {}, "config": {"max_batch_size": self.worker.max_batch}}
            return 200, json.dumps(shown).encode() + b"\n"
        if self.healthy() and self.robots >= self.limits.max_robots:
            text = f"over capacity: {self.robots} robots are connected, allowed {self.limits.max_robots}\n"
            return 503, text.encode()
        return None if self.healthy() else unavailable

    async def converse(
        self,
        messages: AsyncIterator[Message],
        send: Send,
        connected: Callable[[], bool] = lambda: True,
        path: str = "/",
    ) -> None:
        """Answer one robot's messages until it disconnects; ``connected`` then returns False.

        ``path`` is the one that it asked for, which selects the dialect.
        """
        self._loop = asyncio.get_running_loop()
        spoken = [made(self.schema, self._config) for end, made in _SPOKEN.items() if path.endswith(end)]
        dialect = spoken[0] if spoken else self._dialect
        known = _Conversation(connected, dialect, RobotState(dialect.row_by_row))
        self.robots += 1
        try:
            if dialect.greets:
                await send(self.metadata, "greeting")
            async for message in messages:
                arrived = time.monotonic()
                self.answering += 1
                try:
                    reply, outcome = await self._reply(message, arrived, known)
                    if reply:
                        await send(reply, outcome)
                finally:
                    self.answering -= 1
                self.metrics.requests.labels(outcome).inc()
                known.seconds = time.monotonic() - arrived
                known.invalid = known.invalid + 1 if outcome == "invalid" else 0
                if known.invalid:  # the event loop serves others meanwhile
                    each = _PAUSE * known.seconds + _PAUSE_PER_BYTE * len(message)
                    await asyncio.sleep(min(each * min(known.invalid, _IN_A_ROW), _MOST_PAUSE))
        finally:
            self.robots -= 1
            self.worker.forget(known.robot)

    def _check(self, spec: PolicySpec) -> None:
        if needed := (*spec.points, *spec.depth):
            image, key = needed[0]
            raise ConfigError(
                f"{self._config.policy.name}: the policy needs '{key}' (points or depth of '{image}'), which no "
                "request carries; run it in the robot's node instead: vla-ros run"
            )
        keys = [*spec.image_keys, *(state.key for state in spec.state)]
        unknown = sorted(self._aliases.keys() - set(keys))
        if unknown:
            found, known = ", ".join(unknown), ", ".join(keys)
            raise ConfigError(f"--image: the policy has no feature {found}; its features are {known}")

    async def _reply(self, message: Message, arrived: float, known: _Conversation) -> tuple[Message, str]:
        dialect, limit = known.dialect, self.limits.max_message
        try:
            if len(message) > limit:
                raise WireError(f"found a message of {len(message)} bytes, allowed {limit}")
            request = check_request(dialect.decode_request(message), self.schema)
            known.restart |= request.reset or request.begins or request.session != known.session
            if known.restart or request.instruction != known.instruction:
                known.rows.clear()
            known.session, known.instruction = request.session, request.instruction
            if request.reset:
                return dialect.reset_response, "reset"
            if known.rows:
                return dialect.encode_response(_row(known, request)), "continued"
            done = await self._infer(request, arrived, known)
            if not isinstance(done.outcome, ActionChunk):
                raise done.outcome
            known.restart = False
            if dialect.row_by_row:
                known.rows.extend(done.outcome.actions[: self._executed])
                return dialect.encode_response(_row(known, request)), "answered"
            timing = {"infer_ms": done.inference_ms, "queued_ms": done.queued_ms, "batch": done.batch}
            if known.seconds:
                timing["prev_total_ms"] = 1e3 * known.seconds
            return dialect.encode_response(_response(done.outcome, request, timing)), "answered"
        except WireError as error:
            return dialect.encode_error(f"invalid request: {error}"), "invalid"
        except VlaRosError as error:
            return dialect.encode_error(str(error)), _OUTCOMES.get(type(error), "failed")

    @property
    def _executed(self) -> int:
        """Actions of a chunk that are executed before the next inference, as in the node."""
        spec = self.schema.spec
        return self._config.control.execute_steps or spec.execute_steps or spec.horizon

    async def _infer(self, request: Request, arrived: float, known: _Conversation) -> Done:
        loop = asyncio.get_running_loop()
        arguments = request, self.schema, time.time_ns()
        deadline = arrived + (request.deadline_s or self.limits.seconds)
        if any(isinstance(feature, bytes) for feature in request.features.values()):
            pool = self._large if pixels_to_decode(request) > _LARGE else self._pool
            decoded = loop.run_in_executor(pool, _decoded, known.connected, *arguments)
            observed = await _before(deadline, arrived, decoded, "its images were not decoded")
        else:
            observed = observation(*arguments)
        job = Job(known.robot, observed, arrived, deadline, known.restart, known.connected)
        future: asyncio.Future[Done] = loop.create_future()
        self._futures[job] = future
        try:
            self.worker.submit(job, lambda: sum(not other.wanted() for other in self._futures))
            return await _before(deadline, arrived, future, "the policy did not answer")
        finally:
            del self._futures[job]

    def _deliver(self, done: Sequence[Done]) -> None:
        """Pass finished jobs from the worker's thread to the event loop."""
        if self._loop is not None and done:
            try:
                self._loop.call_soon_threadsafe(self._arrived, done)
            except RuntimeError:  # the loop has ended
                logger.debug("%d answers came after the end", len(done))

    def _arrived(self, done: Sequence[Done]) -> None:
        for answer in done:
            if (future := self._futures.get(answer.job)) is not None and not future.done():
                future.set_result(answer)
        asyncio.get_running_loop().call_soon(self._observe, done)  # after the answers are sent

    def _observe(self, done: Sequence[Done]) -> None:
        """Record the times of a batch in the metrics."""
        computed = [answer for answer in done if answer.batch]
        for answer in computed:
            self.metrics.queued.observe(answer.queued_ms / 1e3)
        if computed:
            self.metrics.batch.observe(computed[0].batch)
            self.metrics.inference.observe(computed[0].inference_ms / 1e3)


def _decoded(connected: Callable[[], bool], *arguments: Any) -> Observation:
    """Return the observation, with its images decoded; raises VlaRosError if the robot has left meanwhile."""
    if not connected():
        raise VlaRosError("the robot disconnected before its images were decoded")
    return observation(*arguments)


async def _before(deadline: float, arrived: float, future: asyncio.Future[T], what: str) -> T:
    """Wait for a future until ``deadline``, then cancel it; raises ExpiredError, which says ``what`` failed.

    A timer of the loop costs less than ``asyncio.wait_for``, which makes a task of each wait (Python 3.11).
    """
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = future.cancel()

    timer = asyncio.get_running_loop().call_later(max(0.0, deadline - time.monotonic()), expire)
    try:
        return await future
    except asyncio.CancelledError:
        if not expired:
            raise
        raise ExpiredError(f"deadline exceeded: {what} within {deadline - arrived:.2f} s") from None
    finally:
        timer.cancel()


def _row(conversation: _Conversation, request: Request) -> Response:
    return Response({"actions": conversation.rows.popleft()[None]}, number=request.number)


def _response(chunk: ActionChunk, request: Request, timing_ms: Mapping[str, float]) -> Response:
    info = {key: value for key, value in chunk.info.items() if isinstance(value, (int, float, str, tuple))}
    actions = {"actions": chunk.actions}
    return Response(actions, timing_ms, request.number, chunk.normalized, chunk.tokens, info)
