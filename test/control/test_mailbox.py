import threading
import time

from vla_ros.control.clock import Clock, SimulatedClock
from vla_ros.control.mailbox import Mailbox


def test_put_replaces_and_returns_the_waiting_item() -> None:
    box: Mailbox[int] = Mailbox(Clock())
    assert box.put(0) is None
    assert box.put(2) == 0
    assert box.take() == 2
    assert box.take() is None


def test_take_waits_for_an_item_of_another_thread() -> None:
    box: Mailbox[str] = Mailbox(Clock())
    got: list[str | None] = []
    taker = threading.Thread(target=lambda: got.append(box.take(10.0)))
    taker.start()
    box.put("frame")
    taker.join(10.0)
    assert got == ["frame"]


def test_take_returns_none_after_its_timeout() -> None:
    clock = SimulatedClock()
    assert Mailbox[int](clock).take(0.5) is None
    assert clock.steady() == 0.5


def test_under_threads_items_come_in_order_and_every_one_is_taken_or_replaced() -> None:
    box: Mailbox[int] = Mailbox(Clock())
    total = 20_000
    taken: list[int] = []

    def take_all() -> None:
        while (item := box.take(10.0)) is not None:
            taken.append(item)
            if item == total - 1:
                return

    taker = threading.Thread(target=take_all)
    taker.start()
    replaced = [item for number in range(total) if (item := box.put(number)) is not None]
    taker.join(30.0)
    assert taken == sorted(taken)
    assert sorted(taken + replaced) == list(range(total)), "an item came twice or was lost"


def test_put_takes_less_than_ten_microseconds() -> None:
    box: Mailbox[int] = Mailbox(Clock())
    samples = []
    for number in range(5_000):
        began = time.perf_counter_ns()
        box.put(number)
        samples.append(time.perf_counter_ns() - began)
    assert sorted(samples)[len(samples) // 2] < 10_000
