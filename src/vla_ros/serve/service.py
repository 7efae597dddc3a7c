"""The policy server without its transport: one worker, any number of conversations, metrics for Prometheus."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vla_ros.allocator import keep_freed_memory
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import VlaRosError
from vla_ros.policies.base import Policy, Progress, no_progress
from vla_ros.policies.remote.messages import WireError, pack
from vla_ros.serve import wire
from vla_ros.serve.worker import BusyError, Done, ExpiredError, InferenceWorker, Job, Robot, State
from vla_ros.types import ActionChunk

logger = logging.getLogger(__name__)

Send = Callable[[bytes | str], Awaitable[None]]

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Limits:
    """Limits of one server."""

    max_batch: int = 16  # requests in one call of the policy
    max_robots: int = 256  # connections at a time
    max_message: int = 16 << 20  # bytes of one request
    seconds: float = 10.0  # deadline of requests that state none


class Metrics:
    """Metrics for Prometheus, in their own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        prefix = "vla_ros_serve_"
        self.requests = Counter(
            prefix + "requests", "Requests by what became of them", ["outcome"], registry=registry
        )
        self.robots = Gauge(prefix + "robots", "Connections", registry=registry)
        self.waiting = Gauge(prefix + "waiting", "Requests that wait for the policy", registry=registry)
        self.batch = Histogram(prefix + "batch", "Requests in a batch", buckets=_BATCHES, registry=registry)
        self.inference = Histogram(
            prefix + "inference_seconds", "Duration of a batch", buckets=_SECONDS, registry=registry
        )
        self.queued = Histogram(
            prefix + "queued_seconds", "Wait of a request before its batch", buckets=_SECONDS, registry=registry
        )


