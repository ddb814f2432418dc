"""Runs under torchrun's agents, one per host, that lose hosts, ranks and links, and go on to the same end."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.elastic import Elastic, elastic
from tests.runtime.namespaces import needs_namespaces
from tests.runtime.plans import small_model
from tests.soak import often, sample

from wavetrain.base.document import parse_json
from wavetrain.base.errors import InputError, RunError
from wavetrain.base.units import DType
from wavetrain.cli import main
from wavetrain.cluster import load_cluster
from wavetrain.cluster.cluster import Cluster, Group
from wavetrain.commands.replan import replanned
from wavetrain.plan import Choice, Layout, OperatorChoice, Plan, Precision
from wavetrain.plan.check import check
from wavetrain.plan.read import read_plan, write_plan
from wavetrain.runtime.board import process_state
from wavetrain.runtime.logs import read_steps
from wavetrain.runtime.virtual import Network, network

STEPS = 40
IN_A_ROW = often(50, 2)


def two_hosts() -> Plan:
    """A wave over two ranks, twice, an operator of each block sharded over both replicas."""
    one = load_cluster("dgx-h100:1")
    node = replace(one.node, num_devices=2)
    plan = Plan(
        model=small_model(blocks=4, hidden=32, vocab=61, seq_len=16, family="llama", tied=True),
        cluster=Cluster("two", (Group(node, 2),), one.sources),
        layout=Layout(global_batch=8, microbatch=2, pp=2, dp=2, schedule="wave", waves=1),
        cut=(1, 1, 1, 1),
        seq_len=16,
        choices=(OperatorChoice("decoder", "model.layers.{}.mlp.up_proj", Choice(2)),),
        precision=Precision(compute=DType.FP32, products=DType.FP32, state_bytes=8),
    )
    assert not check(plan), check(plan)
    return plan


def words(root: Path, steps: int) -> list[str]:
    (root / "plan.json").write_text(write_plan(two_hosts()))
    kept = ["--checkpoints", str(root / "checkpoints"), "--save-every", "1", "--keep", "10000"]
    return [str(root / "plan.json"), "--replan", "--steps", str(steps), "--hang-floor", "4", *kept]


def losses(root: Path) -> list[float]:
    return [done.loss for done in read_steps(root / "out" / "log.jsonl")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing happens to; each run is its beginning."""
    root = tmp_path_factory.mktemp("expected")
    plan, *_ = words(root, STEPS)
    steps = max(STEPS, IN_A_ROW + 3)
    assert main(["train", plan, "--local", "4", "--steps", str(steps), "-o", str(root / "out")]) == 0
    return losses(root)


def check_run(run: Elastic, expected: list[float], steps: int) -> None:
    """Every step is there, with its loss; nothing is left behind."""
    assert losses(run.root) == pytest.approx(expected[:steps], rel=1e-5)
    assert not list((run.root / "checkpoints").glob(".writing-*"))
    assert not run.agents


def test_a_lost_host_is_planned_around_and_comes_back(tmp_path: Path, expected: list[float]) -> None:
    run = Elastic(tmp_path, words(tmp_path, STEPS))
    with elastic(run):
        run.await_step(4)
        run.kill(1)
        report = run.out / "report.json"
        run.until(report.exists)
        assert json.loads(report.read_text())["culprit"] in (2, 3)
        lost = run.steps()[-1]
        run.await_step(lost + 5)
        with run.slowly():
            before = run.num_started
            run.start(1)
            run.until(lambda: run.num_started >= before + 4)
        assert run.end(0) == 0, run.logs()
        assert run.end(1) == 0, run.logs()
    check_run(run, expected, STEPS)
    assert run.worlds() == [4, 2, 4]


