"""Runs that lose ranks or hosts go on from the memory of those that are left, to the same end, to the bit."""

import errno
import json
import os
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.runtime.near import at
from tests.runtime.saved import LAYOUTS, QUICK, RATE, assert_same, kill, plan_for, whole
from tests.soak import sample

from wavetrain.base.errors import RunError
from wavetrain.commands.train_run import job_of, rows_of
from wavetrain.runtime import neighbours
from wavetrain.runtime.inject import DURING, When
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.manifest import Manifest, Piece, Shard
from wavetrain.runtime.neighbours import Found, Hosts, Move, moves_of, newest_whole
from wavetrain.runtime.report import Cause
from wavetrain.runtime.saving import MOMENTS, VALUE, Saver, files_for, memory_folder
from wavetrain.runtime.shelf import Copy, open_shelf
from wavetrain.runtime.tensorfile import writing
from wavetrain.runtime.trainer import train
from wavetrain.runtime.world import gloo_group

STEPS, EVERY, DISK = 6, 2, 3  # killed in the sixth step: a copy in memory has 4 steps, a checkpoint 3
WAVE = LAYOUTS["wave"]  # four ranks, each with a shard
ONE, TWO, UNEVEN, FOUR = (0, 0, 0, 0), (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2, 3)


def job_for(root, *, layout=WAVE, **more):
    known = {"steps": STEPS, "checkpoints": root / "disk", "memory_every": EVERY, "memory_dir": root / "host-0"} | more
    return job_of(plan_for(**layout), rate=RATE, clip=1.0, **known)


def on_host(job, host):
    """The job as the ranks of a host know it: memory is a host's own."""
    return replace(job, memory_dir=job.memory_dir.with_name(f"host-{host}"))


def folder_on(job, host):
    return memory_folder(on_host(job, host))


def run(job, hosts=TWO, *, attempt=0, at_once=False):
    """At once: every copy is complete before the next step, so what is lost does not depend on who is quicker."""

    def work(world):
        if at_once:
            before = Saver.after

            def after(saver, done):
                before(saver, done)
                saver.finish()

            Saver.after = after
        records = train(on_host(job, hosts[world.rank]), world)
        if world.rank == 0:
            world.give(json.dumps(len(records[0].losses)).encode())

    return run_local(work, job.num_ranks, limits=QUICK, actions=rows_of(job), attempt=attempt)


def went_on_after(outcome):
    """How many steps a run that ended well did not have to take."""
    return STEPS - json.loads(outcome.check().results[0])


def assert_nothing_left(root):
    assert list(root.glob("host-*/*")) == []


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("uninterrupted")
    run(job_for(root)).check()
    assert_nothing_left(root)
    return whole(root / "disk")


# --- killed anywhere ---

KILLS = [
    *(kill(*point) for point in product((1, 3, 5), (*DURING, When.OPTIMIZER), range(4))),
    *(kill(*point) for point in product((2, 4), (When.SAVE,), range(4))),
    *(kill(step, When.PUBLISH, 0) for step in (2, 4)),
]


def name_of(case):
    return f"{case.when}-{case.step}-{case.rank}" if hasattr(case, "when") else "".join(map(str, case))


@pytest.mark.parametrize(("fault", "hosts"), sample(list(product(KILLS, (ONE, TWO, UNEVEN, FOUR))), 2), ids=name_of)
def test_a_run_that_is_killed_goes_on_from_memory(fault, hosts, tmp_path, uninterrupted):
    job = job_for(tmp_path, faults=(fault,))
    first = run(job, hosts)
    assert first.report is not None, "nothing happened"
    assert (first.report.culprit, first.report.cause) == (fault.rank, Cause.KILLED)
    begun = fault.step // EVERY * EVERY  # the copy that may have been under way; the one before it was complete
    assert went_on_after(run(job, hosts, attempt=1)) in (begun, max(0, begun - EVERY))
    assert_same(tmp_path / "disk", uninterrupted)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(("when", "after"), [(When.SAVE, 2), (When.PUBLISH, 4)])
def test_a_copy_is_used_as_soon_as_nothing_of_it_is_missing(when, after, tmp_path, uninterrupted):
    """Killed when a shard has no facts yet: the copy before. When all is written but not published: this one."""
    job = job_for(tmp_path, faults=(kill(4, when, 0),))
    assert run(job).report is not None
    assert went_on_after(run(job, attempt=1)) == after
    assert_same(tmp_path / "disk", uninterrupted)


