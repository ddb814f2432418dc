"""A checkpoint's model as files that the safetensors package and transformers read."""

import errno
import json
import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tests.runtime.checkpoints import SHARDS, names_in, noise, same, tensors_at, two_good_ones

from wavetrain.base.errors import InputError, RunError
from wavetrain.runtime import exported
from wavetrain.runtime.checkpoint import begin, publish, step_name
from wavetrain.runtime.exported import INDEX, SINGLE, export_checkpoint
from wavetrain.runtime.manifest import MANIFEST, Manifest
from wavetrain.runtime.tensorfile import Entry, write_shard


@pytest.fixture
def root(tmp_path):
    return two_good_ones(tmp_path / "kept")


def loaded(directory):
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_has(directory, step):
    found, expected = loaded(directory), tensors_at(step)
    assert found.keys() == expected.keys()
    assert all(same(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("most", [1 << 30, 200, 1])
def test_the_newest_is_written_in_files_of_a_size(root, tmp_path, most):
    done = export_checkpoint(root, tmp_path / "model", most_file=most)
    assert_has(tmp_path / "model", 20)
    assert (done.checkpoint.step, done.num_bytes) == (20, 220)
    several = {1 << 30: 1, 200: 2, 1: 3}[most]
    assert len(done.files) == several
    if several == 1:
        assert names_in(tmp_path / "model") == [SINGLE]
    else:
        index = json.loads((tmp_path / "model" / INDEX).read_text())
        assert index["metadata"]["total_size"] == 220
        for name, file in index["weight_map"].items():
            assert name in load_file(tmp_path / "model" / file)
    with safe_open(tmp_path / "model" / done.files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    most=st.integers(1, 40),
)
def test_blocks_are_the_whole_in_its_order(shape, most):
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    found = []
    for place in exported._blocks(shape, most):
        block = numbers[tuple(slice(*ranges[0]) for ranges in place)]
        assert block.numel() <= most
        found += block.flatten().tolist()
    assert found == list(range(numbers.numel()))


def test_a_tensor_of_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(exported, "BLOCK", 1000)
    whole = noise((50, 7, 3), torch.bfloat16)
    folder = begin(tmp_path / "kept", step=1)
    parts = [slice(0, 20), slice(20, 50)]
    shards = [
        write_shard(
            folder, rank, [Entry("w", "value", whole.shape, (((p.start, p.stop),), ((0, 7),), ((0, 3),)), whole[p])]
        )
        for rank, p in enumerate(parts)
    ]
    publish(folder, Manifest(run="r", step=1, plan_hash="p", shards=tuple(shards)))
    export_checkpoint(tmp_path / "kept", tmp_path / "model")
    assert same(loaded(tmp_path / "model")["w"], whole)


def test_a_step_may_be_chosen(root, tmp_path):
    assert export_checkpoint(root / step_name(10), tmp_path / "model").checkpoint.step == 10
    assert_has(tmp_path / "model", 10)


def test_a_bad_one_is_passed_over_said_and_left_where_it_is(root, tmp_path):
    shard = root / step_name(20) / SHARDS[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    done = export_checkpoint(root, tmp_path / "model")
    assert done.checkpoint.step == 10
    assert SHARDS[0] in done.passed_over[0]
    assert names_in(root) == [step_name(10), step_name(20)]
    with pytest.raises(InputError, match="SHA-256"):
        export_checkpoint(root / step_name(20), tmp_path / "other")
    (root / step_name(10) / MANIFEST).write_text("{}")
    with pytest.raises(InputError, match="has no good checkpoint"):
        export_checkpoint(root, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_nothing_is_overwritten(root, tmp_path):
    (tmp_path / "empty").mkdir()
    export_checkpoint(root, tmp_path / "empty")
    assert_has(tmp_path / "empty", 20)
    before = (tmp_path / "empty" / SINGLE).read_bytes()
    with pytest.raises(InputError, match="is not empty"):
        export_checkpoint(root, tmp_path / "empty")
    assert (tmp_path / "empty" / SINGLE).read_bytes() == before
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(InputError, match="is no directory"):
            export_checkpoint(root, tmp_path / name)
    with pytest.raises(InputError, match="has no checkpoint"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "model")


def test_a_full_disk_leaves_nothing_behind(root, tmp_path, monkeypatch):
    left, real = [0], os.write

    def failing(stream, data):
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(stream, data)

    monkeypatch.setattr(os, "write", failing)
    for number in range(1, 7):  # two headers, three tensors, an index
        left[0] = number
        with pytest.raises(RunError, match="No space left on device"):
            export_checkpoint(root, tmp_path / "model", most_file=200)
        assert names_in(tmp_path) == ["kept"]
    left[0] = 7
    export_checkpoint(root, tmp_path / "model", most_file=200)
    assert_has(tmp_path / "model", 20)


def test_a_config_goes_with_it_if_it_is_one(root, tmp_path):
    config = tmp_path / "config.json"
    for text, said in (("{", "not valid JSON"), ("[]", "model_type"), ("[" * 10**5, "not valid JSON")):
        config.write_text(text)
        with pytest.raises(InputError, match=said):
            export_checkpoint(root, tmp_path / "model", config=config)
    config.write_text('{"model_type": "gpt2"}')
    export_checkpoint(root, tmp_path / "model", config=config)
    assert (tmp_path / "model" / "config.json").read_text() == '{"model_type": "gpt2"}'


def test_a_name_that_is_a_word_of_the_format_is_refused(tmp_path):
    folder = begin(tmp_path / "kept", step=1)
    shard = write_shard(folder, 0, [Entry("__metadata__", "value", (2,), (((0, 2),),), torch.ones(2))])
    publish(folder, Manifest(run="r", step=1, plan_hash="p", shards=(shard,)))
    with pytest.raises(InputError, match="__metadata__"):
        export_checkpoint(tmp_path / "kept", tmp_path / "model")
