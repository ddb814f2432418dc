"""Small checkpoints for tests, and what is to be true of them."""

import os
import traceback

import torch

from wavetrain.runtime.checkpoint import (
    begin,
    newest,
    publish,
    step_name,
    verify,
)
from wavetrain.runtime.manifest import (
    Manifest,
)
from wavetrain.runtime.tensorfile import BITS, Entry, write_shard

SHARDS = ["rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors"]


def whole_place(shape):
    return tuple(((0, size),) for size in shape)


def local(whole, place):
    """What is at a place, by plain indexing."""
    for dim, ranges in enumerate(place):
        wanted = [index for start, stop in ranges for index in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(wanted, dtype=torch.int64))
    return whole


def bits(tensor):
    return tensor.view(BITS[tensor.element_size()])


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def noise(shape, dtype, seed=0):
    """Any bits at all, numbers or not."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (torch.Size(shape).numel() * size,), dtype=torch.uint8, generator=generator)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)


def manifest_of(step, shards, *, run="run-a"):
    facts = {"position": {"samples": step * 8}, "counters": {"seed": 2**100}, "versions": {"torch": torch.__version__}}
    return Manifest(run=run, step=step, plan_hash="ab" * 32, shards=tuple(shards), **facts)


def tensors_at(step):
    shapes = {"layers.0.weight": (6, 8), "layers.0.bias": (6,), "scale": ()}
    return {name: noise(shape, torch.float32, seed=step) for name, shape in shapes.items()}


def entries_of(step):
    """Three ranks: rows of the matrix, one of them two apart; the second moment in another format and cut."""
    at = tensors_at(step)
    rows = [((0, 2),), ((2, 3), (5, 6)), ((3, 5),)]
    ranks = [[], [], []]
    for rank, held in enumerate(rows):
        place = (held, ((0, 8),))
        weight = at["layers.0.weight"]
        ranks[rank].append(Entry("layers.0.weight", "value", (6, 8), place, local(weight, place)))
        ranks[rank].append(Entry("layers.0.bias", "value", (6,), (held,), local(at["layers.0.bias"], (held,))))
    ranks[1].append(Entry("scale", "value", (), (), at["scale"]))
    for rank, columns in ((0, (0, 3)), (2, (3, 8))):
        place = (((0, 6),), (columns,))
        second = local(at["layers.0.weight"].to(torch.bfloat16), place)
        ranks[rank].append(Entry("layers.0.weight", "exp_avg_sq", (6, 8), place, second))
    return ranks


def save(root, step, *, run="run-a"):
    folder = begin(root, step=step)
    shards = [write_shard(folder, rank, entries) for rank, entries in enumerate(entries_of(step))]
    return publish(folder, manifest_of(step, shards, run=run))


def assert_is(found, step):
    assert found.step == step
    for name, tensor in tensors_at(step).items():
        assert same(found.read(name, "value", whole_place(tensor.shape)), tensor)


def assert_falls_back(root, *, file, said=""):
    """The newest, of step 20, is bad by one file; it is set aside and told, and step 10 is used."""
    assert [line for line in verify(root / step_name(20)) if file in line and said in line]
    told = []
    assert_is(newest(root, run="run-a", on_bad=lambda path, lines: told.append((path, lines))), 10)
    assert [path.name for path, _ in told] == ["bad-step-00000020-1"]
    assert any(file in line for line in told[0][1])
    assert told[0][0].is_dir()
    assert not (root / step_name(20)).exists()


def in_child(work):
    """Run it in a fork; what it ended with (a signal is negative)."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def two_good_ones(root):
    for step in (10, 20):
        save(root, step)
    return root


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())
