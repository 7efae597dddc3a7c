import asyncio
from typing import Any

import numpy as np
import pytest

from vla_ros.errors import ConfigError
from vla_ros.policies.remote.messages import pack, unpack
from vla_ros.serve.asgi import Application
from vla_ros.serve.service import Limits, Service

PATIENCE = 20.0
REQUEST = pack({"image": np.full((2, 2, 3), 7, np.uint8), "state": [1, 2, 3], "prompt": "go"})


class Connection:
    """The ASGI host's side of one connection."""

    def __init__(self, application: Application, kind: str, path: str = "/", key: str = "") -> None:
        headers = [(b"authorization", f"Api-Key {key}".encode())] if key else []
        self.scope = {"type": kind, "path": path, "headers": headers}
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.ensure_future(application(self.scope, self.inbox.get, self.outbox.put))

    async def sent(self) -> Any:
        return await asyncio.wait_for(self.outbox.get(), PATIENCE)

    async def tell(self, kind: str, **more: Any) -> None:
        await self.inbox.put({"type": kind, **more})


@pytest.fixture
def service(policy: Any) -> Any:
    made = Service(policy, Limits(max_robots=1))
    made.load()
    yield made
    assert made.close(PATIENCE)


def test_robots_are_answered(service: Service) -> None:
    async def talk() -> None:
        one = Connection(Application(service), "websocket")
        await one.tell("websocket.connect")
        assert (await one.sent())["type"] == "websocket.accept"
        assert unpack((await one.sent())["bytes"])["server"] == "vla_ros"
        await one.tell("websocket.receive", bytes=REQUEST)
        assert unpack((await one.sent())["bytes"])["actions"].shape == (2, 3)
        await one.tell("websocket.receive", text="hello")
        assert (await one.sent())["text"].startswith("invalid request")
        other = Connection(Application(service), "websocket")
        await other.tell("websocket.connect")
        assert (await other.sent())["type"] == "websocket.close"
        await one.tell("websocket.disconnect", code=1001)
        await asyncio.wait_for(one.task, PATIENCE)
        assert service.robots == 0

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [("/healthz", "", 200), ("/metrics", "", 401), ("/metrics", "right-key", 200), ("/", "right-key", 426)],
)
def test_plain_http_is_answered(service: Service, path: str, key: str, status: int) -> None:
    async def get() -> int:
        connection = Connection(Application(service, "right-key"), "http", path, key)
        found = (await connection.sent())["status"]
        assert (await connection.sent())["type"] == "http.response.body"
        return int(found)

    assert asyncio.run(get()) == status


@pytest.mark.parametrize(("key", "reply"), [("", "close"), ("wrong-key", "close"), ("right-key", "accept")])
def test_a_websocket_needs_the_key(service: Service, key: str, reply: str) -> None:
    async def knock() -> None:
        connection = Connection(Application(service, "right-key"), "websocket", key=key)
        await connection.tell("websocket.connect")
        assert (await connection.sent())["type"] == f"websocket.{reply}"
        await connection.tell("websocket.disconnect", code=1000)
        await asyncio.wait_for(connection.task, PATIENCE)

    asyncio.run(knock())


def test_lifespan_events_are_answered(service: Service) -> None:
    async def live() -> list[str]:
        connection = Connection(Application(service), "lifespan")
        await connection.tell("lifespan.startup")
        await connection.tell("lifespan.shutdown")
        await asyncio.wait_for(connection.task, PATIENCE)
        return [(await connection.sent())["type"] for _ in range(2)]

    assert asyncio.run(live()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"replica": "2"}, "found the argument 'replica'"),
        ({"replicas": "many"}, "replicas: found 'many'"),
        ({"policy": "hold", "policy.nothing": "1"}, "policy.nothing"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Ray itself
def test_wrong_arguments_are_refused(arguments: dict[str, str], reason: str) -> None:
    pytest.importorskip("ray", reason="the library ray is not installed (extra 'ray')")
    from vla_ros.serve.ray_app import application

    with pytest.raises(ConfigError, match=reason):
        application(arguments)


@pytest.mark.filterwarnings("ignore")
def test_replicas_scale_and_share_a_gpu() -> None:
    pytest.importorskip("ray", reason="the library ray is not installed (extra 'ray')")
    from vla_ros.serve.ray_app import application

    deployed = application({"policy": "hold", "replicas": "2", "most_replicas": "8", "gpus": "0.5"})
    options = deployed._bound_deployment
    assert options.ray_actor_options == {"num_cpus": 1.0, "num_gpus": 0.5}
    scaling = options._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 8, 16)
