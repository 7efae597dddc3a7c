"""The thread that infers for all robots, in batches, first come, first served.

Batch sizes are powers of two. The policy is prepared for all of them before the first request, so that no robot
waits while an engine captures graphs for another size. A batch waits briefly for robots whose next request is due
(``rhythm``). Each robot may have one request at a time, so that no robot
can crowd out others. Expired requests are rejected without being computed; a request that cannot be answered in
time is refused at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue

from vla_ros.errors import DeviceLostError, OutOfMemoryError, VlaRosError
from vla_ros.policies.base import Policy, Progress, Session, no_progress
from vla_ros.serve.rhythm import SHARE, Rhythms
from vla_ros.types import ActionChunk, Observation

logger = logging.getLogger(__name__)

_SMOOTHING = 0.2  # weight of the newest batch in the expected duration of a batch


class WorkerState(Enum):
    """State of the worker."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    ENDED = "ended"


class BusyError(VlaRosError):
    """The server refuses a request: it is over capacity, shutting down, or has failed."""


class ExpiredError(VlaRosError):
    """A request's deadline passed before it was processed."""


class RobotState:
    """The worker's state for one connection; only the worker's thread uses it.

    ``renewed``: each episode has a new session, as in a new process.
    """

    def __init__(self, renewed: bool = False) -> None:
        self.session: Session | None = None
        self.instruction, self.renewed = "", renewed


@dataclass(frozen=True, eq=False)
class Job:
    """One request, waiting or in progress."""

    robot: RobotState  # the robot that sent it
    observation: Observation
    arrived: float  # seconds of the worker's clock
    deadline: float  # seconds of the same clock
    reset: bool = False  # True at the beginning of an episode
    wanted: Callable[[], bool] = lambda: True  # False once the client has stopped waiting


@dataclass(frozen=True, eq=False)
class Done:
    """A finished job."""

    job: Job
    outcome: ActionChunk | VlaRosError
    queued_ms: float = 0.0  # wait before the batch
    inference_ms: float = 0.0  # duration of the batch
    batch: int = 0  # requests in the batch; 0 if the job was not computed


