"""Runs whose disk fills up, or may not be written any more: told with the place, and they go on when there is room."""

import os
import subprocess
from contextlib import contextmanager

import pytest
from tests.runtime.saved import LAYOUTS, STEPS, assert_same, job_for, plan_for, run, whole
from tests.soak import sample

from wavetrain.runtime.checkpoint import published


@contextmanager
def disk(path, size):
    """A small disk; only root may make one."""
    if os.geteuid() != 0:  # CI is root and must run them
        pytest.skip("no right to mount a disk")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def again(path, options):
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What a run ends with, and what one checkpoint takes on a disk of whole pages."""
    root = tmp_path_factory.mktemp("uninterrupted")
    run(job_for(plan_for(**LAYOUTS["wave"]), root)).check()
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = [file.stat().st_size for file in published(root)[0].iterdir()]
    return whole(root), sum(-(-size // page) * page for size in sizes)


@pytest.mark.parametrize("share", sample([1.1, 1.5, 1.95], 2))
def test_a_disk_that_fills_up(tmp_path, uninterrupted, share):
    """The second checkpoint does not fit: whichever file it is that does not, the first one is good and alone."""
    expected, size = uninterrupted
    job = job_for(plan_for(**LAYOUTS["wave"]), tmp_path / "disk")
    with disk(tmp_path / "disk", int(size * share)) as root:
        failed = run(job)
        assert failed.report is not None
        assert f"{root}/" in failed.report.text
        assert "can't be written: No space left on device" in failed.report.text
        assert [path.name for path in root.iterdir()] == ["step-00000002"]
        again(root, f"size={4 * size}")
        run(job, attempt=1).check()
        assert_same(root, expected)
        assert published(root)[0].name == f"step-{STEPS:08d}"


def test_a_disk_that_may_not_be_written_any_more(tmp_path, uninterrupted):
    expected, size = uninterrupted
    plan = plan_for(**LAYOUTS["wave"])
    with disk(tmp_path / "disk", 4 * size) as root:
        run(job_for(plan, root, steps=2)).check()
        again(root, "ro")
        failed = run(job_for(plan, root))
        assert failed.report is not None
        assert f"{root}/" in failed.report.text
        assert "can't be written: Read-only file system" in failed.report.text
        again(root, "rw")
        assert [path.name for path in root.iterdir()] == ["step-00000002"]
        run(job_for(plan, root), attempt=1).check()
        assert_same(root, expected)
