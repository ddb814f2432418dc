"""`wavetrain plan` and `wavetrain explain` as users type them."""

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest

from wavetrain.cli import main

ASKED = ("gpt3-125m", "dgx-a100", "--global-batch", "32")
KEYS = "schema plan words prediction certificate search_s runner_ups".split()
CERTIFICATE = "schema space evaluated pruned gap cost lower step_s needed_bytes question inner digest".split()
TIGHT = """
name: small
nodes: 1
node:
  name: box
  devices: 2
  host_w: 100
  device:
    name: gizmo
    peak_tflops: {{bf16: 100, fp32: 20}}
    memory_gib: {gib}
    memory_gb_per_s: 500
    efficiency: {{matmul: 0.7, memory: 0.8}}
    idle_w: 10
    busy_w: 90
    limit_w: 100
    usd_per_hour: 0.5
  tiers: [{{name: pcie, size: 2, gb_per_s: 30, latency_us: 5}}]
  network: {{name: ethernet, nics: 1, nic_gbit_per_s: 25, latency_us: 30}}
"""


def planned(run, *options, asked=ASKED, code=0):
    ran = run("plan", *asked, *options, "--json")
    assert ran.code == code, ran.err
    assert all(line.startswith("progress: ") for line in ran.err.splitlines())
    return json.loads(ran.out)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A plan as JSON and as a file; searched for once."""
    file = tmp_path_factory.mktemp("planned") / "plan.json"
    with redirect_stdout(StringIO()) as out:
        assert main(["plan", *ASKED, "-o", str(file), "--json"]) == 0
    return json.loads(out.getvalue()), file.read_text()


@pytest.fixture
def plan_file(written, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(written[1])
    return file


@pytest.fixture
def tight(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(TIGHT.format(gib=6))
    return str(file)


# --- what is found ---


def test_a_plan_for_machines(written):
    found = written[0]
    assert list(found) == KEYS
    assert found["schema"] == "wavetrain.planned/1"
    assert found["plan"]["schema"] == "wavetrain.plan/1"
    assert set(CERTIFICATE) == set(found["certificate"])
    certificate = found["certificate"]
    assert certificate["space"] == certificate["evaluated"] + certificate["pruned"]
    assert certificate["gap"] == 0
    assert certificate["step_s"] == pytest.approx(found["prediction"]["step_s"])
    assert found["prediction"]["fits"]
    assert len(found["runner_ups"]) == 2
    for other in found["runner_ups"]:
        assert other["slower"] > 0
        assert other["fits"]
        assert other["words"] != found["words"]
        assert sum(other["terms"].values()) == pytest.approx(
            other["step_s"] - found["prediction"]["step_s"], abs=0.01 * other["step_s"]
        )


def test_two_searches_print_the_same(run, written):
    texts = [dict(written[0]), planned(run)]
    for found in texts:
        assert found.pop("search_s") > 0
    assert json.dumps(texts[0]) == json.dumps(texts[1])


def test_a_plan_for_people_is_short(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = run("plan", *ASKED)
    assert ran.code == 0
    assert "no plan beats these at once" in run("plan", *ASKED, "--frontier", "--only", "fsdp").out
    lines = ran.out.splitlines()
    assert len(lines) <= 26
    assert max(map(len, lines)) <= 80
    for word in ("tokens/s", "MFU", "memory", "kW", "for 1T tokens", "slower", "gap 0", "wavetrain explain"):
        assert word in ran.out


def test_pins_hold(run):
    layout = planned(run, "--pp", "2", "--schedule", "wave", "--waves", "2", "--recompute", "full")["plan"]["layout"]
    assert (layout["pp"], layout["schedule"], layout["waves"]) == (2, "wave", 2)
    found = planned(run, "--tp", "2", "--sequence-parallel", "--shard", "dp", "--no-keep", "--devices", "4")["plan"]
    assert found["layout"]["tp"] * found["layout"]["dp"] == 4
    assert found["layout"]["sequence_parallel"]
    assert found["choice"]["shard"] == found["layout"]["dp"]
    fsdp = planned(run, "--only", "fsdp")["plan"]
    assert fsdp["choice"]["shard"] == fsdp["layout"]["dp"] == 8


def test_wishes_are_looked_at(run, written):
    assert planned(run, "--objective", "devices")["prediction"]["devices"] == 1
    loose = written[0]["prediction"]
    spare = planned(run, "--headroom", "90%")["prediction"]
    assert spare["peak_bytes"] + spare["reserve_bytes"] <= 0.1 * loose["capacity_bytes"]
    cheap = planned(run, "--objective", "cost", "--timeout", "5")["prediction"]
    assert cheap["usd_per_million_tokens"] <= loose["usd_per_million_tokens"] * (1 + 1e-9)
    eager = planned(run, "--attention", "unfused-torch", "--gradients", "bf16", "--precision", "fp16")["plan"]
    assert eager["stack"]["attention"] == "unfused-torch"
    assert (eager["precision"]["compute"], eager["precision"]["gradients"]) == ("fp16", "bf16")


def test_tokens_are_paid_for(run):
    ran = run("plan", *ASKED, "--tokens", "300B", "--deadline", "300d")
    assert ran.code == 0
    assert "for 300B tokens" in ran.out


def test_the_frontier_on_request(run):
    found = planned(run, "--frontier", "--no-mix")
    assert list(found) == [*KEYS, "frontier"]
    assert found["frontier"][0]["step_s"] == pytest.approx(found["prediction"]["step_s"])


def test_the_largest_batch(run, tight):
    asked = ("gpt3-125m", tight, "--objective", "batch", "--no-mix", "--seq-len", "1024")
    layout = planned(run, asked=asked)["plan"]["layout"]
    assert layout["pp"] == 1
    assert layout["global_batch"] == layout["dp"] * layout["microbatch"]
    more = str(layout["microbatch"] + 1)
    pins = ("--dp", str(layout["dp"]), "--microbatch", more, "--devices", "2")
    ran = run("plan", *asked[:2], *asked[4:], "--global-batch", str(layout["dp"] * int(more)), *pins, "--pp", "1")
    assert ran.code == 3


# --- the file ---


def test_the_file_is_read_back_and_simulated(run, written, plan_file):
    from wavetrain.plan import read_plan

    found, held = written[0], json.loads(plan_file.read_text())
    assert held["certificate"] == found["certificate"]
    assert held["prediction"]["step_s"] == pytest.approx(found["prediction"]["step_s"])
    assert read_plan(plan_file).layout.num_devices == found["prediction"]["devices"]
    ran = run("simulate", str(plan_file), "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["step_s"] == pytest.approx(found["prediction"]["step_s"])


def test_a_certificate_is_proven(run, plan_file):
    ran = run("plan", "--verify", str(plan_file))
    assert ran.code == 0, ran.out
    assert ran.out.startswith("proven")
    assert json.loads(run("plan", "--verify", str(plan_file), "--json").out)["proven"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda plan: plan["layout"].update(microbatch=1), "digest"),
        (lambda plan: plan["certificate"].update(step_s=1e-3), "step_s"),
        (lambda plan: plan["certificate"].update(lower=1.0), "digest"),
        (lambda plan: plan["certificate"].pop("question"), "can't be read"),
        (lambda plan: plan["certificate"]["question"].update(node_devices=0), "can't be read"),
    ],
)
def test_what_was_changed_is_not_proven(run, plan_file, change, says):
    document = json.loads(plan_file.read_text())
    change(document)
    plan_file.write_text(json.dumps(document))
    ran = run("plan", "--verify", str(plan_file), "--json")
    assert ran.code == 5
    found = json.loads(ran.out)
    assert not found["proven"]
    assert any(says in reason for reason in found["reasons"])
    assert run("plan", "--verify", str(plan_file)).out.startswith("NOT proven")


def test_a_certificate_that_is_not_finished_says_what_is_proven(run, tmp_path):
    file = tmp_path / "plan.json"
    planned(run, "--timeout", "0.000001", "-o", str(file))
    ran = run("plan", "--verify", str(file), "--timeout", "30", "--json")
    assert ran.code == 0, ran.out
    found = json.loads(ran.out)
    assert found["proven"]
    assert found["shown_gap"] == pytest.approx(found["gap"])
    assert found["gap"] > 0
    assert f"none is better by more than {found['gap']:.2%}" in " ".join(run("plan", "--verify", str(file)).out.split())


def test_a_proof_that_time_was_up_for_is_none(run, plan_file):
    ran = run("plan", "--verify", str(plan_file), "--timeout", "0.000001", "--json")
    assert ran.code == 5
    found = json.loads(ran.out)
    assert not found["proven"]
    assert not found["rejected"]
    assert found["shown_gap"] > 0
    assert found["reasons"][0].startswith("not shown: a gap of 0")
    ran = run("plan", "--verify", str(plan_file), "--timeout", "0.000001")
    assert ran.out.startswith("NOT proven")
    assert "not shown" in ran.out
    assert run("plan", "--verify", str(plan_file), "--timeout", "-1").code == 2
    assert run("plan", "--verify", str(plan_file), "--tp", "2").code == 2


def test_a_plan_without_certificate_cannot_be_proven(run, plan_file):
    document = json.loads(plan_file.read_text())
    del document["certificate"]
    plan_file.write_text(json.dumps(document))
    ran = run("plan", "--verify", str(plan_file))
    assert ran.code == 2
    assert "has no certificate" in ran.err
    assert run("plan", "gpt3-125m", "--verify", str(plan_file)).code == 2


# --- nothing fits ---


def test_what_does_not_fit_says_by_how_much_and_what_would(run, tight):
    asked = ("gpt3-1.3b", tight, "--global-batch", "4", "--no-mix")
    found = planned(run, asked=asked, code=3)
    assert found["plan"] is None
    least = found["least_bad"]
    assert least["needed_bytes"] - least["capacity_bytes"] == pytest.approx(least["too_much_bytes"], abs=2)
    assert least["too_much_bytes"] > 0
    changes = found["changes"]
    assert 1 <= len(changes) <= 3
    prices = [change["usd_per_million_tokens"] for change in changes]
    assert prices == sorted(prices)
    ran = run("plan", *asked)
    assert ran.code == 3
    assert "too much" in ran.out
    assert changes[0]["change"] in ran.out


def test_a_rule_that_rules_out_everything_is_named(run):
    found = planned(run, "--tp", "5", code=3)
    assert found["least_bad"] is None
    assert "tp 5: must deal out whole heads" in found["reasons"][0]
    assert found["changes"][0]["change"] == "tp free instead of 5"
    both = planned(run, "--tp", "2", "--only", "fsdp", code=3)
    assert len(both["reasons"]) == 2


def test_a_limit_that_is_in_the_way_is_named(run):
    found = planned(run, "--tokens", "1T", "--deadline", "1h", "--no-mix", code=3)
    assert "days, the deadline is 0.0" in found["reasons"][0]
    assert found["least_bad"]["too_much_bytes"] == 0
    assert found["changes"][0]["change"] == "no deadline"


def test_without_time_a_rule_of_thumb_is_better_than_nothing(run):
    found = planned(run, "--timeout", "0.000001")
    assert found["prediction"]["fits"]
    assert found["certificate"]["gap"] > 0


def test_too_little_time_is_not_taken_for_too_little_memory(run):
    """With a pin there is no rule of thumb to fall back on."""
    found = planned(run, "--timeout", "0.000001", "--microbatch", "1", code=3)
    assert found["reasons"] == ["time was up before a plan was found, although some fit"]


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tp", "0"), ("--tp", "0: must be from 1")),
        (("--global-batch", "-4"), ("--global-batch", "-4: must be from 1")),
        (("--schedule", "wavy"), ("--schedule", "nearest: wave")),
        (("--recompute", "ful"), ("--recompute", "nearest: full")),
        (("--shard", "all"), ("--shard", "dp, node, none")),
        (("--only", "fdsp"), ("--only", "nearest: fsdp")),
        (("--objective", "speed"), ("--objective", "throughput, cost, energy, devices, batch")),
        (("--tokens", "1Q"), ("--tokens", "like 1T")),
        (("--tokens", "nan"), ("--tokens",)),
        (("--deadline", "3d"), ("--deadline", "for how many tokens?")),
        (("--headroom", "120%"), ("--headroom", "a share from 0 to 1")),
        (("--power-cap", "5XW"), ("--power-cap", "like 500kW")),
        (("--attention", "flash3"), ("--attention", "nearest: flash2 or flash1")),
        (("--overlap", "all"), ("--overlap", "gradients, tensor, messages, none")),
        (("--precision", "fp8"), ("--precision",)),
        (("--timeout", "-1"), ("--timeout", "seconds")),
        (("--seq-len", "-4"), ("--seq-len",)),
        (("--objective", "batch"), ("--global-batch", "means nothing beside --objective batch")),
    ],
)
def test_what_cannot_be_is_refused(run, options, words):
    ran = run("plan", *ASKED, *options)
    assert ran.code == 2
    assert ran.out == ""
    for word in words:
        assert word in ran.err
    assert "Traceback" not in ran.err


def test_all_that_is_wrong_is_said_at_once(run):
    ran = run("plan", "gpt9", "dgx-a10", "--tp", "0", "--only", "fdsp", "--attention", "flash3", "--tokens", "1Q")
    assert ran.code == 2
    for word in ("gpt9", "dgx-a10", "--global-batch", "--tp", "--only", "--attention", "--tokens"):
        assert word in ran.err
    ran = run("plan")
    assert ran.code == 2
    assert "MODEL" in ran.err
    assert "CLUSTER" in ran.err


# --- explain ---


def test_an_explanation_for_machines_and_people(run, plan_file):
    ran = run("explain", str(plan_file), "--timeout", "0.5", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    keys = "schema words step_s why why_not what_would_change_it how_sure".split()
    assert list(found) == keys
    assert found["why"][-1]["step_s"] == pytest.approx(found["step_s"])
    assert len(found["why_not"]) == 3
    assert found["how_sure"]["gap"] == 0
    assert {flip["what"] for flip in found["what_would_change_it"]} == {"links", "memory", "batch", "seq_len"}
    ran = run("explain", str(plan_file), "--timeout", "0.5")
    for word in ("why this plan", "why not another", "what would change it", "how sure"):
        assert word in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_another_plan_is_compared(run, plan_file):
    found = json.loads(run("explain", str(plan_file), "--instead", "tp=4,pp=1", "--json").out)
    assert [other["name"] for other in found["why_not"]] == ["tp=4,pp=1"]
    assert found["why_not"][0]["slower"] > 0
    assert "tensor" in found["why_not"][0]["terms"]
    for text, says in (("tpp=4", "nearest: tp"), ("tp=x", "whole number"), ("", "like tp=8,pp=1"), ("keep=x", "yes")):
        ran = run("explain", str(plan_file), "--instead", text)
        assert ran.code == 2
        assert says in ran.err


def test_a_plan_by_hand_is_explained(run, tmp_path):
    file = tmp_path / "plan.json"
    flags = ("--model", "gpt3-125m", "--cluster", "dgx-a100", "--global-batch", "32", "--tp", "4", "-o", str(file))
    assert run("simulate", *flags).code == 0
    found = json.loads(run("explain", str(file), "--timeout", "0.5", "--json").out)
    assert found["how_sure"]["gap"] is None
    assert found["how_sure"]["better"]["slower"] < 0


def test_a_certificate_that_is_nonsense_is_refused(run, plan_file):
    document = json.loads(plan_file.read_text())
    document["certificate"]["question"]["node_devices"] = 0
    plan_file.write_text(json.dumps(document))
    ran = run("explain", str(plan_file))
    assert ran.code == 2
    assert "can't be read" in ran.err


# --- what others run ---


def test_megatron_flags_are_scored(run):
    flags = (
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
        "--vocab-size 50257 --micro-batch-size 1 --global-batch-size 32 --tensor-model-parallel-size 4 --bf16"
    )
    ran = run("simulate", "--cluster", "dgx-a100", "--megatron", flags, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["best"]["step_s"] < found["step_s"]
    assert found["best"]["slower"] == pytest.approx(found["step_s"] / found["best"]["step_s"] - 1)
    ran = run("simulate", "--cluster", "dgx-a100", "--megatron", flags)
    assert "best plan found: " in ran.out
    assert "best" not in json.loads(
        run("simulate", "--model", "gpt3-125m", "--cluster", "dgx-a100", "--global-batch", "8", "--json").out
    )