def test_a_recovery_that_is_killed_is_repeated(tmp_path, uninterrupted):
    job = job_for(tmp_path, faults=(kill(5, When.BACKWARD, 2), kill(0, When.LOAD, 1, attempt=1)))
    assert run(job, at_once=True).report is not None
    shutil.rmtree(tmp_path / "host-1")
    assert run(job, attempt=1).report is not None
    assert went_on_after(run(job, attempt=2)) == 4
    assert_same(tmp_path / "disk", uninterrupted)


# --- hosts and files that are lost ---


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A job that was killed in its sixth step, on some hosts; each caller gets one of its own."""
    roots = {}

    def copy_of(hosts, root, *, disk=True):
        if hosts not in roots:
            roots[hosts] = tmp_path_factory.mktemp("killed")
            job = job_for(roots[hosts], save_every=DISK, faults=(kill(5, When.BACKWARD, 1),))
            assert run(job, hosts, at_once=True).report is not None
        source = job_for(roots[hosts])
        job = job_for(root, save_every=DISK, checkpoints=root / "disk" if disk else None)
        for host in set(hosts):
            shutil.copytree(folder_on(source, host), folder_on(job, host))
        if disk:
            shutil.copytree(source.checkpoints, root / "disk")
        return job

    return copy_of


@pytest.mark.parametrize(
    ("hosts", "lost", "after"),
    sample([(TWO, (0,), 4), (TWO, (1,), 4), (TWO, (0, 1), DISK), (FOUR, (0, 2), 4), (FOUR, (3, 0), DISK)], 3),
    ids=str,
)
def test_a_host_that_is_lost_costs_no_more_than_a_rank(hosts, lost, after, killed, tmp_path, uninterrupted):
    """Two neighbours have all there is of a shard: then the disk is needed."""
    job = killed(hosts, tmp_path)
    for host in lost:
        shutil.rmtree(tmp_path / f"host-{host}")
    assert went_on_after(run(job, hosts)) == after
    assert_same(tmp_path / "disk", uninterrupted)
    assert_nothing_left(tmp_path)


def test_without_a_disk_the_remains_of_a_copy_are_no_new_start(killed, tmp_path):
    job = killed(FOUR, tmp_path, disk=False)
    for host in (1, 2):
        shutil.rmtree(tmp_path / f"host-{host}")
    failed = run(job, FOUR)
    assert failed.report is not None
    assert "not all is left" in failed.report.text
    assert str(folder_on(job, 0)) in failed.report.text
    for host in (0, 3):
        shutil.rmtree(folder_on(job, host))
    assert went_on_after(run(job, FOUR)) == 0


def test_a_copy_that_never_was_complete_is_nothing_to_keep(tmp_path):
    job = job_for(tmp_path, checkpoints=None, faults=(kill(2, When.SAVE, 3),))
    assert run(job).report is not None
    assert [path.name[:8] for path in folder_on(job, 1).iterdir()] == [".writing"]
    assert went_on_after(run(job, attempt=1)) == 0
    assert_nothing_left(tmp_path)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("file", ["rank-00001.safetensors", "rank-00001.json"])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_changed_file_is_not_there(file, damage, killed, tmp_path):
    shelf = open_shelf(folder_on(killed(TWO, tmp_path), 0))
    (copy,) = shelf.copies()
    assert len(shelf.files(copy)) == copy.shards == 4
    assert all(shelf.verified(copy, one) for one in shelf.files(copy))
    damage(shelf.folder(copy) / file)
    left = [one for one in shelf.files(copy) if shelf.verified(copy, one)]
    assert left == ["rank-00000.safetensors", "rank-00002.safetensors", "rank-00003.safetensors"]
    assert shelf.files(copy) == left  # it is not looked at again
    shelf.close(remove=False)


@pytest.mark.parametrize(("hosts", "after"), [((0,), 4), ((0, 1), DISK)], ids=["one", "both"])
def test_the_neighbours_copy_of_a_changed_file_is_used_or_else_the_disk(hosts, after, killed, tmp_path, uninterrupted):
    job = killed(TWO, tmp_path)
    for host in hosts:
        (file,) = folder_on(job, host).glob("*/rank-00001.safetensors")
        flip(file)
    assert went_on_after(run(job)) == after
    assert_same(tmp_path / "disk", uninterrupted)


@pytest.mark.parametrize("step", [3, 5])
def test_bad_checkpoints_do_not_matter_where_memory_has_all(step, killed, tmp_path, uninterrupted):
    """Whether they are older than it or newer."""
    job = killed(TWO, tmp_path)
    (checkpoint,) = (tmp_path / "disk").iterdir()
    flip(checkpoint / "manifest.json")
    checkpoint.rename(checkpoint.with_name(f"step-{step:08d}"))
    assert went_on_after(run(job)) == 4
    assert_same(tmp_path / "disk", uninterrupted)


# --- another layout, other hosts ---


@pytest.fixture(scope="module")
def after_four(tmp_path_factory):
    root = tmp_path_factory.mktemp("four")
    run(job_for(root, steps=4, memory_every=0)).check()
    return whole(root / "disk")[1]


@pytest.mark.parametrize(
    ("target", "hosts"),
    [("one", (1,)), ("pipeline", (0, 9)), ("parts", (0, 0, 2, 2)), ("everything", (9, 9, 9, 0, 0, 0, 2, 2))],
    ids=str,
)
def test_another_layout_goes_on_from_memory(target, hosts, killed, tmp_path, after_four):
    """Also with a host that has nothing: it gets what its ranks need. Of four hosts two opposite ones are enough."""
    source = killed(FOUR if 2 in hosts else TWO, tmp_path)
    job = job_for(tmp_path, layout=LAYOUTS[target])
    shards = shards_of(source)

    def work(world):
        own = on_host(job, hosts[world.rank])
        with gloo_group(world, timeout_s=60):
            learner = Learner(own, world)
            assert Saver(own, world, learner).resume() == 4
            for leaf in learner.every_leaf():
                name = learner.ties.get(leaf.name, leaf.name)
                state = {VALUE: leaf.values, **learner.optimizer_state(leaf)}
                for kind in [VALUE, *(moment for moment in MOMENTS if moment in state or name == leaf.name)]:
                    assert torch.equal(state[kind], at(after_four[kind, name], leaf.place)), (kind, leaf.key)
            needed = files_for(learner, Manifest(run="", step=4, plan_hash="", shards=shards))
            world.give(json.dumps(sorted(needed)).encode())

    needs = map(json.loads, run_local(work, job.num_ranks, limits=QUICK).check().results)
    needed = {file for host, files in zip(hosts, needs, strict=True) if host == 9 for file in files}
    assert {path.name for path in folder_on(job, 9).glob("*/*.safetensors")} == needed


def shards_of(job):
    """All shards of the copy that a job's hosts have."""
    found = {}
    for path in job.memory_dir.parent.glob("host-*/*"):
        shelf = open_shelf(path)
        found |= {file: shelf.verified(copy, file) for copy in shelf.copies() for file in shelf.files(copy)}
        shelf.close(remove=False)
    return tuple(found.values())


