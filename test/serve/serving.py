"""A policy server on a thread of this process."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from vla_ros.policies.base import Policy
from vla_ros.serve import server
from vla_ros.serve.service import Service

PATIENCE = 30.0  # s


@contextlib.contextmanager
def served(
    policy: Policy, *given: Any, port: int = 0, key: str = "", tls: Any = None, **named: Any
) -> Iterator[tuple[Service, int]]:
    """Serve ``policy`` with further arguments of :class:`Service`; yields the service and its port."""
    service = Service(policy, *given, **named)
    service.load()
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    ports: list[int] = []

    async def listen() -> None:
        async with server.listening(service, server.Address(port=port, api_key=key, tls=tls)) as listener:
            ports.append(next(iter(listener.sockets)).getsockname()[1])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(listen()), daemon=True)
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield service, ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE)
        loop.close()
        assert service.close(PATIENCE)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
