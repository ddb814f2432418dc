import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.base.errors import InputError
from wavetrain.timeline import Counter, Event, Timeline, read_chrome, write_chrome

times = st.floats(0, 1e6, allow_subnormal=False)
names = st.text(max_size=8)
events = st.builds(
    lambda a, b, rank, lane, name: Event(min(a, b), max(a, b), rank, lane, name),
    *(times, times, st.integers(0, 4), st.sampled_from(["compute", "network"]), names),
)
counters = st.builds(Counter, times, st.integers(0, 4), names, st.floats(-1e12, 1e12))
timelines = st.builds(Timeline, st.lists(events).map(tuple), st.lists(counters).map(tuple))


@given(timelines, st.sampled_from([".json", ".json.gz"]))
def test_a_file_reads_back_exactly(tmp_path_factory, timeline, suffix):
    path = tmp_path_factory.mktemp("trace") / f"t{suffix}"
    write_chrome(timeline, path)
    assert read_chrome(path) == timeline


def test_the_file_is_what_perfetto_expects(tmp_path):
    path = tmp_path / "t.json.gz"
    timeline = Timeline((Event(0.0015, 0.002, 3, "compute", "3F0"),), (Counter(0.001, 3, "memory_bytes", 7.0),))
    write_chrome(timeline, path)
    document = json.loads(gzip.decompress(path.read_bytes()))
    by_phase = {item["ph"]: item for item in document["traceEvents"]}
    assert document["displayTimeUnit"] == "ms"
    expected = {"ph": "X", "name": "3F0", "cat": "compute", "pid": 3, "tid": 0, "ts": 1500.0, "dur": 500.0}
    assert by_phase["X"] == expected
    assert by_phase["C"] == {"ph": "C", "name": "memory_bytes", "pid": 3, "ts": 1000.0, "args": {"value": 7.0}}
    named = {item["name"]: item["args"]["name"] for item in document["traceEvents"] if item["ph"] == "M"}
    assert named == {"process_name": "rank 3", "thread_name": "compute"}


def test_the_same_timeline_gives_the_same_bytes(tmp_path):
    timeline = Timeline((Event(0.0, 1.0, 0, "compute", "0F0"),))
    write_chrome(timeline, tmp_path / "a.json.gz")
    write_chrome(timeline, tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


EVENT = {"ph": "X", "name": "0F0", "cat": "compute", "pid": 0, "tid": 0, "ts": 0, "dur": 1}


@pytest.mark.parametrize(
    "wrong",
    [{"name": 5}, {"cat": None}, {"pid": [0]}, {"pid": True}, {"pid": "0"}, {"ts": []}, {"dur": -1}, {"ts": 10**400}],
)
def test_events_of_another_kind_are_refused(tmp_path, wrong):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [EVENT | wrong]}))
    with pytest.raises(InputError, match="not a trace"):
        read_chrome(path)


def broken(text: str):
    packed = gzip.compress(text.encode())
    yield from (packed[: len(packed) // 2], packed[:5])
    yield from (packed[:12] + b"\xff" * 20 + packed[32:], packed[:-8] + bytes(8))
    yield b'{"traceEvents": ' + b"[" * 100_000
    yield b'{"traceEvents": [], "args": ' + b'{"a": ' * 100_000


@pytest.mark.parametrize("data", [*broken(json.dumps({"traceEvents": [EVENT] * 50}))], ids=range(6))
def test_files_that_are_cut_spoilt_or_endless_are_refused(tmp_path, data):
    path = tmp_path / "t.json.gz"
    path.write_bytes(data)
    with pytest.raises(InputError, match="not a trace"):
        read_chrome(path)


@pytest.mark.parametrize("text", ["[]", "{", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}', "null"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(InputError, match="not a trace"):
        read_chrome(path)