# --- no room, and whose the room is ---


def is_in_memory_folder(stream, *_):
    return "/host-" in str(Path(f"/proc/self/fd/{stream}").readlink())


@pytest.mark.parametrize(
    ("module", "name", "concerns"),
    [(os, "posix_fallocate", is_in_memory_folder), (neighbours, "write_shard", lambda *_: True)],
    ids=["copy", "own"],
)
def test_where_memory_is_full_training_goes_on(module, name, concerns, tmp_path, monkeypatch, uninterrupted):
    """On one rank only, from the second copy on: the first one stays."""
    job = job_for(tmp_path, faults=(kill(5, When.BACKWARD, 0),))
    real, calls = getattr(module, name), []

    def sometimes(*arguments):
        calls.extend([arguments] if concerns(*arguments) else [])
        if os.environ.get("FULL") and len(calls) > 1:
            with writing(Path("somewhere")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(module, name, sometimes)

    def work(world):
        if world.rank == 2:
            os.environ["FULL"] = "yes"
        train(on_host(job, TWO[world.rank]), world)

    failed = run_local(work, job.num_ranks, limits=QUICK, actions=rows_of(job))
    assert failed.report.cause is Cause.KILLED
    monkeypatch.undo()
    assert went_on_after(run(job, attempt=1)) == 2
    assert_same(tmp_path / "disk", uninterrupted)


@pytest.mark.parametrize("sort", ["link", "dangling link", "file", "open to others", "another user's"])
def test_a_folder_that_is_not_ours_alone_is_refused(sort, tmp_path):
    path, elsewhere = tmp_path / "memory", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if "link" in sort:
        path.symlink_to(elsewhere if sort == "link" else tmp_path / "nowhere")
    elif sort == "file":
        path.write_text("")
    else:
        path.mkdir()
        path.chmod(0o750 if sort == "open to others" else 0o700)
    if sort == "another user's":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(path, 12345, -1)
    with pytest.raises(RunError, match=str(path)):
        open_shelf(path)
    assert not (tmp_path / "nowhere").exists()


def test_a_new_folder_is_for_its_user_only(tmp_path):
    before = os.umask(0)
    try:
        open_shelf(tmp_path / "memory").close(remove=False)
    finally:
        os.umask(before)
    assert (tmp_path / "memory").stat().st_mode & 0o777 == 0o700


def test_two_runs_do_not_share_a_folder(tmp_path, monkeypatch):
    job = job_for(tmp_path, layout=LAYOUTS["one"])
    monkeypatch.setattr("wavetrain.runtime.shelf.PATIENCE_S", 0.2)
    held = open_shelf(memory_folder(job))
    held.lock()
    failed = run(job, (0,))
    assert failed.report is not None
    assert "is used by a run that goes on" in failed.report.text
    held.close(remove=False)
    assert went_on_after(run(job, (0,))) == 0


def test_what_a_run_is_in_memory(tmp_path):
    """Other checkpoints, another run: to begin anew elsewhere is to begin anew."""
    job = job_for(tmp_path)
    same = [job, replace(job, steps=9, save_every=1, memory_every=7, plan=plan_for(**LAYOUTS["one"]))]
    others = [replace(job, seed=1), replace(job, checkpoints=None), replace(job, checkpoints=tmp_path / "other")]
    assert len({memory_folder(one) for one in same}) == 1
    assert len({memory_folder(one) for one in [job, *others]}) == 4
    assert memory_folder(replace(job, memory_dir=None)).parent == Path("/dev/shm")


# --- who has what ---


@pytest.mark.parametrize(
    ("hosts", "kept_by"),
    [
        ("a", [None]),
        ("aaaa", [None] * 4),
        ("aabb", [2, 3, 0, 1]),
        ("abc", [1, 2, 0]),
        ("abab", [1, 0, 3, 2]),
        ("aaab", [3, 3, 3, 0]),
    ],
)
def test_a_shard_is_kept_by_the_next_host_too(hosts, kept_by):
    assert Hosts.of(hosts).neighbours() == kept_by


def shard_of(rank, *, rows=(0, 1), of=1, name="w"):
    piece = Piece(name=name, kind="value", shape=(of,), dtype="F32", place=((rows,),))
    return Shard(file=f"rank-{rank:05d}.safetensors", size=4, sha256="0" * 64, pieces=(piece,))


def test_the_newest_copy_is_the_one_of_which_nothing_is_missing():
    halves = [shard_of(0, rows=(0, 1), of=2), shard_of(1, rows=(1, 2), of=2)]
    old, new = Copy(2, 2, "a" * 8), Copy(4, 2, "a" * 8)
    whole_old = [(0, old, halves[0]), (1, old, halves[1]), (1, old, halves[0])]
    assert newest_whole([]) is None
    assert newest_whole(whole_old[:1]) is None
    assert newest_whole([(0, old, shard_of(0))]) is None  # every tensor that is there is whole, but a shard is missing
    assert newest_whole([(0, old, halves[0]), (0, old, shard_of(1, rows=(0, 1), of=2))]) is None
    assert newest_whole([(0, old, halves[0]), (0, Copy(2, 2, "b" * 8), halves[1])]) is None  # of different starts
    found = newest_whole([*whole_old, (0, new, halves[0])])
    assert found.copy == old
    assert found.holders == {halves[0].file: {0, 1}, halves[1].file: {1}}
    assert newest_whole([*whole_old, (0, new, halves[0]), (0, new, halves[1])]).copy == new


def test_a_host_is_sent_what_its_ranks_need_once():
    shards = {name: shard_of(number) for number, name in enumerate("xyz")}
    held = {"x": frozenset({0, 1}), "y": frozenset({1}), "z": frozenset({0})}
    found = Found(Copy(2, 3, "a" * 8), shards, held)
    hosts = Hosts.of("aabbcc")
    assert moves_of(found, ["", "", "y", "", "", ""], hosts) == []
    needs = ["xy", "y", "x", "", "xz", "x"]
    assert moves_of(found, needs, hosts) == [Move("y", 2, 0), Move("x", 0, 4), Move("z", 1, 5)]
