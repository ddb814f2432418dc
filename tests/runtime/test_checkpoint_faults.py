"""Every changed bit is found with its file; writing fails or is killed anywhere; a good checkpoint is used."""

import errno
import itertools
import logging
import os
import random
import resource
import shutil
import signal
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.runtime.checkpoints import (
    SHARDS,
    assert_falls_back,
    assert_is,
    entries_of,
    in_child,
    manifest_of,
    names_in,
    save,
    two_good_ones,
)

from wavetrain.base.errors import InputError, RunError
from wavetrain.runtime import checkpoint
from wavetrain.runtime.checkpoint import (
    begin,
    clean,
    newest,
    opened,
    publish,
    published,
    step_name,
    verify,
)
from wavetrain.runtime.manifest import (
    MANIFEST,
)
from wavetrain.runtime.tensorfile import Entry, write_shard


@pytest.fixture
def root(tmp_path):
    return two_good_ones(tmp_path)


# --- every bit counts ---


def test_every_bit_flip_is_found_with_its_file(root):
    path, draw = root / step_name(20), random.Random(8)
    assert verify(path) == []
    files = sorted(path.iterdir())
    assert len(files) == 4
    for number in range(600):
        file = files[number % 4]
        data = file.read_bytes()
        bit = draw.randrange(8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        findings = verify(path)
        assert len(findings) == 1, (file, bit)
        assert findings[0].startswith(str(file)), (file, bit)
        if file.name == MANIFEST:
            with pytest.raises(InputError, match="SHA-256"):
                opened(path)
        file.write_bytes(data)
    assert verify(path) == []


def test_every_truncation_and_addition_is_found_with_its_file(root):
    path, draw = root / step_name(20), random.Random(9)
    files = sorted(path.iterdir())
    for number in range(160):
        file = files[number % 4]
        data = file.read_bytes()
        length = (0, 1, 7, 8, len(data) - 1)[number // 4] if number < 20 else draw.randrange(len(data))
        file.write_bytes(data[:length] if number % 8 < 7 else data + data[:length] + b"\n")
        findings = verify(path)
        assert [line.startswith(str(file)) for line in findings] == [True], (file, length)
        file.write_bytes(data)
    assert verify(path) == []


def test_bad_ones_that_cant_be_set_aside_are_not_forgotten(root, monkeypatch):
    """Where others own the folder, renaming is denied and writing beside it is not."""
    for path in published(root):
        (path / MANIFEST).write_bytes(b"{}")
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not yours")))
    with pytest.raises(InputError, match="has no good checkpoint, only bad ones: step-"):
        newest(root)


def test_a_bad_one_is_set_aside_and_never_used_or_deleted(root, caplog):
    file = root / step_name(20) / SHARDS[1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert_falls_back(root, file=SHARDS[1], said="SHA-256")
    assert SHARDS[1] in caplog.text
    assert (root / "bad-step-00000020-1" / SHARDS[1]).read_bytes() == data
    save(root, 20)  # its step is done again, and goes bad again
    (root / step_name(20) / SHARDS[1]).write_bytes(data)
    assert_is(newest(root), 10)
    assert names_in(root) == ["bad-step-00000020-1", "bad-step-00000020-2", "step-00000010"]


def test_where_only_bad_ones_are_nothing_starts_over(root):
    assert newest(root / "nowhere") is None
    for path in published(root):
        (path / MANIFEST).write_bytes(b"")
    for _ in range(2):  # nor the second time
        with pytest.raises(InputError, match="only bad ones: bad-step-00000010-1, bad-step-00000020-1"):
            newest(root)


def test_several_threads_find_the_same(root, monkeypatch):
    monkeypatch.setattr(checkpoint, "THREADS_FROM", 0)
    for number in (0, 2):
        (root / step_name(20) / SHARDS[number]).write_bytes(b"bad")
    findings = verify(root / step_name(20))
    assert [SHARDS[n] in line for n, line in zip((0, 2), findings, strict=True)] == [True, True]
    assert verify(root / step_name(10)) == []


def test_swapped_shards_of_two_steps(root):
    a, b = (root / step_name(step) / SHARDS[0] for step in (10, 20))
    assert a.stat().st_size == b.stat().st_size
    b.write_bytes(a.read_bytes())
    assert_falls_back(root, file=SHARDS[0], said="SHA-256")


def test_swapped_shards_of_two_ranks(root):
    path = root / step_name(20)
    first, third = (path / SHARDS[n] for n in (0, 2))
    data = first.read_bytes()
    first.write_bytes(third.read_bytes())
    third.write_bytes(data)
    assert len(verify(path)) == 2
    assert_falls_back(root, file=SHARDS[2])


def test_another_steps_manifest_and_folder(root):
    save(root, 30)
    shutil.copy(root / step_name(10) / MANIFEST, root / step_name(20) / MANIFEST)
    assert any("is of step 10" in line for line in verify(root / step_name(20)))
    (root / step_name(30)).rename(root / step_name(40))
    assert verify(root / step_name(40)) == [f"{root / step_name(40) / MANIFEST}: is of step 30, not of this folder's"]
    assert_is(newest(root), 10)


def test_another_runs_manifest_is_bad_and_another_runs_checkpoint_is_an_error(root, tmp_path_factory):
    other = save(tmp_path_factory.mktemp("other"), 20, run="run-b")
    (root / step_name(20) / SHARDS[0]).unlink()
    shutil.copy(other / MANIFEST, root / step_name(20) / MANIFEST)
    assert_falls_back(root, file=SHARDS[0])
    shutil.copytree(other, root / step_name(20))
    with pytest.raises(InputError, match=r"(?s)manifest.json  run: run-b.*another run than run-a"):
        newest(root, run="run-a")
    assert verify(root / step_name(20)) == []  # and it is left where it is
    assert_is(newest(root, run="run-b"), 20)


def test_a_manifest_of_another_run_tells_so(root, tmp_path_factory):
    folder = begin(tmp_path_factory.mktemp("other"), step=20)
    shards = [write_shard(folder, rank, entries) for rank, entries in enumerate(entries_of(7))]
    other = publish(folder, manifest_of(20, shards, run="run-b"))
    shutil.copy(other / MANIFEST, root / step_name(20) / MANIFEST)
    told = []
    assert_is(newest(root, run="run-a", on_bad=lambda _, lines: told.extend(lines)), 10)
    assert "run: run-b: is of another run than run-a" in told[-1]
    assert len(told) == 4  # and all three shards


def test_deleted_and_extra_files(root):
    save(root, 30), save(root, 40)
    (root / step_name(40) / MANIFEST).unlink()
    (root / step_name(30) / SHARDS[2]).unlink()
    (root / step_name(20) / "extra.bin").write_bytes(b"?")
    (root / step_name(20) / ".DS_Store").write_bytes(b"?")
    assert verify(root / step_name(20)) == [f"{root / step_name(20) / 'extra.bin'}: is not in the manifest"]
    for step, file in ((40, MANIFEST), (30, SHARDS[2])):
        (line,) = verify(root / step_name(step))
        assert file in line
        assert "No such file" in line
    assert_is(newest(root), 10)
    (root / step_name(10) / ".nfs0001").write_bytes(b"?")  # the system's own
    assert_is(newest(root), 10)


# --- writing can fail, or be killed ---


def test_gaps_and_overlaps_are_not_published(tmp_path):
    for wrong, said in (
        (((0, 3),), r"\[3:4\] is in no shard"),
        (((0, 3), (2, 4)), r"\[2:3\] is in more than one piece"),
    ):
        folder = begin(tmp_path, step=1)
        entries = [Entry("w", "value", (4,), ((part,),), torch.zeros(part[1] - part[0])) for part in wrong]
        shard = write_shard(folder, 0, entries)
        with pytest.raises(RunError, match=said):
            publish(folder, manifest_of(1, [shard]))
    folder = begin(tmp_path, step=1)
    shards = [
        write_shard(
            folder, rank, [Entry("w", "value", (4,), (((2 * rank, 2 * rank + 2),),), torch.zeros(2, dtype=kind))]
        )
        for rank, kind in enumerate((torch.float32, torch.float64))
    ]
    with pytest.raises(RunError, match="same shape and format"):
        publish(folder, manifest_of(1, shards))
    assert published(tmp_path) == []


def test_shards_that_are_not_there_or_not_known_are_not_published(tmp_path):
    folder = begin(tmp_path, step=1)
    shards = [write_shard(folder, rank, entries) for rank, entries in enumerate(entries_of(1))]
    (folder / "more").touch()
    with pytest.raises(RunError, match="more: is no shard"):
        publish(folder, manifest_of(1, shards))
    (folder / "more").unlink()
    os.truncate(folder / SHARDS[1], 10)
    with pytest.raises(RunError, match=rf"{SHARDS[1]}: has 10 bytes"):
        publish(folder, manifest_of(1, shards))
    (folder / SHARDS[1]).unlink()
    with pytest.raises(RunError, match=rf"{SHARDS[1]}: has no bytes"):
        publish(folder, manifest_of(1, shards))
    with pytest.raises(InputError, match="must be like"):
        publish(folder, replace(manifest_of(1, []), run="a b"))


def test_wrong_entries_are_not_written(tmp_path):
    for entry, said in (
        (Entry("w", "value", (4,), (((0, 4),),), torch.zeros(3)), "a tensor of"),
        (Entry("w", "value", (4,), (((0, 5),),), torch.zeros(5)), "not inside"),
        (Entry("w", "value", (4,), (((0, 2), (1, 3)),), torch.zeros(4)), "overlap"),
        (Entry("w", "value", (2,), (((0, 2),),), torch.zeros(2, dtype=torch.complex64)), "no place in a checkpoint"),
    ):
        with pytest.raises(ValueError, match=said):
            write_shard(tmp_path, 0, [entry])
    for name, kind in (("w\n", "value"), ("w", "Value"), ("w", "a/b"), ("", "value")):
        with pytest.raises(InputError):
            write_shard(tmp_path, 0, [Entry(name, kind, (1,), (((0, 1),),), torch.zeros(1))])
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_not_published_over_another(root):
    with pytest.raises(RunError, match=r"step-00000020: can't be written: there is one already"):
        save(root, 20)
    assert len(clean(root)) == 1
    assert_is(newest(root), 20)


def test_the_disk_has_all_of_it_before_its_name_and_then_the_name(tmp_path, monkeypatch):
    done, fsync, rename = [], os.fsync, os.rename

    def synced(number):
        done.append(Path(f"/proc/self/fd/{number}").readlink().name)
        fsync(number)

    def renamed(source, target):
        done.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    save(tmp_path, 10)
    folder = next(name for name in done if name.startswith(".writing-00000010-"))
    assert done == [*SHARDS, MANIFEST, folder, "rename to step-00000010", tmp_path.name]


CALLS = ("mkdir", "open", "write", "fsync", "rename")


@contextmanager
def failing(number, failure):
    """The system call of this number, of those that writing makes, fails."""
    seen, real = itertools.count(), {name: getattr(os, name) for name in CALLS}

    def wrap(name):
        return lambda *given, **more: failure() if next(seen) == number else real[name](*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrap(name))
        yield


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fails_as_full(number, root):
    try:
        with failing(number, full), pytest.raises(RunError, match="No space left on device"):
            save(root, 30)
    except pytest.fail.Exception:  # nothing was raised: there are no more calls
        return False
    return True


def test_a_disk_that_is_full_at_any_call(root):
    for number in itertools.count():
        if not fails_as_full(number, root):
            break
        found = newest(root, run="run-a")
        assert_is(found, found.step)
        if found.step == 30:  # it failed after the rename: the disk may not have the name yet
            shutil.rmtree(found.path)
        clean(root)
        assert names_in(root) == [step_name(10), step_name(20)]
    assert number > 15
    assert_is(newest(root), 30)


def test_killed_at_any_call_leaves_all_or_nothing(root):
    for number in itertools.count():

        def work(number=number):
            with failing(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                save(root, 30)

        ended = in_child(work)
        found = newest(root, run="run-a")
        assert_is(found, found.step)
        assert not [name for name in names_in(root) if name.startswith("bad-")]
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        assert found.step in (20, 30)
        leftovers = [name for name in names_in(root) if name.startswith(".writing-")]
        assert len(leftovers) == (found.step == 20 and number > 0)
        assert [path.name for path in clean(root)] == leftovers
        if found.step == 30:
            shutil.rmtree(found.path)
    assert number > 15
    assert found.step == 30


def test_the_kernels_own_full_disk(root, monkeypatch):
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *more, **named: (
            real("/dev/full", os.O_WRONLY) if flags & os.O_CREAT else real(path, flags, *more, **named)
        )
    )  # fmt: skip
    with pytest.raises(RunError, match=r"rank-00000.safetensors: can't be written: No space left on device"):
        save(root, 30)
    monkeypatch.undo()
    assert_is(newest(root), 20)


def test_a_limit_on_file_sizes(root):
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
        with pytest.raises(RunError, match="File too large"):
            save(root, 30)

    assert in_child(work) == 0
    assert_is(newest(root), 20)


def test_a_folder_that_may_not_be_written():
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        save(root, 10), save(root, 20)
        (root / step_name(20) / SHARDS[0]).write_bytes(b"bad")
        for folder in (root, *root.iterdir()):
            folder.chmod(0o555)

        def work():
            if os.getuid() == 0:  # who may write everywhere
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            with pytest.raises(RunError, match="can't be written: Permission denied"):
                save(root, 30)
            told = []
            assert_is(newest(root, on_bad=lambda path, _: told.append(path)), 10)
            assert told == [root / step_name(20)]  # it can't be renamed, but is not used

        ended = in_child(work)
        for folder in (root, *root.iterdir()):
            folder.chmod(0o755)
        assert ended == 0


def test_a_process_out_of_files_blames_no_checkpoint(root):
    def work():
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, highest + 1))
        while True:
            try:
                os.dup(0)
            except OSError:
                break
        with pytest.raises(RunError, match="Too many open files"):
            verify(root / step_name(20))

    assert in_child(work) == 0
    assert_is(newest(root), 20)
