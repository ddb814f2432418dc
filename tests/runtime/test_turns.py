"""Parts of a measurement, one after another, again and again, each time in new processes."""

import os
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from wavetrain.runtime import turns
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.progress import Progress
from wavetrain.runtime.samples import Sample
from wavetrain.runtime.turns import Part, in_turns, lesser_half, lower_quartile, usual


def world() -> SimpleNamespace:
    return SimpleNamespace(rank=0, size=1, store=HashStore(), progress=Progress(rank=0))


def part(name: str, order: list[str], most_s: float = 1e9) -> Part:
    def work(_, told) -> list[Sample]:
        order.append(name)
        told(name, 0.5)
        return [Sample(name, (2, 3), float(order.count(name)))]

    return Part(name, work, most_s)


def test_parts_take_turns_and_shares_are_of_the_whole() -> None:
    order: list[str] = []
    told: list[tuple[str, float]] = []
    found = in_turns(world(), [part("a", order), part("b", order)], 2, lambda *words: told.append(words), forks=False)
    assert order == ["a", "b", "a", "b"]
    assert told == [("a", 0.125), ("b", 0.375), ("a", 0.625), ("b", 0.875)]
    assert found == [Sample("a", (2, 3), 1.0), Sample("b", (2, 3), 1.0)], "of 1 and 2 the lesser"


def test_a_part_that_is_there_twice_has_two_turns_of_each_and_one_sample() -> None:
    order: list[str] = []
    often, seldom = part("a", order), part("b", order)
    found = in_turns(world(), [often, seldom, often], 2, lambda *_: None, forks=False)
    assert "".join(order) == "abaaba"
    assert [(one.what, one.seconds) for one in found] == [("a", 1.5), ("b", 1.0)]


def test_a_part_that_has_taken_long_enough_has_no_further_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    order: list[str] = []
    in_turns(world(), [part("a", order, most_s=20.0), part("b", order)], 4, lambda *_: None, forks=False)
    assert "".join(order) == "ababbb", "twice ten seconds"


def test_every_turn_of_every_rank_has_a_process_of_its_own_and_a_part_of_the_store() -> None:
    def number(own, _) -> list[Sample]:
        own.store.set(f"process/{own.rank}", str(os.getpid()))
        pids = [int(own.store.get(f"process/{rank}")) for rank in range(own.size)]
        return [Sample("process", (pid,), 1.0) for pid in pids]

    def work(own) -> None:
        found = in_turns(own, [Part("a", number), Part("b", number)], 2, lambda *_: None, forks=True)
        own.give(" ".join(str(one.sizes[0]) for one in found).encode())
        assert os.getpid() not in [one.sizes[0] for one in found]

    first, second = (given.split() for given in run_local(work, 2).check().results)
    assert first == second
    assert len(set(first)) == len(first) == 8


def test_of_samples_of_the_same_thing_the_lesser_half_counts_or_what_a_part_says() -> None:
    took = [Sample("a", (1,), seconds) for seconds in (5.0, 1.0, 9.0, 2.0, 3.0)]
    other = Sample("a", (1,), 7.0, ranks=2)
    assert usual([*took, other], lesser_half) == [Sample("a", (1,), 2.0), other]
    assert usual(took, max) == [Sample("a", (1,), 9.0)]
    assert Sample.of(other.row) == other
    order: list[str] = []
    found = in_turns(world(), [part("a", order)._replace(counts=max)], 3, lambda *_: None, forks=False)
    assert [one.seconds for one in found] == [3.0]


def test_a_quarter_is_quicker_than_the_lower_quartile() -> None:
    assert lower_quartile([8.0, 1.0, 4.0, 2.0]) == 2.0
    assert lower_quartile([5.0, 3.0, 9.0, 1.0, 7.0]) == 3.0
    assert lower_quartile([6.0]) == 6.0
