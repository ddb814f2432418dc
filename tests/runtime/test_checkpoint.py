"""Checkpoints come back bit for bit in any cut; the last good ones are kept; many may read."""

import hashlib
import itertools
import json
import os
import random
import shutil
import tempfile
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.runtime.checkpoints import (
    SHARDS,
    assert_is,
    entries_of,
    local,
    manifest_of,
    names_in,
    noise,
    same,
    save,
    tensors_at,
    two_good_ones,
    whole_place,
)

from wavetrain.base.errors import InputError
from wavetrain.runtime import tensorfile
from wavetrain.runtime.checkpoint import (
    begin,
    clean,
    discard,
    glance,
    keep_last,
    newest,
    opened,
    publish,
    published,
    step_name,
    verify,
)
from wavetrain.runtime.manifest import (
    MANIFEST,
    checked_place,
    pack,
    unpack,
)
from wavetrain.runtime.tensorfile import DTYPES, Entry, write_shard


@pytest.fixture
def root(tmp_path):
    return two_good_ones(tmp_path)


# --- what is written comes back ---


@st.composite
def cuts(draw, shape):
    """Disjoint places that make up a whole: one after another is cut along a dimension, its indices dealt out."""
    places = [checked_place(whole_place(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        number, dim = draw(st.integers(0, len(places) - 1)), draw(st.integers(0, len(shape) - 1))
        indices = [index for start, stop in places[number][dim] for index in range(start, stop)]
        if len(indices) < 2:
            continue
        edges = draw(st.lists(st.integers(1, len(indices) - 1), min_size=1, max_size=4, unique=True))
        runs = [indices[a:b] for a, b in itertools.pairwise([0, *sorted(edges), len(indices)])]
        runs = draw(st.permutations([ranges for run in runs for ranges in split_runs(run)]))
        middle = draw(st.integers(1, len(runs) - 1))
        old = places.pop(number)
        places += [(*old[:dim], tuple(half), *old[dim + 1 :]) for half in (runs[:middle], runs[middle:])]
    return places


def split_runs(indices):
    """Ranges of indices that follow each other."""
    found = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(max_examples=100)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]))
def test_any_cut_is_read_in_any_other_cut_bit_for_bit(data, dtype):
    wholes = {f"w{number}": noise(data.draw(shapes), dtype, number) for number in range(data.draw(st.integers(1, 2)))}
    ranks = [[] for _ in range(data.draw(st.integers(1, 4)))]
    for name, whole in wholes.items():
        for place in data.draw(cuts(tuple(whole.shape))):
            rank = data.draw(st.integers(0, len(ranks) - 1))
            ranks[rank].append(Entry(name, "value", tuple(whole.shape), place, local(whole, place)))
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorfile, "PAGE", data.draw(st.sampled_from([8, 24, 4096])))  # so small tensors are large
        patch.setattr(tensorfile, "CHUNK", data.draw(st.sampled_from([24, 100, 1 << 22])))
        folder = begin(Path(directory), step=1)
        shards = [unpack(pack(write_shard(folder, rank, entries))) for rank, entries in enumerate(ranks)]
        publish(folder, manifest_of(1, shards))
        found = newest(Path(directory), run="run-a")
        assert found.names("value") == sorted(wholes)
        for name, whole in wholes.items():
            assert found.shape(name) == tuple(whole.shape)
            assert found.dtype(name) == dtype
            for place in data.draw(cuts(tuple(whole.shape))):
                assert same(found.read(name, "value", place), local(whole, place))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_format_comes_back_and_the_safetensors_package_reads_it(tmp_path, dtype):
    whole = noise((5, 3), dtype)
    folder = begin(tmp_path, step=0)
    entry = Entry("w", "value", (5, 3), whole_place((5, 3)), whole.t().contiguous().t())  # not contiguous itself
    shard = write_shard(folder, 0, [entry, Entry("n", "count", (), (), torch.tensor(7))])
    path = publish(folder, manifest_of(0, [shard]))
    assert same(opened(path).read("w", "value", whole_place((5, 3))), whole)
    with safe_open(path / SHARDS[0], framework="pt") as theirs:
        assert same(theirs.get_tensor("value/w"), whole)
        assert theirs.get_tensor("count/n") == 7


def test_a_tensor_that_is_every_second_number_of_another(tmp_path):
    numbers = torch.arange(10.0)[::2]
    folder = begin(tmp_path, step=0)
    shard = write_shard(folder, 0, [Entry("w", "value", (5,), (((0, 5),),), numbers)])
    assert torch.equal(opened(publish(folder, manifest_of(0, [shard]))).read("w", "value", (((0, 5),),)), numbers)


