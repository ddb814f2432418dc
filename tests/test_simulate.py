"""`wavetrain simulate` and `wavetrain validate` as users type them."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLAGS = ("--model", "llama2-7b", "--cluster", "dgx-h100:2", "--global-batch", "64")
KEYS = """
step_s tokens_per_s tokens_per_s_per_device mfu hfu peak_bytes fits memory breakdown bubble_fraction
power_w_per_device tokens_per_joule usd_per_hour usd_per_million_tokens error_band
""".split()


def simulated(run, *options):
    ran = run("simulate", *FLAGS, *options, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_a_prediction_for_machines(run):
    found = simulated(run, "--tp", "2", "--pp", "2", "--waves", "2", "--recompute", "selective")
    assert set(KEYS) <= set(found)
    assert sum(found["breakdown"].values()) == pytest.approx(found["step_s"], rel=1e-9)
    assert sum(found["memory"].values()) == pytest.approx(found["peak_bytes"], abs=20)
    assert found["tokens_per_s"] == pytest.approx(64 * 4096 / found["step_s"])
    assert found["error_band"]["step_s_low"] < found["step_s"] < found["error_band"]["step_s_high"]
    assert 0.2 < found["mfu"] < 0.6
    assert 0 < found["bubble_fraction"] < 0.5


def test_collectives_are_named_as_nccl_would_choose_them(run):
    assert simulated(run, "--tp", "8")["algorithms"] == {"tensor": "nvls", "reduction": "ring"}
    assert simulated(run, "--shard", "dp")["algorithms"] == {"sharding": "ring"}
    assert simulated(run, "--pp", "16")["algorithms"] == {}


def test_a_prediction_for_people_fits_a_terminal(run):
    ran = run("simulate", *FLAGS, "--shard", "dp")
    assert ran.code == 0
    assert "where the time goes" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_a_plan_is_written_read_back_and_predicted_alike(run, tmp_path):
    file = tmp_path / "plan.json"
    by_flags = simulated(run, "--shard", "node", "--microbatch", "2", "-o", str(file))
    ran = run("simulate", str(file), "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out) == by_flags


def test_a_trace_opens_as_a_timeline(run, tmp_path):
    from wavetrain.timeline import read_chrome

    file = tmp_path / "trace.json"
    found = simulated(run, "--pp", "4", "--trace", str(file))
    timeline = read_chrome(file)
    assert timeline.ranks == (0, 1, 2, 3)
    assert timeline.duration_s == pytest.approx(found["step_s"])
    assert max(timeline.peak(rank, "memory_bytes") for rank in timeline.ranks) == pytest.approx(found["peak_bytes"])


def test_what_does_not_fit_is_simulated_and_told_what_would(run):
    flags = ("--model", "llama2-70b", "--cluster", "dgx-h100:8", "--global-batch", "64", "--tp", "4")
    found = json.loads(run("simulate", *flags, "--json").out)
    assert not found["fits"]
    assert found["peak_bytes"] + found["reserve_bytes"] > found["capacity_bytes"]
    assert len(found["remedies"]) == 3
    assert all(remedy["needed_bytes"] <= found["capacity_bytes"] for remedy in found["remedies"])
    ran = run("simulate", *flags)
    assert ran.code == 0
    assert "does NOT fit" in ran.out
    assert found["remedies"][0]["change"].split(",")[0] in ran.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tp", "3"), ("--tp, --pp, --cp", "does not divide the 16 devices", "possible: 1, 2, 4, 8, 16")),
        (("--dp", "3"), ("--dp", "is 3 devices, but the cluster has 16", "possible: 16")),
        (("--tp", "0"), ("--tp", "0: must be from 1")),
        (("--shard", "5"), ("--shard", "must divide dp 16", "1, 2, 4, 8, 16")),
        (("--shard", "all"), ("--shard", "dp, node, none")),
        (("--recompute", "ful"), ("--recompute", "unknown value ful", "nearest: full")),
        (("--attention", "flash3"), ("--attention", "nearest: flash2 or flash1")),
        (("--schedule", "wavy"), ("--schedule", "nearest: wave")),
        (("--cut", "8,8"), ("--cut",)),
        (("--cut", "8;8"), ("--cut", "like 8,8,7,7")),
        (("--pp", "4", "--cut", "8,8,8,7"), ("--cut", "31")),
        (("--global-batch", "60"), ("--global-batch", "60: must be a multiple", "nearest: 48 or 64")),
        (("--precision", "fp4"), ("--precision", "bf16, fp16, fp32, fp8")),
        (("--overlap", "all"), ("--overlap", "gradients, tensor, messages, none")),
        (("--seq-len", "-4"), ("--seq-len",)),
        (("--model", "llama9"), ("llama9", "nearest")),
        (("--cluster", "dgx-h10"), ("dgx-h10", "nearest")),
        (("--pp", "4000", "--dp", "1"), ("--pp", "4000 stages are more than")),
    ],
)
def test_a_layout_that_cannot_exist_is_refused(run, options, words):
    ran = run("simulate", *FLAGS, *options)
    assert ran.code == 2
    assert ran.out == ""
    for word in words:
        assert word in ran.err
    assert "Traceback" not in ran.err


def test_missing_flags_and_flags_beside_a_file_are_named(run, tmp_path):
    ran = run("simulate", "--tp", "2")
    assert ran.code == 2
    for option in ("--model", "--cluster", "--global-batch"):
        assert option in ran.err
    ran = run("simulate", str(tmp_path / "plan.json"), "--tp", "2")
    assert ran.code == 2
    assert "means nothing beside a plan file" in ran.err
    assert run("simulate", str(tmp_path / "plan.json")).code == 2


def test_published_runs_are_validated(run, tmp_path):
    html, page = tmp_path / "report.html", tmp_path / "page.md"
    table = str(ROOT / "validation" / "published.csv")
    ran = run("validate", table, "--json", "--html", str(html), "--markdown", str(page))
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    whole = found["sets"][0]
    keys = "name file rows expressible mape median_ape p90_ape bias memory_mape oom_accuracy spearman regret".split()
    assert set(keys) <= set(whole)
    assert whole["rows"] == whole["expressible"] == len(found["rows"]) >= 60
    assert whole["mape"] < 6
    assert whole["memory_mape"] < 5
    assert {"row_id", "measured_step_s", "predicted_step_s", "predicted_peak_bytes", "fits"} <= set(found["rows"][0])
    assert "<html" in html.read_text()
    assert "published.csv" in page.read_text()


def test_a_file_that_is_no_table_is_refused(run, tmp_path):
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    ran = run("validate", str(file))
    assert ran.code == 2
    assert "lacks the columns row_id, layers" in ran.err
    file.write_text("")
    assert run("validate", str(file)).code == 2
    assert run("validate", str(tmp_path / "none.csv")).code == 2
