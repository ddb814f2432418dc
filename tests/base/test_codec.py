from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.base.codec import decode, dumps, encode
from wavetrain.base.document import parse_json
from wavetrain.base.errors import InputError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Round:
    kind: ClassVar[str] = "round"
    radius: float


@dataclass(frozen=True)
class Square:
    kind: ClassVar[str] = "square"
    side: int

    def __post_init__(self) -> None:
        if self.side < 0:
            raise ValueError("side must not be negative")


@dataclass(frozen=True)
class Thing:
    name: str
    shapes: tuple[Round | Square, ...]
    colour: Colour
    size: Literal["small", "large"] = "small"
    pair: tuple[int, float] = (1, 2.0)
    note: str | None = None
    on: bool = False


printable = st.text().filter(str.isprintable)
things = st.builds(
    Thing,
    printable,
    st.lists(
        st.builds(Round, st.floats(allow_nan=False, allow_infinity=False)) | st.builds(Square, st.integers(0, 10**40))
    ).map(tuple),
    st.sampled_from(Colour),
    st.sampled_from(["small", "large"]),
    st.tuples(st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    st.none() | printable,
    st.booleans(),
)


def read(text: str) -> Thing:
    return decode(Thing, parse_json(text, file="t.json"), schema="t/1")


@given(things)
def test_what_is_written_is_read_back_equal(thing):
    assert read(dumps(encode(thing, schema="t/1"))) == thing


GOOD = '{"schema": "t/1", "name": "n", "shapes": [], "colour": "red"}'


@pytest.mark.parametrize(
    ("old", "new", "key", "says"),
    [
        ('"t/1"', '"t/2"', "schema", "unknown schema"),
        ('"schema": "t/1", ', "", "schema", "unknown schema"),
        ('"n"', "3", "thing.name", "must be str"),
        ('"red"', '"rad"', "thing.colour", "nearest: red"),
        ('"red"', "3", "thing.colour", "possible"),
        ("[]", "{}", "thing.shapes", "must be a list"),
        ("[]", '[{"kind": "oval"}]', "thing.shapes[0].kind", "round, square"),
        ("[]", "[3]", "thing.shapes[0].kind", "known kind"),
        ("[]", '[{"kind": "square"}]', "thing.shapes[0].side", "missing"),
        ("[]", '[{"kind": "square", "side": -1}]', "thing.shapes[0]", "must not be negative"),
        ("[]", '[{"kind": "square", "side": 1.5}]', "thing.shapes[0].side", "must be int"),
        ("[]", '[{"kind": "square", "side": true}]', "thing.shapes[0].side", "must be int"),
        ('"red"', '"red", "pair": [1]', "thing.pair", "2 items"),
        ('"red"', '"red", "nam": 1', "thing.nam", "nearest: name"),
        ('"red"', '"red", "size": "big"', "thing.size", "small, large"),
        ('"n"', '"\\u0007"', "thing.name", "printable"),
    ],
)
def test_what_is_wrong_is_named(old, new, key, says):
    assert old in GOOD
    with pytest.raises(InputError) as caught:
        read(GOOD.replace(old, new, 1))
    assert key in [problem.key for problem in caught.value.problems]
    assert says in str(caught.value)


def test_not_a_mapping():
    with pytest.raises(InputError, match="must be a mapping"):
        read("[]")


def test_nan_is_not_written():
    with pytest.raises(ValueError, match="no place"):
        encode(Round(float("nan")))
    with pytest.raises(TypeError):
        encode(Thing("x", [], Colour.RED))
