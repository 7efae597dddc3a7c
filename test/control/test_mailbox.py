"""The mailbox: newest wins, nobody waits to put, nothing is lost uncounted."""

from __future__ import annotations

import threading
import time

from vla_ros.control.mailbox import Mailbox


def test_the_newest_wins_and_the_replaced_one_is_counted() -> None:
    box: Mailbox[int] = Mailbox()
    assert box.put(1) is False
    assert box.put(2) is True
    assert box.take(0) == 2
    assert box.take(0) is None
    assert (box.received, box.replaced, box.taken) == (2, 1, 1)


def test_an_item_that_is_none_or_false_is_an_item() -> None:
    box: Mailbox[bool] = Mailbox()
    box.put(False)
    assert box.take(0) is False
    assert box.taken == 1


def test_take_waits_for_an_item_of_another_thread() -> None:
    box: Mailbox[str] = Mailbox()
    got: list[str | None] = []
    taker = threading.Thread(target=lambda: got.append(box.take(10.0)))
    taker.start()
    box.put("frame")
    taker.join(10.0)
    assert got == ["frame"]


def test_take_gives_none_after_its_timeout() -> None:
    began = time.monotonic()
    assert Mailbox[int]().take(0.02) is None
    assert time.monotonic() - began >= 0.02


def test_clear_throws_the_waiting_item_away() -> None:
    box: Mailbox[int] = Mailbox()
    assert box.clear() is False
    box.put(1)
    assert box.clear() is True
    assert box.take(0) is None
    assert (box.received, box.replaced, box.taken) == (1, 1, 0)


def test_under_threads_items_come_in_order_and_every_one_is_taken_or_replaced() -> None:
    box: Mailbox[int] = Mailbox()
    total = 20_000
    taken: list[int] = []

    def take_all() -> None:
        while (item := box.take(10.0)) is not None:
            taken.append(item)
            if item == total - 1:
                return

    taker = threading.Thread(target=take_all)
    taker.start()
    for number in range(total):
        box.put(number)
    taker.join(30.0)
    assert taken == sorted(set(taken)), "an item came twice or out of order"
    assert taken[-1] == total - 1
    assert box.received == total
    assert box.taken == len(taken)
    assert box.taken + box.replaced == total


def test_put_takes_less_than_ten_microseconds_though_nobody_takes() -> None:
    box: Mailbox[int] = Mailbox()
    samples = []
    for number in range(5_000):
        began = time.perf_counter_ns()
        box.put(number)
        samples.append(time.perf_counter_ns() - began)
    assert sorted(samples)[len(samples) // 2] < 10_000