class Service:
    """Loads a policy and answers conversations on an event loop.

    ``name`` is the policy's name in the metadata; ``aliases`` maps the policy's feature keys to those on the wire;
    ``own_metadata`` replaces the server's, for clients that expect certain keys (RoboArena); ``complete`` completes
    the policy's spec from ``features``.
    """

    def __init__(
        self,
        policy: Policy,
        name: str,
        limits: Limits,
        aliases: dict[str, str] | None = None,
        max_instruction_length: int = 500,
        own_metadata: dict[str, object] | None = None,
        complete: Callable[[PolicySpec], PolicySpec] = lambda spec: spec,
    ) -> None:
        self.limits, self.metrics = limits, Metrics()
        self.worker = InferenceWorker(policy, self._deliver, limits.max_batch)
        self._name, self._aliases, self._longest = name, aliases or {}, max_instruction_length
        self._own_metadata, self._complete = own_metadata, complete
        self._futures: dict[Job, asyncio.Future[Done]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool = ThreadPoolExecutor(2, "vla_jpeg")
        self.robots = self.answering = 0

    def load(self, progress: Progress = no_progress) -> None:
        """Load the policy, which may take minutes; raises VlaRosError if an alias names no feature."""
        keep_freed_memory()
        self.worker.start(progress)
        spec = self._complete(self.worker.policy.spec)
        keys = [*spec.image_keys, *(state.key for state in spec.state)]
        unknown = sorted(self._aliases.keys() - set(keys))
        if unknown:
            self.worker.stop()
            raise VlaRosError(f"--image: the policy has no feature {unknown}; it has {keys}")
        self.vocabulary = wire.Vocabulary(spec, self._aliases, self._longest)
        self.metadata = pack(self._own_metadata or wire.metadata(self._name, spec))

    def close(self, timeout: float) -> bool:
        """Answer waiting requests and stop; False if that takes longer than ``timeout`` seconds."""
        self._pool.shutdown(wait=False)
        return self.worker.stop(timeout)

    def refusal(self) -> str:
        """Return why a new connection is refused; "" if it is accepted."""
        if self.worker.state is not State.READY:
            return f"the server is {self.worker.state.value}"
        if self.robots >= self.limits.max_robots:
            return f"over capacity: {self.robots} robots are connected, allowed {self.limits.max_robots}"
        return ""

    def healthy(self) -> bool:
        """Return True while the server can answer requests."""
        return self.worker.state is State.READY

    def http(self, path: str, key: str, given: Sequence[bytes]) -> tuple[int, bytes] | None:
        """Return status and body for a plain HTTP request, or None if the websocket may be opened.

        ``key`` is the API key ("" for none), ``given`` the request's ``Authorization`` headers.
        """
        if path.endswith("/healthz"):
            return (200, b"OK\n") if self.healthy() else (503, f"{self.worker.state.value}\n".encode())
        if key and not (len(given) == 1 and hmac.compare_digest(given[0], f"Api-Key {key}".encode())):
            return 401, b"a valid API key is needed: Authorization: Api-Key KEY\n"
        if path.endswith("/metrics"):
            self.metrics.waiting.set(self.worker.waiting)
            self.metrics.robots.set(self.robots)
            return 200, generate_latest(self.metrics.registry)
        refusal = self.refusal()
        return (503, f"{refusal}\n".encode()) if refusal else None

    async def converse(
        self, frames: AsyncIterator[bytes | str], send: Send, connected: Callable[[], bool] = lambda: True
    ) -> None:
        """Answer one robot's ``frames`` with ``send`` until it disconnects; ``connected`` is then False."""
        self._loop = asyncio.get_running_loop()
        robot, session, restart, ended = Robot(), "", False, 0.0
        self.robots += 1
        try:
            await send(self.metadata)
            async for frame in frames:
                arrived = time.monotonic()
                try:
                    request = wire.read_request(frame, self.vocabulary, self.limits.max_message)
                except WireError as error:
                    self.metrics.requests.labels("invalid").inc()
                    await send(f"invalid request: {error}")
                    continue
                restart = restart or request.reset or request.begins or request.session != session
                session = request.session
                if request.reset:
                    await send("reset successful")
                    continue
                self.answering += 1
                try:
                    reply, outcome = await self._reply(request, robot, arrived, restart, connected, ended)
                    await send(reply)
                finally:
                    self.answering -= 1
                self.metrics.requests.labels(outcome).inc()
                restart = restart and outcome != "answered"
                ended = time.monotonic() - arrived
        finally:
            self.robots -= 1
            self.worker.forget(robot)

    async def _reply(
        self,
        request: wire.Request,
        robot: Robot,
        arrived: float,
        restart: bool,
        connected: Callable[[], bool],
        previous: float,
    ) -> tuple[bytes | str, str]:
        """Return the answer, or a text with the reason for having none, and the outcome for the metrics."""
        try:
            done = await self._ask(request, robot, arrived, restart, connected)
            if not isinstance(done.outcome, ActionChunk):
                raise done.outcome
            timing = {"infer_ms": done.inference_ms}
            if previous:
                timing["prev_total_ms"] = 1e3 * previous
            timing |= {"queued_ms": done.queued_ms, "batch": done.batch}
            return wire.answer(done.outcome, request, timing), "answered"
        except BusyError as error:
            return str(error), "refused"
        except ExpiredError as error:
            return str(error), "expired"
        except WireError as error:
            return f"invalid request: {error}", "invalid"
        except VlaRosError as error:
            return str(error), "failed"

    async def _ask(
        self, request: wire.Request, robot: Robot, arrived: float, restart: bool, connected: Callable[[], bool]
    ) -> Done:
        loop = asyncio.get_running_loop()
        if any(isinstance(image, bytes) for image in request.images.values()):
            args = request, self.vocabulary, time.time_ns()
            observation = await loop.run_in_executor(self._pool, wire.observation, *args)
        else:
            observation = wire.observation(request, self.vocabulary, time.time_ns())
        deadline = arrived + (request.seconds or self.limits.seconds)
        job = Job(robot, observation, arrived, deadline, restart, connected)
        future: asyncio.Future[Done] = loop.create_future()
        self._futures[job] = future
        try:
            self.worker.submit(job, lambda: sum(not other.wanted() for other in self._futures))
            return await future
        finally:
            self._futures.pop(job, None)

    def _deliver(self, done: Sequence[Done]) -> None:
        """Pass finished jobs from the worker's thread to the event loop."""
        if self._loop is not None and done:
            try:
                self._loop.call_soon_threadsafe(self._arrived, done)
            except RuntimeError:  # the loop has ended
                logger.debug("%d answers came after the end", len(done))

    def _arrived(self, done: Sequence[Done]) -> None:
        for each in done:
            future = self._futures.get(each.job)
            if future is not None and not future.done():
                future.set_result(each)
        asyncio.get_running_loop().call_soon(self._observe, done)  # after the answers are sent

    def _observe(self, done: Sequence[Done]) -> None:
        """Record the times of a batch in the metrics."""
        for each in done:
            if each.batch:
                self.metrics.queued.observe(each.queued_ms / 1e3)
        batch = next((each for each in done if each.batch), None)
        if batch is not None:
            self.metrics.batch.observe(batch.batch)
            self.metrics.inference.observe(batch.inference_ms / 1e3)
