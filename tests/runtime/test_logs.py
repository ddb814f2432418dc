"""The log's lines and TensorBoard's records say what was written; the environment tells no secrets."""

import json
import logging
import math
import os
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.base.errors import RunError
from wavetrain.runtime import logs as module
from wavetrain.runtime.logs import (
    RunLog,
    StepRecord,
    crc32c,
    environment,
    read_steps,
    record,
    scalar_event,
    write_environment,
)

FULL = StepRecord(
    step=3, loss=2.5, tokens_per_s=1e4, learning_rate=1e-3, gradient_norm=0.75, peak_bytes=123_456_789_012, mfu=0.4
)


# --- an independent reader of event files, from the formats' descriptions ---


def slow_crc32c(data):
    """By long division of the message's bits, without a table (RFC 3720: x^32 + x^28 + x^27 + ...)."""
    polynomial = 0x11EDC6F41
    bits = [byte >> i & 1 for byte in data for i in range(8)] + [0] * 32
    for i in range(32):
        bits[i] ^= 1
    rest = 0
    for bit in bits:
        rest = rest << 1 | bit
        if rest >> 32:
            rest ^= polynomial
    return int(f"{rest ^ 0xFFFFFFFF:032b}"[::-1], 2)


def unmasked(crc):
    rotated = (crc - 0xA282EAD8) % (1 << 32)
    return (rotated >> 17 | rotated << 15) % (1 << 32)


def records(data):
    at = 0
    while at < len(data):
        head = data[at : at + 8]
        (size,) = struct.unpack("<Q", head)
        (crc,) = struct.unpack_from("<I", data, at + 8)
        assert unmasked(crc) == slow_crc32c(head)
        body = data[at + 12 : at + 12 + size]
        assert len(body) == size
        (crc,) = struct.unpack_from("<I", data, at + 12 + size)
        assert unmasked(crc) == slow_crc32c(body)
        yield body
        at += 16 + size
    assert at == len(data)


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def message(data):
    """(field, value) of a protobuf message; lengths, doubles and floats as their wire types say."""
    at, found = 0, []
    while at < len(data):
        tag, at = varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = varint(data, at)
        elif kind == 2:
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
            assert len(value) == size
        else:
            form = {1: "<d", 5: "<f"}[kind]
            (value,) = struct.unpack_from(form, data, at)
            at += struct.calcsize(form)
        found.append((tag >> 3, value))
    return found


def scalars(event):
    """(wall time, step, values) of an Event."""
    fields = dict(message(event))
    values = [dict(message(value)) for number, value in message(fields[5]) if number == 1]
    return fields[1], fields[2], {value[1].decode(): value[2] for value in values}


# --- TensorBoard ---


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),  # the check value of every catalogue
        (bytes(32), 0x8A9136AA),  # RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (bytes.fromhex("01c000000000000000000000000000001400000000000400000000140000001828000000000000000200000000000000"),
         0xD9963A56),  # an iSCSI read command
    ],
)  # fmt: skip
def test_the_checksum_is_that_of_the_standard(data, crc):
    assert crc32c(data) == slow_crc32c(data) == crc
    assert not data or crc32c(data) != zlib.crc32(data)


@given(st.binary(max_size=300))
def test_records_are_read_back(data):
    assert list(records(record(data) + record(data))) == [data, data]


tags = st.text(min_size=1, max_size=20)


@given(
    st.floats(0, 1e10),
    st.integers(0, 2**63 - 1),
    st.dictionaries(tags, st.floats(width=32, allow_nan=False), max_size=8),
)
def test_events_are_read_back(wall_s, step, values):
    assert scalars(scalar_event(wall_s, step, values)) == (wall_s, step, values)


@pytest.mark.parametrize("step", [0, 127, 128, 129, 16_383, 16_384, 2**63 - 1])
def test_steps_of_any_length_are_read_back(step):
    assert scalars(scalar_event(1.0, step, {"a": 0.5})) == (1.0, step, {"a": 0.5})


def test_a_value_beyond_float32_is_infinite_there():
    assert scalars(scalar_event(0.0, 1, {"a": 1e300, "b": -1e39}))[2] == {"a": math.inf, "b": -math.inf}


# --- a run's files ---


def only_events(directory):
    (path,) = directory.glob("events.out.tfevents.*")
    return path