class InferenceWorker:
    """Loads a policy and answers jobs on one thread, the only thread that calls the policy.

    The thread passes the finished jobs of a batch to ``deliver``, which must not block. ``state`` may be read from
    any thread; ``error`` is the exception if the thread or the device failed; ``running`` is the number of requests
    in the current batch, ``max_batch`` of those in the largest one.
    """

    def __init__(
        self,
        policy: Policy,
        deliver: Callable[[Sequence[Done]], None],
        max_batch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy, self.state, self.running = policy, WorkerState.LOADING, 0
        self.error: BaseException | None = None
        self._deliver, self.max_batch, self._clock = deliver, max_batch, clock
        self._sizes = [1]
        # SimpleQueue, written in C, wakes the thread without a Condition, which would cost 0.1 ms per request.
        # A job comes with the time of its submission.
        self._inbox: SimpleQueue[tuple[Job, float] | RobotState | None] = SimpleQueue()
        self._jobs: deque[Job] = deque()
        self._taken: Sequence[Job] = ()  # jobs of the current batch
        self._rhythms = Rhythms()
        self._ending = False
        self._loaded = threading.Event()
        self._began = self._batch_seconds = 0.0
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        return self._inbox.qsize() + len(self._jobs)

    def start(self, progress: Progress = no_progress) -> None:
        """Load the policy and start answering; return once it is loaded."""
        self._thread = threading.Thread(target=self._run, args=(progress,), name="vla_inference", daemon=True)
        self._thread.start()
        self._loaded.wait()
        if self.error is not None:
            raise self.error

    def submit(self, job: Job, left: Callable[[], int] = lambda: 0) -> None:
        """Queue a job; raises BusyError if the worker cannot answer it in time.

        ``left`` returns the number of waiting jobs whose robots have disconnected; these jobs take no time. An idle
        worker accepts any job, because only running a batch corrects the expected duration.
        """
        if self.state is not WorkerState.READY:
            why = {WorkerState.DRAINING: "the server is shutting down", WorkerState.FAILED: "the device failed"}
            raise BusyError(f"{why.get(self.state, f'the server is {self.state.value}')}; try again later")
        waiting, allowed = self.waiting, job.deadline - job.arrived
        if (waiting or self.running) and self._expected(waiting) > allowed:
            waiting = max(0, waiting - left())
            if (expected := self._expected(waiting)) > allowed:
                raise BusyError(
                    f"over capacity: a response would take about {expected:.2f} s (limit {allowed:.2f} s), behind "
                    f"{waiting} requests"
                )
        self._inbox.put((job, self._clock()))

    def forget(self, robot: RobotState) -> None:
        self._inbox.put(robot)

    def drain(self) -> None:
        """Refuse new jobs; waiting jobs are still answered."""
        if self.state is WorkerState.READY:
            self.state = WorkerState.DRAINING

    def stop(self, timeout: float = 10.0) -> bool:
        """Answer waiting jobs, close the policy and end the thread.

        Returns False if this takes longer than ``timeout`` seconds.
        """
        self.drain()
        self._inbox.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _expected(self, waiting: int) -> float:
        """Return the expected time in seconds to answer a request with ``waiting`` others ahead."""
        rest = max(0.0, self._batch_seconds - (self._clock() - self._began)) if self.running else 0.0
        return rest + self._batch_seconds * (1 + waiting // self.max_batch)

    def _run(self, progress: Progress) -> None:
        try:
            self.policy.load(progress)
            self._prepare()
            self.state = WorkerState.READY
            self._loaded.set()
            while self._take():
                wasted = self._wait_for_due()
                self._answer([self._jobs.popleft() for _ in range(self._size())])
                self._rhythms.charge(wasted, self._batch_seconds)
        except BaseException as error:
            self.error, self.state = error, WorkerState.FAILED
            if self._loaded.is_set():
                logger.exception("the inference thread ended")
        finally:
            self._loaded.set()
            self.state = self.state if self.state is WorkerState.FAILED else WorkerState.ENDED
            while not self._inbox.empty():
                self._accept(self._inbox.get())
            self._deliver([Done(job, BusyError("the server has ended")) for job in (*self._taken, *self._jobs)])
            self.policy.close()

    def _prepare(self) -> None:
        """Prepare the policy for batches as large as memory and ``max_batch`` allow."""
        size = 2
        while size <= self.max_batch:
            try:
                if not self.policy.prepare(size):
                    break
            except OutOfMemoryError as error:
                logger.warning("batches have at most %d requests: %s", self._sizes[-1], error)
                break
            self._sizes.append(size)
            logger.info("prepared for batches of %d", size)
            size *= 2
        self.max_batch = self._sizes[-1]

    def _take(self) -> bool:
        """Wait for jobs and take all of them; return False once the worker should end."""
        while not (self._jobs or self._ending) or not self._inbox.empty():
            self._accept(self._inbox.get())
        return bool(self._jobs)

    def _accept(self, item: tuple[Job, float] | RobotState | None) -> None:
        if isinstance(item, tuple):
            job, when = item
            self._jobs.append(job)
            self._rhythms.asked(job.robot, when)
        elif isinstance(item, RobotState):
            self._rhythms.forget(item)
            _close(item)
        else:
            self._ending = True

    def _size(self, due: int = 0) -> int:
        """Return the size of the next batch, if ``due`` more requests come."""
        return max(size for size in self._sizes if size <= len(self._jobs) + due)

    def _wait_for_due(self) -> float:
        """Wait while robots that are due would fill a larger batch; return the seconds that were waited in vain.

        No answer misses its deadline for it.
        """
        began, size = self._clock(), self._size()
        end = began + SHARE * self._batch_seconds
        if self._ending or min(job.deadline for job in self._jobs) < end + self._batch_seconds:
            return 0.0
        due = self._rhythms.due(began, end - began) - {job.robot for job in self._jobs}
        while not self._ending and self._size(len(due)) > self._size():
            try:
                item = self._inbox.get(timeout=max(0.0, end - self._clock()))
            except Empty:
                break
            self._accept(item)
            due.discard(item[0].robot if isinstance(item, tuple) else item)
        return self._clock() - began if self._size() == size else 0.0

    def _answer(self, jobs: Sequence[Job]) -> None:
        began = self._began = self._clock()
        self.running, self._taken = len(jobs), jobs
        done = [Done(job, error) for job in jobs if (error := _useless(job, began))]
        live = [job for job in jobs if job not in {each.job for each in done}]
        if live:
            outcomes = self._infer(live)
            took = self._clock() - began
            before = self._batch_seconds or took
            self._batch_seconds = before + _SMOOTHING * (took - before)
            for job, outcome in zip(live, outcomes, strict=True):
                done.append(Done(job, outcome, 1e3 * (began - job.arrived), 1e3 * took, len(live)))
            self._rhythms.answered({job.robot for job in live}, self._clock())
        self.running, self._taken = 0, ()
        self._deliver(done)

    def _infer(self, jobs: Sequence[Job]) -> list[ActionChunk | VlaRosError]:
        """Return one answer for each job; if a batch fails as a whole, its requests are tried one by one.

        No exception of a policy ends the worker, not even one that is no Exception, such as a panic in Rust.
        """
        try:
            requests = [(self._session(job), job.observation) for job in jobs]
            return _checked(self.policy.infer_batch(requests), len(jobs))
        except BaseException as error:
            if isinstance(error, DeviceLostError) or "CUDA error" in str(error):
                self.error, self.state = error, WorkerState.FAILED
                logger.exception("the device failed; restart the server")
                return [VlaRosError("the device failed") for _ in jobs]
            if len(jobs) > 1:
                return [answer for job in jobs for answer in self._infer([job])]
            if isinstance(error, VlaRosError):
                return [error]
            logger.exception("the policy failed on a request")
            return [VlaRosError("the policy failed on this request; the server's log says why")]

    def _session(self, job: Job) -> Session:
        """Return the robot's session, reset if the job or a new instruction begins an episode."""
        robot = job.robot
        if job.reset and robot.renewed:
            _close(robot)
        if robot.session is None:
            robot.session = self.policy.start_session()
        elif job.reset or robot.instruction != job.observation.instruction:
            robot.session.reset()
        robot.instruction = job.observation.instruction
        return robot.session


def _checked(answers: Sequence[ActionChunk | VlaRosError], count: int) -> list[ActionChunk | VlaRosError]:
    """Return a policy's answers as a list; raises TypeError unless there is one for each of ``count`` requests."""
    found = list(answers)
    if len(found) != count or not all(isinstance(each, (ActionChunk, VlaRosError)) for each in found):
        kinds = sorted({type(each).__name__ for each in found})
        raise TypeError(f"infer_batch returned {len(found)} answers of {kinds} to {count} requests")
    return found


def _useless(job: Job, now: float) -> VlaRosError | None:
    if not job.wanted():
        return VlaRosError("the robot disconnected before its request was computed")
    if now > job.deadline:
        queued, limit = now - job.arrived, job.deadline - job.arrived
        return ExpiredError(f"deadline exceeded: queued {queued:.2f} s (limit {limit:.2f} s)")
    return None


def _close(robot: RobotState) -> None:
    session, robot.session = robot.session, None
    if session is not None:
        try:
            session.close()
        except Exception:
            logger.exception("a session failed to close")
