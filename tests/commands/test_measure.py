"""`wavetrain measure`, as users call it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.conftest import Ran

from wavetrain.cluster import load_cluster
from wavetrain.cluster.laws import load_laws
from wavetrain.commands.measure import write_measured
from wavetrain.runtime.measure_network import FULL, QUICK
from wavetrain.runtime.samples import Sample
from wavetrain.study.calibrate import Calibrated

Run = Callable[..., Ran]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbenchmarks that take no time, and a device that is known."""

    def compute_samples(_, told, **__) -> list[Sample]:
        told("gemm", 0.5)
        return [Sample("gemm-forward", (64, 64, 64), 1.5)]

    def calibrate_compute(samples, *, name, title, memory_bytes, like) -> Calibrated:
        assert [sample.seconds for sample in samples] == [1.5], "of one turn; no sample of the network"
        device = replace(like, name=name, title=title, memory_bytes=memory_bytes, memory_bytes_per_s=1.23456789e10)
        return Calibrated(device, replace(load_laws(), gap_s=1e-6 / 3), {"gemm": 0.0123456})

    monkeypatch.setattr("wavetrain.runtime.measure_compute.compute_samples", compute_samples)
    monkeypatch.setattr("wavetrain.runtime.measure_steps.step_samples", lambda *_, **__: [])
    monkeypatch.setattr("wavetrain.study.calibrate.calibrate_compute", calibrate_compute)
    monkeypatch.setattr("wavetrain.study.calibrate_steps.in_whole_steps", lambda cluster, _: cluster)


