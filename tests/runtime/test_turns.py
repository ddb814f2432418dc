"""Parts of a measurement, one after another, again and again."""

from wavetrain.runtime.samples import Sample
from wavetrain.runtime.turns import in_turns, lower_quartile


class Part:
    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order = name, order

    def turn(self, told) -> None:
        self.order.append(self.name)
        told(self.name, 0.5)

    def samples(self) -> list[Sample]:
        return [Sample(self.name, (), float(self.order.count(self.name)))]


def test_parts_take_turns_and_shares_are_of_the_whole() -> None:
    order: list[str] = []
    told: list[tuple[str, float]] = []
    found = in_turns([Part("a", order), Part("b", order)], 2, lambda *words: told.append(words))
    assert order == ["a", "b", "a", "b"]
    assert told == [("a", 0.125), ("b", 0.375), ("a", 0.625), ("b", 0.875)]
    assert [(one.what, one.seconds) for one in found] == [("a", 2.0), ("b", 2.0)]


def test_a_part_that_is_there_twice_has_two_turns_of_each_and_one_set_of_samples() -> None:
    order: list[str] = []
    often, seldom = Part("a", order), Part("b", order)
    found = in_turns([often, seldom, often], 2, lambda *_: None)
    assert "".join(order) == "abaaba"
    assert [(one.what, one.seconds) for one in found] == [("a", 4.0), ("b", 2.0)]


def test_a_quarter_is_quicker_than_the_lower_quartile() -> None:
    assert lower_quartile([8.0, 1.0, 4.0, 2.0]) == 2.0
    assert lower_quartile([5.0, 3.0, 9.0, 1.0, 7.0]) == 3.0
    assert lower_quartile([6.0]) == 6.0
