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


@pytest.mark.parametrize("text", ["[]", "{", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}', "null"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(InputError, match="not a trace"):
        read_chrome(path)
