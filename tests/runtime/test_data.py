"""Datasets are mapped or refused with a reason; samples depend on seed and position only, each once per epoch."""

import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.plans import small_plan

from wavetrain.base.errors import InputError
from wavetrain.runtime import data as module
from wavetrain.runtime import initial
from wavetrain.runtime.data import (
    SCHEMA,
    Dataset,
    Sampling,
    microbatches,
    num_windows,
    open_dataset,
    permuted,
    sample,
    sampling_of,
    targets_per_sample,
    windows_at,
    write_dataset,
)
from wavetrain.runtime.stages import IGNORED

RECORDED = [0, 9, 10, 8, 2, 4, 6, 3, 7, 5, 1]  # of windows_at: a run must be repeatable with later versions


def counting(count, *, vocab=1 << 30, mask=0):
    """Tokens that say where they are."""
    return Dataset("counting", np.arange(count, dtype=np.uint32), vocab, mask)


# --- permutations ---


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_permutation_is_a_bijection(count, key):
    there = permuted(np.arange(count, dtype=np.uint64), count=count, key=key)
    assert sorted(there.tolist()) == list(range(count))


@given(st.integers(1, 1 << 60), st.integers(0, 2**64 - 1), st.data())
def test_of_any_size_and_a_place_alone_goes_where_it_goes_among_others(count, key, data):
    places = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20, unique=True))
    there = permuted(np.array(places, dtype=np.uint64), count=count, key=key).tolist()
    assert len(set(there)) == len(places)
    assert all(0 <= place < count for place in there)
    alone = [permuted(np.array([place], dtype=np.uint64), count=count, key=key).tolist()[0] for place in places]
    assert alone == there


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 16, 17])
def test_every_place_goes_everywhere_equally_often(count):
    keys = 1000
    first = np.arange(count, dtype=np.uint64)
    seen = np.zeros((count, count))
    for epoch in range(keys):
        seen[np.arange(count), permuted(first, count=count, key=module._key(0, "epoch", epoch)).astype(int)] += 1
    expected = keys / count
    chi2 = ((seen - expected) ** 2 / expected).sum() / (count - 1) ** 2  # 1 on average
    assert chi2 < 1 + 6 * np.sqrt(2 / (count - 1) ** 2)


def test_neighbours_are_torn_apart():
    there = permuted(np.arange(100_000, dtype=np.uint64), count=100_000, key=3).astype(float)
    correlation = np.corrcoef(there[:-1], there[1:])[0, 1]
    assert abs(correlation) < 0.015
    assert np.mean(np.abs(np.diff(there)) == 1) < 1e-3


@given(st.lists(st.integers(0, 2**62), min_size=1), st.integers(0, 2**64 - 1))
def test_bits_are_those_of_the_initial_values(counters, key):
    ours = module._bits(np.array(counters, dtype=np.uint64), key).view(np.int64)
    assert ours.tolist() == initial._bits(torch.tensor(counters), key).tolist()


def test_the_order_is_the_recorded_one():
    assert windows_at(range(11), count=11, seed=7) == RECORDED


# --- samples ---


@st.composite
def runs(draw):
    """A dataset's size, and ways to cut the same batches."""
    microbatch, replicas, each = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return draw(st.integers(1, 60)), microbatch, replicas, each


