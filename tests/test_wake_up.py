"""No wake-up is lost: checks base/waiter.h's protocol over every interleaving of a small model.

One rank publishes a flag a few times and checks each time whether its peer sleeps. The peer waits
for each value and sleeps if it is not there yet. As on x86, stores may stay in a store buffer
before others see them, unless they are sequentially consistent. The kernel (futex) compares the
flag once more before a thread sleeps. test_cpp.py runs the real waiter, flavour "endless".
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

pytestmark = pytest.mark.no_extension

NUM_VALUES = 3


class Protocol(NamedTuple):
    """The guarantees that the waiter relies on; tests break one at a time."""

    publish_is_ordered: bool = True  # the flag's store is visible before `sleeping` is loaded
    stores_before_it_looks: bool = True
    announces_sleep: bool = True
    kernel_compares: bool = True


class State(NamedTuple):
    """The model's state between two steps. Buffers hold stores that others cannot see yet."""

    flag: int = 0
    flag_buffer: tuple[int, ...] = ()
    sleeping: int = 0
    published: int = 0  # values published so far
    publisher: str = "start"
    saw_sleeper: bool = False
    received: int = 0  # values received so far
    sleeper: str = "look"
    seen: int = 0
    is_asleep: bool = False


def publisher_steps(state: State, protocol: Protocol) -> list[State]:
    """Store the flag; load `sleeping`; wake the sleeper."""
    if state.published == NUM_VALUES:
        return []
    value = state.published + 1
    if protocol.publish_is_ordered:
        stored = state._replace(flag=value)
    else:
        stored = state._replace(flag_buffer=(*state.flag_buffer, value))
    looked = state._replace(saw_sleeper=state.sleeping == 1)
    order = ["start", "middle", "end"]
    steps = [stored, looked] if protocol.stores_before_it_looks else [looked, stored]
    if state.publisher != "end":
        index = order.index(state.publisher)
        return [steps[index]._replace(publisher=order[index + 1])]
    woken = state._replace(is_asleep=False) if state.saw_sleeper else state
    return [woken._replace(published=value, publisher="start")]


def sleeper_steps(state: State, protocol: Protocol) -> list[State]:
    """Load the flag; set `sleeping`; load the flag again; compare in the kernel, sleep; repeat."""
    if state.received == NUM_VALUES or state.is_asleep:
        return []
    wanted = state.received + 1
    if state.sleeper == "look":
        if state.flag >= wanted:
            return [state._replace(received=wanted)]
        return [state._replace(sleeper="announce")]
    if state.sleeper == "announce":
        sleeping = 1 if protocol.announces_sleep else 0
        return [state._replace(sleeping=sleeping, sleeper="look again")]
    if state.sleeper == "look again":
        goes_to_sleep = state.flag < wanted
        return [state._replace(seen=state.flag, sleeper="sleep" if goes_to_sleep else "rise")]
    if state.sleeper == "sleep":
        may_sleep = state.flag == state.seen or not protocol.kernel_compares
        return [state._replace(is_asleep=may_sleep, sleeper="rise")]
    return [state._replace(sleeping=0, sleeper="look")]


def drain_steps(state: State) -> list[State]:
    """The oldest buffered store becomes visible."""
    if not state.flag_buffer:
        return []
    return [state._replace(flag=state.flag_buffer[0], flag_buffer=state.flag_buffer[1:])]


def find_lost_wake_up(protocol: Protocol) -> State | None:
    """A state in which the sleeper sleeps and no step can wake it."""
    seen = {State()}
    stack = [State()]
    while stack:
        state = stack.pop()
        steps = [
            *publisher_steps(state, protocol),
            *sleeper_steps(state, protocol),
            *drain_steps(state),
        ]
        if not steps and state.received < NUM_VALUES:
            return state
        for step in steps:
            if step not in seen:
                seen.add(step)
                stack.append(step)
    return None


def test_wake_up_every_interleaving_reaches_the_sleeper() -> None:
    assert find_lost_wake_up(Protocol()) is None


@pytest.mark.parametrize("order", Protocol._fields)
def test_wake_up_without_one_order_is_found_lost(order: str) -> None:
    lost = find_lost_wake_up(Protocol()._replace(**{order: False}))
    assert lost is not None and lost.is_asleep
