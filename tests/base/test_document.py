import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.base.document import MOST_BYTES, merge, parse_json, parse_yaml, read_document, read_text
from wavetrain.base.errors import InputError

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcxyz é", min_size=1), inner, max_size=4),
    max_leaves=20,
)


@given(plain, st.sampled_from([None, 1, 3]))
def test_json_reads_as_the_standard_library_does(value, indent):
    text = json.dumps(value, indent=indent)
    assert parse_json(text, file="x.json").plain() == json.loads(text)


@given(plain)
def test_yaml_reads_json_text_as_json(value):
    text = json.dumps(value, ensure_ascii=True)
    if "\\u" in text or "\\/" in text or "\\" in text:  # YAML 1.1 escapes differ; JSON files are read as JSON
        return
    assert parse_yaml(text, file="x.yaml").plain() == json.loads(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 12e3", 12000.0),
        ("a: 08", 8),
        ("a: on", "on"),
        ("a: yes", "yes"),
        ("a: 1:30", "1:30"),
        ("a: 1_000", "1_000"),
        ("a: 0x10", 16),
        ("a: 0o17", 15),
        ("a: ~", None),
        ("a:", None),
        ("a: 'true'", "true"),
        ("a: True", True),
        ("a: .5", 0.5),
        ("a: 2001-01-01", "2001-01-01"),
    ],
)
def test_yaml_scalars_are_those_of_1_2(text, value):
    found = parse_yaml(text, file="x.yaml").plain()["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb: &x 2\nc: *x\n", 2, "anchors"),
        ("a: 1\nc: *x\n", 2, "aliases"),
        ("a: !!python/object 1\n", 1, "tags"),
        ("a: 1\nb: 2\na: 3\n", 3, "given twice (first on line 1)"),
        ("a: .nan\n", 1, "finite"),
        ("a:\n  b: [1, -.inf]\n", 2, "finite"),
        ("a: 1e999\n", 1, "finite"),
        ("a: [1\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "one YAML document"),
        ("a: \x07\n", 1, "does not allow"),
        ("? [1, 2]\n: 3\n", 1, "a key must be a word"),
        ("a: " + "9" * 101, 1, "digits"),
        ("[" * 100, 1, "nested deeper"),
        ("&x a: 1", 1, "anchors"),
        ("!!str a: 1", 1, "tags"),
        ("[" + "1," * 300_000 + "]", 1, "more than"),
        ("{a: " * 3000, 1, "nested deeper"),
        ("a: \t- b: c:\n", 1, "not valid YAML"),
    ],
)
def test_yaml_that_is_refused(text, line, says):
    with pytest.raises(InputError) as caught:
        parse_yaml(text, file="m.yaml")
    assert says in str(caught.value)
    assert any(problem.where == f"m.yaml:{line}" for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('{"a": 1,\n "a": 2}', 2, "given twice (first on line 1)"),
        ('{"a":\n NaN}', 2, "finite"),
        ('{"a": -Infinity}', 1, "finite"),
        ('{"a": 1e999}', 1, "finite"),
        ('{"a": 1', 1, "not valid JSON"),
        ('{"a" 1}', 1, "expected ':' after the key a"),
        ("{a: 1}", 1, "double quotes"),
        ('{"a": 1} x', 1, "after the end"),
        ("", 1, "ends too early"),
        ('{"a": [1 2]}', 1, "expected ',' or ']'"),
        ('{"a": "\n"}', 1, "not valid JSON"),
        ('{"a\\u0007": 1}', 1, "control characters"),
        ("[" * 3000, 1, "nested deeper"),
        ("[" + "1," * 300_000 + "1]", 1, "more than"),
        ('{"a": ' + "1" * 5000 + "}", 1, "digits"),
        ('{"a": 01}', 1, "expected ',' or '}'"),
    ],
)
def test_json_that_is_refused(text, line, says):
    with pytest.raises(InputError) as caught:
        parse_json(text, file="m.json")
    assert says in str(caught.value)
    assert any(problem.where == f"m.json:{line}" for problem in caught.value.problems)


def test_all_problems_at_once():
    with pytest.raises(InputError) as caught:
        parse_yaml("a: .nan\nb: &x 1\na: 2\n", file="m.yaml")
    assert [problem.key for problem in caught.value.problems] == ["a", "b", "a"]


def test_lines_are_those_of_the_keys():
    node = parse_yaml("a: 1\nb:\n  c:\n    - 1\n    - 2\n", file="m.yaml")
    assert node.value["a"].line == 1
    assert node.value["b"].value["c"].line == 3
    assert node.value["b"].value["c"].value[1].line == 5


def test_merge_keeps_what_is_not_stated_and_where_it_stood():
    base = parse_yaml("a: 1\nb: {c: 2, d: 3}\n", file="base.yaml")
    over = parse_yaml("b: {c: 9}\n", file="mine.yaml")
    both = merge(base, over)
    assert both.plain() == {"a": 1, "b": {"c": 9, "d": 3}}
    assert both.value["b"].value["c"].where == "mine.yaml:1"
    assert both.value["b"].value["d"].where == "base.yaml:2"


def test_files_that_cannot_be_read(tmp_path):
    big = tmp_path / "big.yaml"
    big.write_bytes(b"a" * (MOST_BYTES + 1))
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nb: \xff\n")
    for path, says in [(big, "at most"), (latin, "UTF-8"), (tmp_path / "no", "No such file"), (tmp_path, "directory")]:
        with pytest.raises(InputError, match=says):
            read_text(path)
    with pytest.raises(InputError, match=r"latin\.yaml:2"):
        read_document(latin)


def test_a_byte_order_mark_is_not_content(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_document(path).plain() == {"a": 1}
