"""Places in the batch are shared fairly, in a simulation of passes with lengths recorded from the demo."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest

from canvasrt.runtime.schedule import Schedule

BATCH, QUANTUM = 4, 8
# Numbers of steps of the demo's answers to held-out questions; MIXED has fewer short answers.
LENGTHS = [2] * 219 + [4] * 9 + [6] * 8 + [7, 7, 9, 9, 10, 11, 12, 14, 16]
MIXED = LENGTHS[196:]


@dataclass(eq=False)
class Simulated:
    client: str
    owner: str
    need: int
    arrived: int
    passes: int = 0
    turn: int = 0
    place: int = 0
    parks: bool = True
    searches: bool = False


class Simulation:
    """Simulates clients that ask again as soon as they are answered. Time is counted in passes.

    keys: whether every client has a key. Without keys, every request counts as a separate caller.
    """

    def __init__(self, keys: bool = True) -> None:
        self.keys = keys
        self.schedule = Schedule(QUANTUM)
        self.waiting: list[Simulated] = []
        self.running: list[Simulated] = []
        self.time = 0
        self.numbers = count()

    def ask(self, client: str, need: int) -> Simulated:
        owner = client if self.keys else f"{client}, {next(self.numbers)}"
        request = Simulated(client, owner, need, self.time)
        self.schedule.join(request, [*self.waiting, *self.running])
        self.waiting.append(request)
        return request

    def step(self) -> list[Simulated]:
        """Simulate one pass of the generator; return the requests that end with it."""
        while self.waiting and len(self.running) < BATCH:
            self._place(self.schedule.next(self.waiting))
        while (pair := self.schedule.swap(self.waiting, self.running)) is not None:
            best, worst = pair
            self.running.remove(worst)
            self.waiting.append(worst)
            self._place(best)
        self.schedule.count(self.running)
        self.time += 1
        done = [each for each in self.running if each.passes == each.need]
        self.running = [each for each in self.running if each not in done]
        return done

    def _place(self, request: Simulated) -> None:
        self.waiting.remove(request)
        request.turn = 0
        self.schedule.begin(request)
        self.running.append(request)

    def latencies(self, clients: list[str], lengths: list[int], requests: int) -> np.ndarray:
        """Simulate `requests` requests; return how many passes each took from arrival to end."""
        chance = random.Random(0)
        found: list[int] = []
        for client in clients:
            self.ask(client, chance.choice(lengths))
        while len(found) < requests:
            for each in self.step():
                if each.client in clients:
                    found.append(self.time - each.arrived)
                    self.ask(each.client, chance.choice(lengths))
        return np.array(found[requests // 10 :])


@pytest.mark.parametrize("lengths", [LENGTHS, MIXED], ids=["recorded", "mixed"])
@pytest.mark.parametrize("keys", [0, 1, 64])
def test_equal_callers_wait_alike(keys: int, lengths: list[int]) -> None:
    clients = [f"client {number % (keys or 64)}" for number in range(64)]
    times = Simulation(keys > 0).latencies(clients, lengths, 6000)
    assert np.percentile(times, 99) <= 2.5 * times.mean()


@pytest.mark.parametrize(("keys", "client"), [(True, ""), (True, "another key"), (False, "")])
def test_a_long_request_ends_under_endless_short_ones(keys: bool, client: str) -> None:
    simulation = Simulation(keys)
    simulation.latencies([""] * 64, [2, 3], 500)
    long = simulation.ask(client, 40)
    fair = 40 * 65 / BATCH  # with equal shares of all passes
    while long.passes < long.need and simulation.time - long.arrived <= 1.5 * fair:
        for each in simulation.step():
            if each is not long:
                simulation.ask(each.client, random.Random(simulation.time).choice([2, 3]))
    assert long.passes == long.need


def test_a_hog_delays_others_by_its_share() -> None:
    """A caller with 300 requests of 100 passes has the share of one caller."""
    owners = [f"key {number}" for number in range(8)]
    alone = Simulation().latencies(owners, LENGTHS, 3000)
    simulation = Simulation()
    for _ in range(300):
        simulation.ask("hog", 100)
    beside = simulation.latencies(owners, LENGTHS, 3000)
    assert beside.mean() <= 2 * alone.mean()
    assert np.percentile(beside, 99) <= 2 * np.percentile(alone, 99)


def test_newcomers_do_not_wait_for_the_end_of_a_hog() -> None:
    simulation = Simulation()
    for _ in range(300):
        simulation.ask("hog", 100)
    times = simulation.latencies([f"key {number}" for number in range(8)], LENGTHS, 8)
    assert times.max() <= 4 * QUANTUM


def test_whoever_comes_back_owes_and_is_owed_nothing() -> None:
    simulation = Simulation()
    simulation.ask("idle", 1)
    simulation.step()
    for _ in range(8):
        simulation.ask("busy", 30)
    for _ in range(60):
        simulation.step()
    back = simulation.ask("idle", 16)
    while back.passes < back.need:
        simulation.step()
    assert QUANTUM <= simulation.time - back.arrived <= 6 * QUANTUM


def test_requests_of_one_caller_take_turns() -> None:
    simulation = Simulation()
    asked = [simulation.ask("", need) for need in [400] * BATCH + [4] * 2 * BATCH]
    while simulation.time < 3 * QUANTUM:
        simulation.step()
    assert all(each.passes == each.need for each in asked[BATCH:])


def test_whoever_leaves_between_requests_gains_nothing() -> None:
    simulation, passes = Simulation(), Counter[str]()
    for client in ["leaves", *[f"stays {number}" for number in range(8)] * BATCH]:
        simulation.ask(client, 2)
    while simulation.time < 3000:
        for each in simulation.step():
            passes[each.client] += each.passes
            simulation.ask(each.client, 2)
    assert max(passes.values()) <= 1.1 * min(passes.values())


def test_a_search_gives_up_its_place_to_anyone() -> None:
    schedule = Schedule(QUANTUM)
    running, waiting = Simulated("a", "a", 1, 0), Simulated("b", "b", 1, 0)
    schedule.join(running, [])
    schedule.join(waiting, [running])
    for each in (running, waiting, waiting):
        schedule.begin(each)
    schedule.tire(running)
    assert schedule.swap([waiting], [running]) is None
    running.searches = True
    assert schedule.swap([waiting], [running]) == (waiting, running)