@pytest.mark.usefixtures("stand_in")
def test_what_is_measured_is_a_cluster(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    ran = run("measure", "--local", "2", "--quick", "-o", str(file))
    assert ran.code == 0, ran.err
    assert f"wavetrainplanMODEL{file}" in "".join(ran.out.split())  # wherever lines are folded
    cluster = load_cluster(file)
    assert (cluster.num_nodes, cluster.num_devices, cluster.overlap) == (1, 2, ("gradients", "messages"))
    assert cluster.laws.gap_s == pytest.approx(1e-6 / 3, rel=1e-5)
    (tier,) = cluster.tiers
    assert {own.kind for own in tier.kinds} == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    assert not tier.tree
    said = {source.key: source.source for source in cluster.sources}
    assert said["node.device.idle_w"] == "catalog, cpu-host"
    assert said["node.tiers[0].gb_per_s"] == "wavetrain measure"
    raw = yaml.safe_load(file.read_text())["raw"]
    assert raw["residuals"]["compute"] == {"gemm": 0.0123}
    assert set(raw["residuals"]) == {"compute", "network alone"}  # steps change what collectives take in company
    assert "error alone" in ran.out
    assert raw["samples"][0] == "gemm-forward fp32 64x64x64 1 1 1.5"
    assert sum(row.startswith("send fp32 ") for row in raw["samples"]) > 1


@pytest.mark.usefixtures("stand_in")
def test_files_are_read_as_they_were_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wavetrain.cluster import write_cluster

    made = []

    def noted(cluster, path, *, raw) -> None:
        made.append(cluster)
        write_cluster(cluster, path, raw=raw)

    monkeypatch.setattr("wavetrain.cluster.write_cluster", noted)
    file = tmp_path / "here.yaml"
    ran = run("measure", "--local", "2", "--quick", "--json", "-o", str(file))
    assert ran.code == 0, ran.err
    read = load_cluster(file)
    assert replace(read, sources=()) == replace(made[0], sources=())
    assert set(read.sources) == set(made[0].sources)
    shown = json.loads(ran.out)
    assert shown["schema"] == "wavetrain.measure/1"
    assert (shown["file"], shown["hosts"], shown["devices_per_host"]) == (str(file), 1, 2)
    assert {row["kind"] for row in shown["network"]} == {own.kind for own in read.tiers[0].kinds}
    assert all(0 <= row["error_alone"]["median"] <= row["error_alone"]["worst"] for row in shown["network"])


def test_the_network_alone(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run("measure", "--local", "2", "--quick", "--network-only")
    assert ran.code == 0, ran.err
    cluster = load_cluster("cluster.yaml")
    catalog = load_cluster("cpu-host").device
    assert cluster.device.peak == catalog.peak
    assert cluster.own_laws is None
    again = run("measure", "--local", "2", "--quick", "--network-only")
    assert again.code == 2, "a file of the usual name is not written over"
    assert "exists already" in again.err


def test_what_ranks_exchange_has_two_turns_of_each() -> None:
    """On a processor and not in a hurry; elsewhere there is one turn of all."""
    from wavetrain.commands import measure as module

    def parts(ranks: int, device: str, turns: int, *, quick: bool = False, network_only: bool = False) -> list:
        return module.parts_of(ranks, device, turns, quick=quick, network_only=network_only)

    def names(*given, **named) -> list[str]:
        return [part.name for part in parts(*given, **named)]

    compute, network, *_ = parts(2, "cpu", module.TURNS)
    exchanged = ["network", "steps of all ranks"]
    assert names(2, "cpu", module.TURNS) == ["operators", *exchanged, "steps of each rank", *exchanged]
    assert compute.work.keywords["passes"] * module.TURNS == module.PASSES
    assert network.work.keywords["effort"] == FULL.part(module.EXCHANGES * module.TURNS)
    assert names(1, "cpu", module.TURNS) == ["operators", "steps of each rank"]
    assert names(2, "cuda", 1) == ["operators", "network"]
    assert parts(2, "cuda", 1)[0].work.keywords["passes"] == module.PASSES
    assert names(2, "cpu", 1, quick=True) == ["operators", *exchanged, "steps of each rank"]
    assert parts(2, "cpu", 1, quick=True)[1].work.keywords["effort"] == QUICK
    assert names(2, "cpu", 1, network_only=True) == ["network"]


def test_the_device_is_the_one_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo trains on processors, whatever else is here."""
    monkeypatch.setattr("wavetrain.runtime.machine.device_here", lambda: pytest.fail("it looked for others"))
    file = tmp_path / "one.yaml"
    shown = write_measured(file, local=1, quick=True, network_only=True, device="cpu")
    assert shown is not None
    assert "catalog, cpu-host" in {source.source for source in load_cluster(file).sources}


def test_one_rank_has_a_device_and_no_network(run: Run, tmp_path: Path) -> None:
    ran = run("measure", "--local", "1", "--quick", "--network-only", "-o", str(tmp_path / "one.yaml"))
    assert ran.code == 0, ran.err
    assert load_cluster(tmp_path / "one.yaml").tiers == ()


@pytest.mark.parametrize("local", ["0", "-1", "100000", "x"])
def test_a_number_of_ranks_out_of_range_is_refused(run: Run, local: str) -> None:
    ran = run("measure", "--local", local)
    assert ran.code == 2
    assert "--local" in ran.err


@pytest.mark.parametrize("file", ["", "nowhere/cluster.yaml", "a-file/cluster.yaml"])
def test_a_file_that_cannot_be_written_is_refused_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setattr("wavetrain.commands.measure._measured", lambda *_, **__: pytest.fail("it measured"))
    ran = run("measure", "--local", "2", "-o", str(tmp_path / file))
    assert ran.code == 2
    assert "can't be written" in ran.err
    assert not (tmp_path / "nowhere").exists()


def test_a_file_is_not_touched_before_there_is_something_to_write(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("mine")
    monkeypatch.setattr("wavetrain.commands.measure._measured", lambda *_, **__: None)
    assert run("measure", "-o", str(old)).code == run("measure", "-o", str(new)).code == 0
    assert old.read_text() == "mine"
    assert not new.exists()


def test_under_a_launcher_ranks_meet(tmp_path: Path) -> None:
    """Two processes that torchrun's variables describe; the first writes and shows."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = tmp_path / "cluster.yaml"
    words = ["measure", "--quick", "--network-only", "-o", str(file)]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "wavetrain", *words],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], ended
    assert "wrote" in ended[0][0]
    assert ended[1][0] == ""
    assert load_cluster(file).num_devices == 2
