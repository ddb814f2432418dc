import pytest

from wavetrain.base.document import parse_yaml
from wavetrain.base.errors import InputError
from wavetrain.base.fields import Fields


def fields(text: str, **options: bool) -> Fields:
    return Fields(parse_yaml(text, file="m.yaml"), **options)


def problems(f: Fields) -> str:
    with pytest.raises(InputError) as caught:
        f.finish()
    return str(caught.value)


def test_values_are_returned_and_sources_remembered():
    f = fields("n: 3\nx: {value: 2.5, source: sheet, note: rounded}\nt: hello\non: true\nc: red\n")
    values = (f.whole("n"), f.number("x"), f.text("t"), f.flag("on"), f.choice("c", ("red", "blue")))
    assert values == (3, 2.5, "hello", True, "red")
    assert f.sources == {"x": "sheet"}
    f.finish()


def test_null_counts_as_absent():
    f = fields("n: null\n")
    assert f.whole("n", default=7) == 7
    f.finish()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("true", "must be a whole number, not true or false"),
        ("4.0", "must be a whole number"),
        ("'4'", "must be a whole number, not text"),
        ("[4]", "must be a whole number, not a list"),
        ("{a: 4}", "must be a single value"),
        ("0", "from 1 to 100"),
        ("101", "from 1 to 100"),
        ("-3", "from 1 to 100"),
        ("null", "must have a value"),
    ],
)
def test_whole_numbers_refuse(value, says):
    f = fields(f"a: 1\nn: {value}\n")
    f.whole("a")
    assert f.whole("n", most=100) == 1
    assert not f.good("n")
    message = problems(f)
    assert says in message
    assert "m.yaml:2  n" in message


def test_other_kinds_refuse():
    f = fields("x: abc\nt: 5\nb: 1\nc: rad\ns: 3\nl: 3\n")
    f.number("x")
    f.text("t")
    f.flag("b")
    f.choice("c", ("red", "blue"))
    f.section("s")
    f.list_of("l", most=3)
    message = problems(f)
    for says in ("must be a number", "must be text", "true or false", "nearest: red", "a mapping", "must be a list"):
        assert says in message


def test_text_refuses_control_characters():
    f = fields('t: "a\\x1bb"\n')
    f.text("t")
    assert "control characters" in problems(f)


def test_unknown_keys_get_the_nearest_known():
    f = fields("hiden: 4\n")
    f.whole("hidden", default=1)
    message = problems(f)
    assert "m.yaml:1  hiden: 4" in message
    assert "unknown key" in message
    assert "nearest: hidden" in message


def test_a_missing_key_suggests_the_misspelt_one():
    f = fields("hiden: 4\n", strict=False)
    f.whole("hidden")
    assert "try: rename hiden to hidden" in problems(f)


def test_lenient_mappings_ignore_other_keys():
    f = fields("a: 1\nb: 2\n", strict=False)
    f.whole("a")
    f.finish()


def test_nested_keys_are_named_in_full():
    f = fields("net:\n  nics: none\n")
    f.section("net").whole("nics")
    assert "m.yaml:2  net.nics: none" in problems(f)