def test_what_was_written_is_known(root):
    found = newest(root, run="run-a")
    assert_is(found, 20)
    assert (found.run, found.step, found.path) == ("run-a", 20, root / "step-00000020")
    assert found.kinds == ["exp_avg_sq", "value"]
    assert found.names() == ["layers.0.bias", "layers.0.weight", "scale"]
    assert found.manifest.position == {"samples": 160}
    assert found.manifest.counters == {"seed": 2**100}
    document = json.loads((found.path / MANIFEST).read_text())
    assert document["schema"] == "wavetrain.checkpoint/1"
    assert document["tensors"]["exp_avg_sq"] == {"layers.0.weight": {"dtype": "BF16", "shape": [6, 8]}}
    assert document["shards"][1]["places"]["value"]["layers.0.weight"] == ["2:3 5:6, 0:8"]
    for shard in document["shards"]:
        data = (found.path / shard["file"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (shard["size"], shard["sha256"])
    assert names_in(found.path) == [MANIFEST, *SHARDS]
    read = found.read("layers.0.weight", "value", (((1, 3),), ((2, 4),)), dtype=torch.float64)
    assert torch.equal(read, tensors_at(20)["layers.0.weight"][1:3, 2:4].double())


def test_a_name_a_kind_or_a_place_that_is_not_there_is_refused(root):
    found = newest(root)
    with pytest.raises(InputError, match=r"nearest: layers\.0\.weight"):
        found.read("layer.0.weight", "value", ())
    with pytest.raises(InputError, match="possible: exp_avg_sq, value"):
        found.read("scale", "exp_avg", ())
    for place in ((((0, 7),), ((0, 8),)), (((0, 6),),), (((0, 2), (1, 3)), ((0, 8),)), (((-1, 2),), ((0, 8),))):
        with pytest.raises(InputError, match=r"layers.0.weight"):
            found.read("layers.0.weight", "value", place)
    assert found.read("layers.0.weight", "value", (((3, 3),), ((0, 8),))).shape == (0, 8)


def test_only_what_is_needed_is_read_and_held(tmp_path, monkeypatch):
    rows, columns = 2048, 2048  # 16 MiB, four times what is held at once
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    folder = begin(tmp_path, step=1)
    parts = [(((0, rows // 2),), ((0, columns),)), (((rows // 2, rows),), ((0, columns),))]
    shards = [
        write_shard(folder, n, [Entry("w", "value", whole.shape, p, local(whole, p))]) for n, p in enumerate(parts)
    ]
    found = opened(publish(folder, manifest_of(1, shards)))
    counted, names, preadv, open_file = [], [], os.preadv, tensorfile.os.open

    def counting(stream, buffers, offset):
        counted.append(preadv(stream, buffers, offset))
        return counted[-1]

    def watching(path, *given, **more):
        names.append(str(path))
        return open_file(path, *given, **more)

    monkeypatch.setattr(os, "preadv", counting)
    monkeypatch.setattr(os, "open", watching)
    header = 8 + 200
    for place, touched in (
        ((((1536, 1792),), ((0, columns),)), [SHARDS[1]]),  # rows of one shard
        ((((0, rows),), ((512, 1536),)), SHARDS[:2]),  # half of all columns
        ((((5, 6), (2000, 2001)), ((7, 8),)), SHARDS[:2]),  # two numbers
        ((((0, rows),), ((0, columns),)), SHARDS[:2]),
    ):
        counted.clear(), names.clear()
        tracemalloc.start()
        read = found.read("w", "value", place)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert torch.equal(read, local(whole, place))
        assert sum(counted) <= read.nbytes + len(touched) * header
        assert peak < tensorfile.CHUNK + (1 << 18)
        assert [name for name in names if name.endswith(".safetensors")] == touched


def test_narrow_columns_cost_no_more_than_their_pages(tmp_path, monkeypatch):
    whole = noise((256, 512), torch.float32)  # rows of 2 KiB
    folder = begin(tmp_path, step=1)
    shard = write_shard(folder, 0, [Entry("w", "value", whole.shape, whole_place(whole.shape), whole)])
    found = opened(publish(folder, manifest_of(1, [shard])))
    counted, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: counted.append(preadv(*given)) or counted[-1])
    place = (((0, 256),), ((100, 108),))
    assert same(found.read("w", "value", place), local(whole, place))
    assert sum(counted) <= whole.nbytes
    assert max(counted[2:]) <= tensorfile.PAGE


# --- cleaning up ---


def test_leftovers_are_no_checkpoints_and_only_they_are_cleaned(root):
    folder = begin(root, step=30)
    write_shard(folder, 0, entries_of(30)[0])
    (root / ".writing-link").symlink_to(root / step_name(10))
    (root / "bad-step-00000005-1").mkdir()
    (root / "notes.txt").touch()
    assert_is(newest(root), 20)
    assert sorted(clean(root)) == sorted([folder, root / ".writing-link"])
    names = ["bad-step-00000005-1", "notes.txt", step_name(10), step_name(20)]
    assert names_in(root) == names
    assert verify(root / step_name(10)) == []
    with pytest.raises(ValueError, match="none that was being written"):
        discard(root / step_name(10))
    assert clean(root / "nowhere") == []


def test_the_last_k_are_kept(root):
    save(root, 30), save(root, 40)
    assert keep_last(root, 4) == []
    assert keep_last(root, 2) == [root / step_name(20), root / step_name(10)]
    assert names_in(root) == [step_name(30), step_name(40)]
    assert keep_last(root, 1) == [root / step_name(30)]
    assert keep_last(root, 1) == []
    assert_is(newest(root), 40)
    with pytest.raises(ValueError, match="at least one"):
        keep_last(root, 0)


def test_the_only_good_one_is_never_removed(root, caplog):
    save(root, 30)
    for step in (20, 30):
        (root / step_name(step) / SHARDS[0]).write_bytes(b"bad")
    told = []
    assert keep_last(root, 1, on_bad=lambda path, _: told.append(path.name)) == []
    assert "nothing removed" in caplog.text
    assert keep_last(root, 1, on_bad=lambda path, _: told.append(path.name)) == []
    assert told == ["bad-step-00000030-1", "bad-step-00000020-1"]
    assert_is(newest(root), 10)


def test_a_glance_refuses_only_what_the_search_would_refuse_and_changes_nothing(root):
    glance(root / "nowhere", run="run-a")
    glance(root, run="run-a")
    with pytest.raises(InputError, match="is of another run than run-b"):
        glance(root, run="run-b")
    (root / step_name(20) / MANIFEST).write_bytes(b"{}")
    glance(root, run="run-a")  # the one before is still there
    (root / step_name(10) / MANIFEST).write_bytes(b"{}")
    with pytest.raises(InputError) as raised:
        glance(root, run="run-a")
    assert len(raised.value.problems) == 3
    assert names_in(root) == [step_name(10), step_name(20)]
    with pytest.raises(InputError):
        newest(root, run="run-a")


def test_what_this_process_has_published_is_not_read_again(root, monkeypatch):
    """Of two that are known, some headers; one that nobody knows is read to the last byte before it is removed."""
    known = {save(root, 30), save(root, 40)}
    counted, preadv = [], os.preadv

    def counting(stream, buffers, offset):
        counted.append(preadv(stream, buffers, offset))
        return counted[-1]

    monkeypatch.setattr(os, "preadv", counting)
    sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in published(root)}
    tensors = sum(sum(e.tensor.nbytes for e in entries) for entries in entries_of(10))
    strangers = published(root)[2:]
    assert keep_last(root, 2, known=known) == strangers
    assert sum(counted) >= sum(sizes[path] for path in strangers)
    counted.clear()
    known.add(save(root, 50))
    assert keep_last(root, 2, known=known) == [root / step_name(30)]
    assert sum(counted) <= 2 * (max(sizes.values()) - tensors)


@pytest.mark.parametrize("harm", ["cut", "gone", "manifest"])
def test_a_known_one_that_was_harmed_does_not_count(root, harm):
    """What can be seen without reading all of it is seen: the only good one stays."""
    known = {save(root, 30)}
    shard = root / step_name(30) / SHARDS[0]
    if harm == "cut":
        os.truncate(shard, shard.stat().st_size - 1)
    elif harm == "gone":
        shard.unlink()
    else:
        (root / step_name(30) / MANIFEST).write_bytes(b"{}")
    assert keep_last(root, 1, known=known) == []
    assert names_in(root) == ["bad-step-00000030-1", step_name(10), step_name(20)]
    assert_is(newest(root), 20)


def test_bad_ones_do_not_count_and_are_not_removed(root):
    for step in (30, 40, 50):
        save(root, step)
    for step in (50, 20):
        (root / step_name(step) / SHARDS[2]).unlink()
    assert keep_last(root, 2) == [root / step_name(10)]
    left = ["bad-step-00000020-1", "bad-step-00000050-1", step_name(30), step_name(40)]
    assert names_in(root) == left


def test_a_kill_while_removing_leaves_no_half_checkpoint(root, monkeypatch):
    def stopped(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", stopped)
    with pytest.raises(KeyboardInterrupt):
        keep_last(root, 1)
    monkeypatch.undo()
    assert published(root) == [root / step_name(20)]
    assert len(clean(root)) == 1
    assert names_in(root) == [step_name(20)]


# --- several at once ---


def test_many_read_at_once(root):
    found, whole = opened(root / step_name(20)), tensors_at(20)["layers.0.weight"]
    wrong = []

    def work(seed):
        draw = random.Random(seed)
        for _ in range(40):
            row, column = draw.randrange(6), draw.randrange(8)
            place = (((row, 6), (0, row)), ((column, 8),))
            if not same(found.read("layers.0.weight", "value", place), local(whole, checked_place(place, (6, 8)))):
                wrong.append(place)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_ranks_that_look_for_the_newest_at_once_agree(root):
    save(root, 30)
    (root / step_name(30) / SHARDS[0]).write_bytes(b"bad")
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(newest(root, run="run-a").step)
            finally:
                os._exit(1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [20] * 4
    assert names_in(root) == ["bad-step-00000030-1", step_name(10), step_name(20)]