@pytest.mark.timeout(often(1800, 300))
def test_restarts_in_a_row(tmp_path: Path, expected: list[float]) -> None:
    """Every attempt does one step more and loses another rank, in another phase; the last has none to lose."""
    whens = ("forward", "backward", "communication", "optimizer", "save", "publish", "load", "start")
    faults = []
    for attempt in range(IN_A_ROW):
        when = whens[attempt % len(whens)]
        rank = 0 if when == "publish" else attempt % 4
        faults += ["--inject", f"kill:{rank}:{attempt + 1}:{when}:{attempt}"]
    steps = IN_A_ROW + 3
    run = Elastic(tmp_path, [*words(tmp_path, steps), *faults], hosts=1, ranks_each=4, pace_s=0.0)
    with elastic(run):
        assert run.end(0, seconds=60 + 10 * IN_A_ROW) == 0, run.logs()
    check_run(run, expected, steps)
    assert run.num_started == 4 * (IN_A_ROW + 1)


@pytest.mark.parametrize(
    ("sent", "cause"), sample([(signal.SIGKILL, "exited"), (signal.SIGSTOP, "stopped")], 1, seed=2)
)
def test_a_rank_that_is_killed_or_stopped_is_started_again(
    tmp_path: Path, expected: list[float], sent: signal.Signals, cause: str
) -> None:
    run = Elastic(tmp_path, words(tmp_path, 16))
    with elastic(run):
        run.await_step(4)
        one = run.ranks(1)[0]
        os.kill(one, sent)
        assert [run.end(host) for host in (0, 1)] == [0, 0], run.logs()
        assert process_state(one) == "X"
    check_run(run, expected, 16)
    assert run.worlds() == [4]
    report = json.loads((run.out / "report.json").read_text())
    assert (report["culprit"], report["cause"]) == (2, cause)


def cut_off(net: Network) -> None:
    net.hosts[1].cut()


def unheard(net: Network) -> None:
    """What host 0 sends to host 1 goes nowhere; the other way all is well."""
    net.hosts[0].mislay(net.hosts[1])


@needs_namespaces
@pytest.mark.parametrize("fault", sample([cut_off, unheard], 1))
def test_a_host_that_is_cut_off_is_planned_around(
    tmp_path: Path, expected: list[float], fault: Callable[[Network], None]
) -> None:
    with network(2) as net:
        enter = lambda host: net.hosts[host].enter()  # noqa: E731
        run = Elastic(tmp_path, words(tmp_path, 24), address=net.hosts[0].address, enter=enter)
        with elastic(run):
            run.await_step(4)
            fault(net)
            assert run.end(0) == 0, run.logs()
            run.until(lambda: not run.ranks(1))  # they end by themselves
            run.kill(1)
        check_run(run, expected, 24)
        assert run.worlds() == [4, 2]
        assert json.loads((run.out / "report.json").read_text())["culprit"] in (2, 3)


@needs_namespaces
def test_a_glitch_is_ridden_out(tmp_path: Path, expected: list[float]) -> None:
    with network(2) as net:
        enter = lambda host: net.hosts[host].enter()  # noqa: E731
        patient = [*words(tmp_path, 24), "--hang-floor", "12"]
        run = Elastic(tmp_path, patient, address=net.hosts[0].address, enter=enter)
        with elastic(run):
            run.await_step(4)
            net.hosts[1].cut()
            time.sleep(3)
            net.hosts[1].mend()
            assert [run.end(host) for host in (0, 1)] == [0, 0], run.logs()
        check_run(run, expected, 24)
        assert run.worlds() == [4]
        assert run.steps() == list(range(24))
        assert not (run.out / "report.json").exists()


def test_a_plan_for_fewer_ranks_is_for_the_same_batch() -> None:
    plan = two_hosts()
    for ranks in (1, 2):
        made = replanned(plan, ranks)
        assert not check(made)
        assert made.layout.num_devices == ranks
        assert (made.layout.global_batch, made.seq_len, made.model) == (8, 16, plan.model)
        assert read_plan(parse_json(write_plan(made), file="plan")) == made
    with pytest.raises(RunError, match="a batch of 8, on 7 ranks: no layout has so many"):
        replanned(replace(plan, cluster=load_cluster("dgx-h100:1")), 7)
    for ranks, rule in ((3, "not whole nodes of 2"), (8, "has 4 devices, and this run 8 ranks")):
        with pytest.raises(InputError, match=rule):
            replanned(plan, ranks)
