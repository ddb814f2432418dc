"""Token datasets, memory-mapped, and which sample is whose: a pure function of seed and position.

A run's position in its data is its step number and nothing else. Within an epoch no sample comes twice: the order is a
permutation by key, a Feistel network over a power of four that is walked until it falls inside (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002), so no list of samples is ever made. Layouts only deal a step's samples
out: whatever their replicas and microbatches, they consume the same ones.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavetrain.base.codec import decode, dumps, encode
from wavetrain.base.document import Node, read_document
from wavetrain.base.errors import InputError, Problem
from wavetrain.model.architecture import Head
from wavetrain.plan.plan import Plan
from wavetrain.runtime.chunk import Batch
from wavetrain.runtime.stages import IGNORED

SCHEMA = "wavetrain.tokens/1"
BYTES = 256  # vocabulary of a file that is read as bytes
MOST_TOKENS = 1 << 48
MASKED = 0.15  # of the tokens, where a model guesses hidden ones (Devlin et al. 2018)
ROUNDS = 8  # of the Feistel network; NIST's FF3 has as many

_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64, as in initial.py
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))

Words: TypeAlias = NDArray[np.uint64]
Tokens: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What the JSON beside a `.bin` file says: it holds `count` little-endian integers below `vocab`."""

    dtype: Literal["uint16", "uint32"]
    vocab: int
    count: int
    mask: int | None = None  # the token that stands for a hidden one; 0 if not given

    @property
    def type(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Tokens of a file, read where they are used."""

    path: Path
    tokens: NDArray[Any] = field(repr=False)
    vocab: int
    mask: int = 0  # no text has a byte of 0


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a run's samples depend on beside the data; nothing here is about the layout."""

    seed: int
    seq_len: int
    global_batch: int
    head: Head = "causal"


class Sample(NamedTuple):
    """One sequence or several: what the model sees and what it is to say (-100: nothing)."""

    tokens: Tensor
    targets: Tensor


def sampling_of(plan: Plan, *, seed: int) -> Sampling:
    """How a plan's run draws its samples."""
    head: Head = plan.model.architecture.head if plan.model.architecture else "causal"
    return Sampling(seed=seed, seq_len=plan.seq_len, global_batch=plan.layout.global_batch, head=head)


# --- files ---


def open_dataset(path: Path, *, vocab: int, seq_len: int) -> Dataset:
    """Map a file for a model of this vocabulary: a `.bin` by the header beside it, any other as bytes."""
    node = read_document(header_path(path)) if path.suffix.lower() == ".bin" else None
    header = _checked_header(node) if node else None
    with _opened(path) as stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        if not num_bytes:
            raise InputError(Problem(where=str(path), rule="is empty: there is nothing to learn from"))
        if node is None or header is None:
            found = Dataset(path, _mapped(stream, path, np.dtype(np.uint8), num_bytes), BYTES)
        else:
            _refuse_size(node, header, path, num_bytes)
            found = Dataset(path, _mapped(stream, path, header.type, header.count), header.vocab, header.mask or 0)
    _refuse_use(found, vocab=vocab, seq_len=seq_len)
    return found


def write_dataset(path: Path, tokens: NDArray[Any], *, vocab: int, mask: int | None = None) -> None:
    """A `.bin` file of tokens and its header, in the smallest type that the vocabulary fits."""
    header = Header(dtype="uint16" if vocab <= 1 << 16 else "uint32", vocab=vocab, count=len(tokens), mask=mask)
    if path.suffix.lower() != ".bin":
        raise ValueError(f"{path}: a file of tokens ends in .bin")
    if tokens.ndim != 1 or not len(tokens) or tokens.min() < 0 or tokens.max() >= vocab:
        raise ValueError(f"{path}: tokens must be a list of at least one, all from 0 to {vocab - 1:,}")
    path.write_bytes(tokens.astype(header.type).tobytes())
    header_path(path).write_text(dumps(encode(header, schema=SCHEMA)))


def header_path(path: Path) -> Path:
    """Where the header of a `.bin` file is."""
    return path.with_suffix(".json")


def _opened(path: Path) -> BinaryIO:
    """A regular file, open; nothing is waited for, and what was looked at is what is read."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise InputError(Problem(where=str(path), rule="must be a regular file"))
    return os.fdopen(number, "rb")


def _mapped(stream: BinaryIO, path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    try:
        return np.asarray(np.memmap(stream, dtype=dtype, mode="r", shape=(count,)))
    except (OSError, ValueError) as error:  # a limit on addresses, a file system that maps nothing, a file just cut
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or str(error)
    return InputError(Problem(where=str(path), rule=f"can't be read: {reason}"))


def _checked_header(node: Node) -> Header:
    header = decode(Header, node, schema=SCHEMA)
    most = 1 << 8 * header.type.itemsize
    rules = (
        ("vocab", header.vocab, 1, most, f"tokens of {header.dtype} allow 1 to {most:,}"),
        ("count", header.count, 1, MOST_TOKENS, f"must be from 1 to {MOST_TOKENS:,} tokens"),
        ("mask", header.mask or 0, 0, header.vocab - 1, f"must be a token: from 0 to {header.vocab - 1:,}"),
    )
    problems = [_broken(node, key, rule) for key, value, least, most, rule in rules if not least <= value <= most]
    if problems:
        raise InputError(problems)
    return header


def _refuse_size(node: Node, header: Header, path: Path, num_bytes: int) -> None:
    expected = header.count * header.type.itemsize
    if expected != num_bytes:
        rule = f"so many tokens of {header.dtype} take {expected:,} bytes, but {path} has {num_bytes:,}"
        raise InputError(_broken(node, "count", rule))


def _broken(node: Node, key: str, rule: str) -> Problem:
    items = node.value if isinstance(node.value, dict) else {}
    item = items.get(key, node)
    shown = None if isinstance(item.value, dict | tuple) else item.value
    return Problem(where=item.where, key=key, value=shown, rule=rule)


def _refuse_use(dataset: Dataset, *, vocab: int, seq_len: int) -> None:
    problems, where, count = [], str(dataset.path), len(dataset.tokens)
    if vocab < dataset.vocab:
        rule = f"the data has a vocabulary of {dataset.vocab:,}, the model one of {vocab:,}: it must be no smaller"
        problems.append(Problem(where=where, key="vocab", value=dataset.vocab, rule=rule))
    if count < seq_len + 1:
        rule = f"a sequence of {seq_len:,} and its next token need {seq_len + 1:,} tokens, the file has {count:,}"
        problems.append(Problem(where=where, key="count", value=count, rule=rule))
    if problems:
        raise InputError(problems)


# --- samples ---


def num_windows(dataset: Dataset, *, seq_len: int) -> int:
    """Samples of an epoch: every token but the first is a target once, without the rest that fills no sequence."""
    return (len(dataset.tokens) - 1) // seq_len


def sample(dataset: Dataset, sampling: Sampling, *, step: int, index: int) -> Sample:
    """The sample of this index of a step's global batch."""
    several = _samples(dataset, sampling, _positions(sampling, step, index, 1))
    return Sample(several.tokens[0], several.targets[0])


def counting(
    sampling: Sampling, *, vocab: int, step: int, microbatch: int, replica: int = 0, replicas: int = 1
) -> Batch:
    """The same without a file: sequences that can be learnt. Each counts on by a stride of its own from anywhere."""
    generator = torch.Generator().manual_seed((sampling.seed << 32) + step)
    size, length = (sampling.global_batch, 1), sampling.seq_len
    first, stride = torch.randint(vocab, size, generator=generator), torch.randint(1, 4, size, generator=generator)
    sequences = (first + stride * torch.arange(length + 1)) % vocab
    if sampling.head == "causal":
        tokens, targets = sequences[:, :-1], sequences[:, 1:]
    else:
        hidden = torch.rand(size[0], length, generator=generator) < MASKED
        hidden[:, 0] = True  # a sample without a target would teach nothing
        tokens, targets = sequences[:, :-1].masked_fill(hidden, 0), sequences[:, :-1].masked_fill(~hidden, IGNORED)
    mine = slice(*(size[0] // replicas * number for number in (replica, replica + 1)))
    pieces = [
        dict(enumerate(t.contiguous() for t in torch.split(whole[mine], microbatch))) for whole in (tokens, targets)
    ]
    return Batch(pieces[0], pieces[1], int((targets != IGNORED).sum()))


def microbatches(
    dataset: Dataset, sampling: Sampling, *, step: int, microbatch: int, replica: int = 0, replicas: int = 1
) -> Batch:
    """What one replica runs in a step: its share of the global batch, one piece after another."""
    each, rest = divmod(sampling.global_batch, replicas * microbatch)
    if rest or not 0 <= replica < replicas:
        given = f"{replicas} replicas (this one is {replica}) of microbatches of {microbatch}"
        raise ValueError(f"a batch of {sampling.global_batch} can't be dealt out to {given}")
    first = replica * each * microbatch
    drawn = {
        m: _samples(dataset, sampling, _positions(sampling, step, first + m * microbatch, microbatch))
        for m in range(each)
    }
    tokens, targets = {m: s.tokens for m, s in drawn.items()}, {m: s.targets for m, s in drawn.items()}
    return Batch(tokens, targets, sampling.global_batch * targets_per_sample(sampling))


def targets_per_sample(sampling: Sampling) -> int:
    """How many tokens of a sample are to be guessed: always as many, so every rank knows a step's total."""
    return sampling.seq_len if sampling.head == "causal" else max(1, round(MASKED * sampling.seq_len))


def windows_at(positions: range, *, count: int, seed: int) -> list[int]:
    """The window of each position of a run; after `count` positions a new epoch begins, in another order."""
    found: list[int] = []
    at = positions.start
    while at < positions.stop:
        epoch, place = divmod(at, count)
        stop = min(positions.stop, (epoch + 1) * count)
        places = np.arange(place, place + stop - at, dtype=np.uint64)
        found += permuted(places, count=count, key=_key(seed, "epoch", epoch)).tolist()
        at = stop
    return found


def _positions(sampling: Sampling, step: int, index: int, count: int) -> range:
    if step < 0 or not 0 <= index <= sampling.global_batch - count:
        raise ValueError(f"step {step} has no sample {index}: they count from 0 to {sampling.global_batch - 1}")
    first = step * sampling.global_batch + index
    return range(first, first + count)


def _samples(dataset: Dataset, sampling: Sampling, positions: range) -> Sample:
    count = num_windows(dataset, seq_len=sampling.seq_len)
    windows = windows_at(positions, count=count, seed=sampling.seed)
    read = np.stack([_window(dataset, window, sampling.seq_len) for window in windows])
    if sampling.head == "causal":
        return Sample(torch.from_numpy(read[:, :-1].copy()), torch.from_numpy(read[:, 1:].copy()))
    tokens, targets = read[:, :-1].copy(), np.full_like(read[:, :-1], IGNORED)
    for row, position in enumerate(positions):
        _hide(tokens[row], targets[row], dataset, sampling, position)
    return Sample(torch.from_numpy(tokens), torch.from_numpy(targets))


def _window(dataset: Dataset, window: int, seq_len: int) -> Tokens:
    """A sequence and the token after it; a token that the header does not allow is found here, not by a device."""
    first = window * seq_len
    read = dataset.tokens[first : first + seq_len + 1].astype(np.int64)
    if read.max() >= dataset.vocab:
        at = int((read >= dataset.vocab).argmax())
        rule = f"must be less than vocab ({dataset.vocab:,}), as the header says of all tokens"
        raise InputError(Problem(where=str(dataset.path), key=f"token {first + at}", value=int(read[at]), rule=rule))
    return read


def _hide(tokens: Tokens, targets: Tokens, dataset: Dataset, sampling: Sampling, position: int) -> None:
    """Hide some tokens of a sequence and make them its targets: 8 of 10 masked, 1 any other, 1 as it was."""
    numbers = np.arange(targets_per_sample(sampling), dtype=np.uint64)
    places = permuted(numbers, count=len(tokens), key=_key(sampling.seed, "hide", position))
    targets[places] = tokens[places]
    bits = _bits(numbers, _key(sampling.seed, "fill", position))
    tenth, drawn = bits % np.uint64(10), (bits // np.uint64(10)) % np.uint64(dataset.vocab)
    hidden = np.where(tenth < 8, np.uint64(dataset.mask), drawn).astype(np.int64)
    tokens[places] = np.where(tenth < 9, hidden, tokens[places])


# --- permutations ---


def permuted(places: Words, *, count: int, key: int) -> Words:
    """Where places of `range(count)` go under a key's permutation of them."""
    assert not len(places) or int(places.max()) < count, "a place outside would land on another's"
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    found = _feistel(places, half, key)
    while (outside := found >= np.uint64(count)).any():
        found[outside] = _feistel(found[outside], half, key)
    return found


def _feistel(words: Words, half: int, key: int) -> Words:
    """A permutation of all words of twice `half` bits, `half` being 32 at most."""
    shift, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = words >> shift, words & low
    for number in range(ROUNDS):
        mixed = _bits(right | np.uint64(number << 32), key) >> np.uint64(64 - half)
        left, right = right, left ^ mixed
    return left << shift | right


def _bits(counters: Words, key: int) -> Words:
    """64 well-mixed bits per counter (splitmix64); products and sums of arrays wrap."""
    z = counters * np.uint64(_GOLDEN) + np.full(1, key, dtype=np.uint64)
    for shift, factor in _MIXERS:
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z


def _key(seed: int, purpose: str, number: int) -> int:
    text = f"{seed}\0{purpose}\0{number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"wavetrain").digest(), "little")
