"""Where a rank's step goes: every moment is one term's, and collectives are charged to their own."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from tests.runtime.plans import small_model

from wavetrain.base.errors import RunError
from wavetrain.cluster import load_cluster
from wavetrain.plan import Request, plan_of, write_plan
from wavetrain.runtime import spent
from wavetrain.runtime.executor import Moment
from wavetrain.runtime.spent import RUNNING, Account, Spent, charged, spending, terms_of

SLOW_S = 0.02


class Clock:
    """A clock that goes on when told to."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(spent, "time", clock)
    monkeypatch.setattr(spent, "ACCOUNT", Account())
    return clock


def test_all_time_is_charged_to_the_innermost_term(clock):
    with spending(RUNNING):
        clock.pass_by(2.0)
        charged("tensor", clock.pass_by)(3.0)
        clock.pass_by(0.5)
        with spending("sharding"):
            clock.pass_by(1.0)
    clock.pass_by(4.0)
    assert spent.ACCOUNT.running_s == 6.5
    assert spent.ACCOUNT.take() == {RUNNING: 2.5, "tensor": 3.0, "sharding": 1.0, "host": 4.0}
    clock.pass_by(1.0)
    assert spent.ACCOUNT.take() == {"host": 1.0}


def test_a_call_that_fails_is_charged_and_over(clock):
    def fails() -> None:
        clock.pass_by(2.0)
        raise RunError("broken")

    with pytest.raises(RunError, match="broken"):
        charged("tensor", fails)()
    clock.pass_by(1.0)
    assert spent.ACCOUNT.take() == {"tensor": 2.0, "host": 1.0}


def test_time_that_has_passed_can_be_moved(clock):
    clock.pass_by(1.0)
    since = clock.monotonic()
    clock.pass_by(2.0)
    spent.ACCOUNT.move(since, "reduction")
    clock.pass_by(4.0)
    assert spent.ACCOUNT.take() == {"host": 5.0, "reduction": 2.0}


def test_moments_say_what_was_computing_and_sending():
    charges = {"running": 5.0, "tensor": 2.0, "sharding": 1.0, "waiting": 0.5, "optimizer": 0.25, "host": 0.25}
    charges |= {"reduction": 4.0, "gather": 0.5}  # after all actions
    moments = [
        Moment("0F0", "compute", 0.0, 3.0, 0, 0),
        Moment("0SEND_F0", "send to 1", 3.0, 3.5, 0, 0),
        Moment("0B0", "compute", 5.0, 8.0, 0, 0),
    ]
    terms = terms_of(charges, moments, running_s=8.0)
    assert terms["compute"] == 3.0  # six seconds of actions, three of them in collectives
    assert terms["sending"] == 0.5
    assert terms["waiting"] == 2.0  # between actions, and after them
    assert {name: terms[name] for name in ("tensor", "reduction", "gather")} == {
        "tensor": 2.0,
        "reduction": 4.0,
        "gather": 0.5,
    }
    assert sum(terms.values()) == sum(charges.values())


def test_medians_leave_the_first_steps_out(monkeypatch):
    seconds = iter([{}, *({"host": s} for s in (9.0, 8.0, 1.0, 2.0, 7.0))])
    monkeypatch.setattr(Account, "take", lambda _: next(seconds))
    kept = Spent()
    assert kept.medians == {}
    kept.after([])
    assert kept.medians["host"] == 9.0
    for _ in range(4):
        kept.after([])
    assert kept.medians["host"] == 2.0


def trained(run, tmp_path, ranks, **layout):
    model = small_model(blocks=2, hidden=32, vocab=64, seq_len=16)
    cluster = load_cluster("dgx-h100:1").part(ranks)
    plan = plan_of(Request(model=model, cluster=cluster, precision="fp32", **layout))
    (tmp_path / "plan.json").write_text(write_plan(plan))
    ran = run("train", str(tmp_path / "plan.json"), "--local", str(ranks), "--steps", "4", "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert len(document["terms_by_rank"]) == ranks
    for terms in document["terms_by_rank"]:
        assert sum(terms.values()) == pytest.approx(document["step_s"], rel=1e-9)
        assert all(seconds >= 0 for seconds in terms.values())
    assert document["terms"] == document["terms_by_rank"][document["terms_rank"]]
    assert sum(document["memory"].values()) == max(document["peak_bytes"])
    return document


def slowed(function):
    def called(*given, **named):
        time.sleep(SLOW_S)
        return function(*given, **named)

    return called


def test_gathers_and_scatters_are_sharding(run, tmp_path, monkeypatch):
    for name in (spent._GATHER, spent._SCATTER):
        monkeypatch.setattr(dist, name, slowed(getattr(dist, name)))
    document = trained(run, tmp_path, 2, global_batch=2, dp=2, shard="dp")
    # two blocks, the embedding and the head: gathered forward, all but the embedding backward; all scattered
    assert document["terms"]["sharding"] > 10 * SLOW_S
    assert document["terms"]["compute"] < document["terms"]["sharding"]


def test_sums_over_copies_of_a_sharded_group_are_reduction(run, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", slowed(dist.all_reduce))
    document = trained(run, tmp_path, 4, global_batch=4, dp=4, shard="2")
    assert document["terms"]["reduction"] > 3 * SLOW_S
    assert document["terms"]["sharding"] > 0
    assert document["terms"]["compute"] < document["terms"]["reduction"]


def test_sums_between_cut_operators_are_tensor(run, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", slowed(dist.all_reduce))
    document = trained(run, tmp_path, 2, global_batch=1, tp=2, dp=1)
    assert document["terms"]["tensor"] > 8 * SLOW_S  # two of a block, there and back
    assert "reduction" not in document["terms"]


class SlowWork:
    def __init__(self, work):
        self._work = work

    def wait(self):
        time.sleep(SLOW_S)
        return self._work.wait()


def test_waiting_for_gradients_is_reduction(run, tmp_path, monkeypatch):
    original = dist.all_reduce

    def late(tensor, *given, async_op=False, **named):
        work = original(tensor, *given, async_op=async_op, **named)
        return SlowWork(work) if async_op else work

    monkeypatch.setattr(dist, "all_reduce", late)
    document = trained(run, tmp_path, 2, global_batch=2, dp=2)
    assert document["terms"]["reduction"] > SLOW_S
    assert "sharding" not in document["terms"]


def test_a_slow_optimizer_is_the_optimizers(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", slowed(torch.optim.AdamW.step))
    document = trained(run, tmp_path, 1, global_batch=1, dp=1)
    assert document["terms"]["optimizer"] > SLOW_S
    assert set(document["terms"]) == {"compute", "optimizer", "host"}


def test_a_pipeline_waits(run, tmp_path):
    document = trained(run, tmp_path, 2, global_batch=2, pp=2, dp=1, schedule="gpipe")
    assert document["stage_ranks"] == [0, 1]
    for terms in document["terms_by_rank"]:
        assert terms["transfer"] > 0
        assert terms["bubble"] > 0


def test_an_emulated_run_has_terms(run, tmp_path):
    plan = plan_of(Request(model=small_model(), cluster=load_cluster("dgx-h100:1").part(2), global_batch=4, pp=2, dp=1))
    (tmp_path / "plan.json").write_text(write_plan(plan))
    ran = run("train", str(tmp_path / "plan.json"), "--local", "2", "--steps", "4", "--emulate", "--json")
    document = json.loads(ran.out)
    assert sum(document["terms"].values()) == pytest.approx(document["step_s"])
    assert document["memory"] == {}
