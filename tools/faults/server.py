"""Serves the wild policy with the real policy server, and breaks its responses.

A line on standard input sets the fault: ``delay`` sends responses too late, ``lose`` sends none, ``mix`` sends the
response to another request, ``truncate`` the first half, ``oversize`` two megabytes, ``error`` an error message;
``cut`` closes the connection. An empty line ends the fault.
"""

import argparse
import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable

from websockets.exceptions import ConnectionClosedOK

from tools.faults.node import WildPolicy
from tools.faults.setups import OPTIONS
from vla_ros.config import load
from vla_ros.serve import server
from vla_ros.serve.service import Send, Service

_LATE = 0.6  # s; twice the rows' timeouts.inference
_LONG = bytes(2 << 20)  # twice the row's policy.max_response


class BreakingService(Service):
    """Breaks its responses as :attr:`fault` says."""

    fault = ""

    async def converse(
        self,
        messages: AsyncIterator[bytes | str],
        send: Send,
        connected: Callable[[], bool] = lambda: True,
        path: str = "/",
    ) -> None:
        before: bytes | str | None = None
        greeted = False

        async def spoiled(frame: bytes | str, outcome: str) -> None:
            nonlocal before, greeted
            fault, other, before = self.fault if greeted else "", before, frame
            greeted = True
            if fault == "cut":
                raise ConnectionClosedOK(None, None)
            if fault == "delay":
                await asyncio.sleep(_LATE)
            broken = {
                "mix": other,
                "truncate": frame[: len(frame) // 2],
                "oversize": _LONG,
                "error": "the policy fails on command",
            }
            said = broken.get(fault, frame)
            if fault != "lose" and said is not None:
                await send(said, outcome)

        await super().converse(messages, spoiled, connected, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--horizon", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0, help="duration of an inference")
    parser.add_argument("--api-key", default="")
    parser.add_argument("-p", action="append", default=[], metavar="NAME:=VALUE", help="option of the policy")
    arguments = parser.parse_args()
    config = load((), [*(f"{name}:={value}" for name, value in OPTIONS.items()), *arguments.p])
    service = BreakingService(WildPolicy(config, arguments.horizon, arguments.seconds))
    service.load()

    def listen() -> None:
        for line in sys.stdin:
            service.fault = line.strip()
            print("done", flush=True)

    threading.Thread(target=listen, daemon=True).start()
    address = server.Address(port=arguments.port, api_key=arguments.api_key)
    asyncio.run(server.run(service, address, 1.0, lambda port: print("ready", flush=True)))
    service.close(1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