@given(runs(), st.integers(0, 2**31 - 1), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_consumed_once_per_epoch_whatever_the_layout(run, seed, seq_len):
    windows, microbatch, replicas, each = run
    dataset = counting(windows * seq_len + 1)
    sampling = Sampling(seed=seed, seq_len=seq_len, global_batch=microbatch * replicas * each)
    steps = -(-2 * windows // sampling.global_batch)
    drawn = [
        first // seq_len
        for step in range(steps)
        for replica in range(replicas)
        for tokens in microbatches(
            dataset, sampling, step=step, microbatch=microbatch, replica=replica, replicas=replicas
        ).tokens.values()
        for first in tokens[:, 0].tolist()
    ]
    assert sorted(drawn[:windows]) == sorted(drawn[windows : 2 * windows]) == list(range(windows))
    assert drawn == windows_at(range(len(drawn)), count=windows, seed=seed)


@given(runs(), st.integers(0, 100), st.sampled_from(["causal", "masked"]))
@settings(max_examples=60, deadline=None)
def test_layouts_of_one_batch_see_the_same_samples(run, step, head):
    windows, microbatch, replicas, each = run
    sampling = Sampling(seed=1, seq_len=7, global_batch=microbatch * replicas * each, head=head)
    dataset = counting(windows * 7 + 3)
    batches = [
        microbatches(dataset, sampling, step=step, microbatch=microbatch, replica=replica, replicas=replicas)
        for replica in range(replicas)
    ]
    whole = microbatches(dataset, sampling, step=step, microbatch=sampling.global_batch)
    for kind in ("tokens", "targets"):
        pieces = [piece for batch in batches for _, piece in sorted(getattr(batch, kind).items())]
        assert torch.equal(torch.cat(pieces), getattr(whole, kind)[0])
    targets = sum(int((target != IGNORED).sum()) for batch in batches for target in batch.targets.values())
    assert {batch.num_targets for batch in [*batches, whole]} == {targets}
    for index in range(sampling.global_batch):
        alone = sample(dataset, sampling, step=step, index=index)
        assert torch.equal(alone.tokens, whole.tokens[0][index])
        assert torch.equal(alone.targets, whole.targets[0][index])


@given(st.integers(1, 40), st.integers(2, 500))
def test_windows_cover_all_targets_but_a_rest(seq_len, count):
    dataset = counting(max(count, seq_len + 1))
    windows = num_windows(dataset, seq_len=seq_len)
    sampling = Sampling(seed=0, seq_len=seq_len, global_batch=windows)
    batch = microbatches(dataset, sampling, step=0, microbatch=windows)
    assert sorted(batch.targets[0].flatten().tolist()) == list(range(1, windows * seq_len + 1))
    assert torch.equal(batch.tokens[0] + 1, batch.targets[0])
    assert len(dataset.tokens) - 1 - windows * seq_len < seq_len


@pytest.mark.parametrize(("family", "head"), [("gpt", "causal"), ("bert", "masked")])
def test_a_plan_says_how_its_run_samples(family, head):
    plan = small_plan(family=family, microbatches=4)
    found = sampling_of(plan, seed=9)
    assert found == Sampling(seed=9, seq_len=plan.seq_len, global_batch=plan.layout.global_batch, head=head)


def test_seeds_and_epochs_differ():
    orders = [windows_at(range(e * 50, e * 50 + 50), count=50, seed=seed) for seed in range(3) for e in range(3)]
    assert len(set(map(tuple, orders))) == 9


def test_masks_are_those_of_bert():
    sampling = Sampling(seed=5, seq_len=100, global_batch=400, head="masked")
    dataset = counting(50 * 100 + 1, vocab=10_000, mask=9999)
    drawn = microbatches(dataset, sampling, step=0, microbatch=400)
    tokens, targets = drawn.tokens[0], drawn.targets[0]
    hidden = targets != IGNORED
    assert targets_per_sample(sampling) == 15
    assert hidden.sum(dim=1).eq(15).all()
    assert drawn.num_targets == 400 * 15
    origin = tokens.clone()
    origin[hidden] = targets[hidden]
    assert origin.diff(dim=1).eq(1).all()  # what is not hidden is as it was, and targets say what was
    masked = tokens[hidden].eq(9999).double().mean()
    kept = tokens[hidden].eq(targets[hidden]).double().mean()
    assert abs(masked - 0.8) < 0.02
    assert abs(kept - 0.1) < 0.015
    again = microbatches(dataset, sampling, step=50, microbatch=400)  # the same windows, other masks
    assert not torch.equal(again.targets[0] != IGNORED, hidden)


def test_a_sequence_of_one_token_has_a_target():
    sampling = Sampling(seed=5, seq_len=1, global_batch=1, head="masked")
    assert microbatches(counting(5), sampling, step=0, microbatch=1).num_targets == 1


@pytest.mark.parametrize("changed", [{"microbatch": 3}, {"replicas": 3}, {"replica": 2}, {"replica": -1}, {"step": -1}])
def test_what_does_not_divide_is_refused(changed):
    sampling = Sampling(seed=0, seq_len=2, global_batch=8)
    with pytest.raises(ValueError, match=r"batch of 8|no sample"):
        microbatches(counting(100), sampling, **({"step": 0, "microbatch": 2, "replicas": 2} | changed))
    with pytest.raises(ValueError, match="no sample 8"):
        sample(counting(100), sampling, step=0, index=8)


# --- files ---


def test_any_text_is_bytes(tmp_path):
    path = tmp_path / "tale.txt"
    path.write_text("Es war einmal ein König.")
    dataset = open_dataset(path, vocab=256, seq_len=24)
    drawn = sample(dataset, Sampling(seed=0, seq_len=24, global_batch=1), step=0, index=0)
    assert bytes(drawn.tokens.tolist()).decode() == "Es war einmal ein König"
    assert bytes(drawn.targets.tolist()).decode() == "s war einmal ein König."
    assert drawn.tokens.dtype == torch.int64
    assert not dataset.tokens.flags.writeable


@pytest.mark.parametrize("vocab", [300, 1 << 16, (1 << 16) + 1])
def test_tokens_are_read_as_written(tmp_path, vocab):
    path = tmp_path / "tokens.bin"
    tokens = np.arange(1000) * 7919 % vocab
    write_dataset(path, tokens, vocab=vocab, mask=103)
    dataset = open_dataset(path, vocab=vocab, seq_len=10)
    assert dataset.tokens.tolist() == tokens.tolist()
    assert (dataset.vocab, dataset.mask) == (vocab, 103)
    assert path.stat().st_size == 1000 * (2 if vocab <= 1 << 16 else 4)


@pytest.mark.parametrize("tokens", [[], [-1], [300], [[1]]])
def test_wrong_tokens_are_not_written(tmp_path, tokens):
    with pytest.raises(ValueError, match="from 0 to 299"):
        write_dataset(tmp_path / "a.bin", np.array(tokens, dtype=int), vocab=300)
    with pytest.raises(ValueError, match=r"ends in \.bin"):
        write_dataset(tmp_path / "a.txt", np.array([1]), vocab=300)
    assert not list(tmp_path.iterdir())


GOOD = {"schema": SCHEMA, "dtype": "uint16", "vocab": 300, "count": 100}


@pytest.mark.parametrize(
    ("changed", "key", "rule"),
    [
        ({"count": 99}, "count: 99", "198 bytes, but"),
        ({"count": 101}, "count: 101", "has 200"),
        ({"count": 10**30}, "count: 1000", "from 1 to"),
        ({"count": -1}, "count: -1", "from 1 to"),
        ({"count": 0}, "count: 0", "from 1 to"),
        ({"count": 100.0}, "count", "must be int"),
        ({"count": True}, "count", "must be int"),
        ({"count": None}, "count", "must be int"),
        ({"vocab": 0}, "vocab: 0", "uint16 allow 1 to 65,536"),
        ({"vocab": 65537}, "vocab: 65537", "uint16 allow 1 to 65,536"),
        ({"vocab": -5}, "vocab: -5", "uint16 allow"),
        ({"dtype": "uint32"}, "count: 100", "400 bytes, but"),
        ({"dtype": "object"}, "dtype: object", "possible: uint16, uint32"),
        ({"dtype": ["uint16"]}, "dtype", "possible: uint16, uint32"),
        ({"mask": 300}, "mask: 300", "from 0 to 299"),
        ({"mask": -1}, "mask: -1", "from 0 to 299"),
        ({"schema": "other/1"}, "schema: other/1", "unknown schema"),
        ({"offset": 5}, "offset", "unknown key"),
    ],
)
def test_crafted_headers_are_refused(tmp_path, changed, key, rule):
    path, header = tmp_path / "a.bin", tmp_path / "a.json"
    path.write_bytes(bytes(200))
    header.write_text(json.dumps(GOOD | changed))
    with pytest.raises(InputError) as raised:
        open_dataset(path, vocab=300, seq_len=4)
    assert f"{header}:1" in str(raised.value)
    assert key in str(raised.value)
    assert rule in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x80", '{"count": 1, "count": 2}', "null", "[" * 1000])
def test_a_header_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "a.bin").write_bytes(bytes(200))
    (tmp_path / "a.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"a\.json"):
        open_dataset(tmp_path / "a.bin", vocab=300, seq_len=4)


def test_a_missing_header_is_named(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(200))
    with pytest.raises(InputError, match=r"a\.json\n.*can't be read: No such file"):
        open_dataset(tmp_path / "a.bin", vocab=300, seq_len=4)


def test_a_token_beyond_the_vocabulary_is_found_when_it_is_read(tmp_path):
    path = tmp_path / "a.bin"
    write_dataset(path, np.arange(101) % 50, vocab=50)
    np.memmap(path, dtype="<u2", mode="r+")[77] = 50
    dataset = open_dataset(path, vocab=50, seq_len=10)
    sampling = Sampling(seed=0, seq_len=10, global_batch=10)
    with pytest.raises(InputError, match=r"token 77: 50\n.*less than vocab \(50\)"):
        microbatches(dataset, sampling, step=0, microbatch=10)


def test_a_vocabulary_too_large_and_a_file_too_short_are_told_together(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcd")
    with pytest.raises(InputError) as raised:
        open_dataset(path, vocab=255, seq_len=4)
    assert "the data has a vocabulary of 256, the model one of 255" in str(raised.value)
    assert "a sequence of 4 and its next token need 5 tokens, the file has 4" in str(raised.value)
    open_dataset(path, vocab=256, seq_len=3)


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "pool")
    (tmp_path / "pool").symlink_to(tmp_path / "loop")
    (tmp_path / "loop.bin").symlink_to(tmp_path / "loop.bin")
    (tmp_path / "loop.json").write_text(json.dumps(GOOD))
    (tmp_path / "b.bin").write_bytes(b"0")
    (tmp_path / "b.json").symlink_to(tmp_path / "b.json")
    (tmp_path / "empty").touch()
    (tmp_path / "secret").write_text("words")
    os.mkfifo(tmp_path / "pipe")
    refusals = {
        "loop": "Too many levels of symbolic links",
        "loop.bin": "Too many levels of symbolic links",
        "b.bin": "Too many levels of symbolic links",
        "empty": "is empty",
        "pipe": "must be a regular file",
        ".": "must be a regular file",
        "absent": "No such file",
        "nul\0": "null",
        "x" * 300: "File name too long",
    }
    for name, rule in refusals.items():
        with pytest.raises(InputError, match=rule):
            open_dataset(tmp_path / name, vocab=256, seq_len=2)
    with pytest.raises(InputError, match="must be a regular file"):
        open_dataset(module.Path("/dev/zero"), vocab=256, seq_len=2)


def test_a_link_to_a_file_is_followed(tmp_path):
    (tmp_path / "text").write_text("some words")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    assert len(open_dataset(tmp_path / "link", vocab=256, seq_len=2).tokens) == 10


def test_a_file_that_can_not_be_mapped_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    (tmp_path / "text").write_text("some words")
    monkeypatch.setattr(module.np, "memmap", refuse)
    with pytest.raises(InputError, match=r"text\n.*can't be read: Cannot allocate memory"):
        open_dataset(tmp_path / "text", vocab=256, seq_len=2)


def test_nothing_is_read_that_is_not_used(tmp_path):
    path = tmp_path / "sparse.bin"
    count = 1 << 34  # 32 GiB that take no disk, and must take no memory
    with path.open("wb") as stream:
        stream.truncate(2 * count)
    (tmp_path / "sparse.json").write_text(json.dumps(GOOD | {"count": count}))
    dataset = open_dataset(path, vocab=300, seq_len=1024)
    batch = microbatches(dataset, Sampling(seed=3, seq_len=1024, global_batch=8), step=10**6, microbatch=2)
    assert [tuple(tokens.shape) for tokens in batch.tokens.values()] == [(2, 1024)] * 4
    assert not any(tokens.any() for tokens in batch.tokens.values())