def test_a_step_is_a_line_and_an_event(tmp_path):
    with RunLog(tmp_path / "new" / "run") as log:
        log.write(FULL)
        log.write(StepRecord(step=4, loss=2.25))
    directory = tmp_path / "new" / "run"
    first, second = map(json.loads, (directory / "log.jsonl").read_text().splitlines())
    assert list(first) == ["step", "loss", "tokens_per_s", "learning_rate", "gradient_norm", "peak_bytes", "mfu"]
    assert first["peak_bytes"] == 123_456_789_012
    assert second == {"step": 4, "loss": 2.25}
    version, *events = records(only_events(directory).read_bytes())
    assert dict(message(version))[3] == b"brain.Event:2"
    (_, step, values), (_, later, few) = map(scalars, events)
    assert (step, later, few) == (3, 4, {"loss": 2.25})
    assert values == pytest.approx({name: value for name, value in first.items() if name != "step"}, rel=1e-6)
    assert read_steps(directory / "log.jsonl") == [FULL, StepRecord(step=4, loss=2.25)]


def test_every_step_is_on_disk_before_the_next(tmp_path):
    log = RunLog(tmp_path)
    for step in range(3):
        log.write(StepRecord(step=step, loss=1.0))
        assert (tmp_path / "log.jsonl").read_bytes().count(b"\n") == step + 1
        assert len(list(records(only_events(tmp_path).read_bytes()))) == step + 2
    log.close()


def test_a_run_that_goes_on_appends(tmp_path, caplog):
    with RunLog(tmp_path) as log:
        for step in range(4):
            log.write(StepRecord(step=step, loss=float(step)))
    with (tmp_path / "log.jsonl").open("ab") as stream:
        stream.write(b'{"step": 4, "lo')  # killed
    with caplog.at_level(logging.WARNING), RunLog(tmp_path) as log:
        log.write(StepRecord(step=2, loss=20.0))
    assert "cut a last line that was not finished (15 bytes)" in caplog.text
    assert [item.loss for item in read_steps(tmp_path / "log.jsonl")] == [0.0, 1.0, 20.0, 3.0]
    assert len(list(tmp_path.glob("events.*"))) == 2


def test_a_long_log_is_not_read_to_find_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_LINE", 64)
    lines = b"".join(b'{"step": %d}\n' % step for step in range(100))
    (tmp_path / "log.jsonl").write_bytes(lines + b"{")
    RunLog(tmp_path).close()
    assert (tmp_path / "log.jsonl").read_bytes() == lines


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_ends_the_run_and_is_not_written(tmp_path, value):
    with RunLog(tmp_path) as log, pytest.raises(RunError, match=rf"step 5: loss is {value}"):
        log.write(StepRecord(step=5, loss=value))
    assert not (tmp_path / "log.jsonl").read_text()


def test_a_directory_that_can_not_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/run: can't be written: Not a directory"):
        RunLog(tmp_path / "file" / "run")
    with pytest.raises(RunError, match=r"environment\.json: can't be written: No such file"):
        write_environment(tmp_path / "absent")


def test_a_full_disk_is_told(tmp_path):
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"log\.jsonl: can't be written: No space left"), RunLog(tmp_path) as log:
        log.write(FULL)


# --- where it ran ---


def test_the_environment_has_versions_and_no_variables(tmp_path, monkeypatch):
    secret = "hunter2-5d41402abc4b2a76"
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OMP_NUM_THREADS_X", "SSH_CONNECTION"):
        monkeypatch.setenv(name, secret)
    text = write_environment(tmp_path).read_text()
    assert secret not in text
    assert os.uname().nodename not in text or len(os.uname().nodename) < 4
    found = json.loads(text)
    assert found == environment()
    assert found["schema"] == "wavetrain.environment/1"
    assert {"wavetrain", "torch", "numpy"} <= set(found["packages"])
    assert found["num_cores"] >= found["num_usable_cores"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert found["cpu"]


def test_a_system_that_tells_little_is_recorded_too(monkeypatch):
    def refuse(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(module.Path, "read_text", refuse)
    monkeypatch.setattr(module, "PACKAGES", ("no-such-package",))
    assert environment()["packages"] == {}
    assert isinstance(environment()["cpu"], str)
