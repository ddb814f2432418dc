"""`wavetrain train`, as users call it."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Ran
from tests.runtime.plans import small_model, small_plan
from tests.soak import often, sample

from wavetrain.cluster import load_cluster
from wavetrain.model import load_model
from wavetrain.plan import Plan, Request, plan_of
from wavetrain.plan.read import write_plan
from wavetrain.runtime.logs import read_steps
from wavetrain.schedule import parse_text
from wavetrain.timeline.chrome import read_chrome

Run = Callable[..., Ran]


def plan_file(tmp_path: Path, plan: Plan) -> str:
    path = tmp_path / "plan.json"
    path.write_text(write_plan(plan))
    return str(path)


def test_trains_and_says_what_happened(run: Run, tmp_path: Path) -> None:
    file = plan_file(tmp_path, small_plan(pp=2, waves=2, microbatches=4, blocks=8))
    ran = run("train", file, "--local", "2", "--steps", "12", "-o", str(tmp_path / "run"), "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["schema"] == "wavetrain.train/1"
    assert len(document["losses"]) == 12
    assert document["losses"][0] == pytest.approx(math.log(61), rel=0.1)
    assert document["losses"][-1] < document["losses"][0] - 0.1
    assert 0 < document["replayed"]["step_s"] <= document["timeline_s"] + 1e-6  # no transfer: never longer
    actions = parse_text((tmp_path / "run" / "actions.txt").read_text(), file="actions.txt")
    measured = read_chrome(tmp_path / "run" / "measured.json")
    for rank, row in enumerate(actions.ranks):
        computed = tuple(str(action) for action in row if "SEND" not in str(action) and "RECV" not in str(action))
        assert measured.order(rank, "compute") == computed
    assert read_chrome(tmp_path / "run" / "replayed.json").ranks == (0, 1)
    assert "replayed" in (tmp_path / "run" / "timelines.svg").read_text()
    assert set(document["files"]) <= {str(path) for path in (tmp_path / "run").iterdir()}


def test_every_layout_trains_to_the_same_losses(run: Run, tmp_path: Path) -> None:
    """Initial values and data do not depend on the layout; a step's gradient sums differ by order only."""
    losses = []
    for pp, schedule, waves in ((1, "1f1b", None), (2, "1f1b", None), (2, "wave", 2), (2, "wave-zb", 1)):
        plan = small_plan(pp=pp, schedule=schedule, waves=waves, microbatches=4, blocks=8, tied=True)
        ran = run("train", plan_file(tmp_path, plan), "--local", str(pp), "--steps", "5", "--json")
        assert ran.code == 0, ran.err
        losses.append(json.loads(ran.out)["losses"])
    assert losses[0] == losses[1] == losses[2] == losses[3]


def test_any_text_is_learnt(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the same words again and again, " * 200)
    file = plan_file(tmp_path, small_plan(pp=2, microbatches=4, blocks=8, vocab=256))
    ran = run("train", file, "--local", "2", "--steps", "12", "--data", str(text), "--learning-rate", "0.01", "--json")
    assert ran.code == 0, ran.err
    losses = json.loads(ran.out)["losses"]
    assert losses[-1] < losses[0] - 1


def test_data_that_does_not_fit_the_model_is_refused(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("too short")
    for plan, word in ((small_plan(vocab=61), "256"), (small_plan(vocab=256), "17")):
        ran = run("train", plan_file(tmp_path, plan), "--local", "2", "--data", str(text))
        assert ran.code == 2
        assert word in ran.err


def test_two_copies_of_a_model_have_one_loss(run: Run, tmp_path: Path) -> None:
    """Chimera's chains end on two ranks; the step's loss is the sum of what both add."""
    found = []
    for schedule in ("1f1b", "chimera"):
        plan = replace(small_plan(pp=2, schedule="1f1b", microbatches=4, blocks=8))
        plan = replace(plan, layout=replace(plan.layout, schedule=schedule))
        ran = run("train", plan_file(tmp_path, plan), "--local", "2", "--steps", "1", "--json")
        assert ran.code == 0, ran.err
        found.append(json.loads(ran.out)["losses"][0])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_models_without_modules_are_refused_before_anything_starts(run: Run, tmp_path: Path) -> None:
    plan = small_plan(pp=2, microbatches=4, blocks=8, family="bloom")
    ran = run("train", plan_file(tmp_path, plan), "--local", "2")
    assert ran.code == 2
    assert "bloom" in ran.err
    assert "possible" in ran.err


def test_emulates_what_was_predicted(run: Run, tmp_path: Path) -> None:
    file = plan_file(tmp_path, small_plan(pp=4, waves=1, microbatches=4, blocks=8, hidden=512, seq_len=512))
    ran = run("train", file, "--local", "4", "--steps", "3", "--emulate", "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["losses"] == []
    assert document["emulated"] is True
    assert document["timeline_s"] >= document["predicted"]["step_s"]  # every action waits its time at least


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--local", "torchrun", "try: --local 2"]),
        (["--local", "3"], ["--local", "3: the plan runs on 2 ranks", "possible: 2"]),
        (["--local", "0", "--steps", "-1"], ["--local", "--steps", "must be from 1"]),
        (["--local", "2", "--transport", "memry"], ["--transport", "nearest: memory"]),
        (["--local", "2", "--hang-floor", "nan"], ["--hang-floor", "must be from"]),
        (["--local", "2", "--emulate", "--seed", "3"], ["--seed", "means nothing beside --emulate"]),
    ],
)
def test_bad_options_are_explained(run: Run, tmp_path: Path, options: list[str], words: list[str]) -> None:
    ran = run("train", plan_file(tmp_path, small_plan()), *options)
    assert ran.code == 2
    assert ran.out == ""
    for word in words:
        assert word in ran.err
    assert "Traceback" not in ran.err


def test_layouts_that_the_runtime_does_not_run_are_refused(run: Run, tmp_path: Path) -> None:
    plan = small_plan(schedule="zb-h1", recompute="selective")
    ran = run("train", plan_file(tmp_path, plan), "--local", "2")
    assert ran.code == 2
    assert "recompute" in ran.err
    assert "possible: none, full" in ran.err
    plan = small_plan()
    plan = replace(plan, layout=replace(plan.layout, pp=1, cp=2, schedule="1f1b"), cut=(8,))
    ran = run("train", plan_file(tmp_path, plan), "--local", "2")
    assert ran.code == 2
    assert "layout.cp" in ran.err


def test_full_recomputation_gives_the_same_losses(run: Run, tmp_path: Path) -> None:
    losses = []
    for recompute in ("none", "full"):
        file = plan_file(tmp_path, small_plan(recompute=recompute))
        ran = run("train", file, "--local", "2", "--steps", "3", "--json")
        assert ran.code == 0, ran.err
        losses.append(json.loads(ran.out)["losses"])
    assert losses[0] == losses[1]


# --- replicas, parts, and everything at once ---


def composed_plan(*, pp: int = 1, dp: int = 1, tp: int = 1, precision: str = "fp32", **more: Any) -> Plan:
    return plan_of(
        Request(
            model=small_model(blocks=4, tied=True),
            cluster=load_cluster("dgx-h100:1").part(pp * dp * tp),
            global_batch=8,
            pp=pp,
            dp=dp,
            tp=tp,
            precision=precision,
            **more,
        )
    )


def losses_of(run: Run, tmp_path: Path, plan: Plan, *options: str, steps: int = 5) -> list[float]:
    ranks = str(plan.layout.num_devices)
    ran = run("train", plan_file(tmp_path, plan), "--local", ranks, "--steps", str(steps), "--json", *options)
    assert ran.code == 0, ran.err
    losses: list[float] = json.loads(ran.out)["losses"]
    return losses


def test_replicas_parts_and_shards_train_to_the_same_losses(run: Run, tmp_path: Path) -> None:
    one = losses_of(run, tmp_path, composed_plan())
    layouts: list[dict[str, Any]] = [
        {"dp": 2},
        {"dp": 2, "shard": "2", "recompute": "full"},
        {"tp": 2, "dp": 2, "sequence_parallel": True, "recompute": "selective"},
        {"pp": 2, "dp": 2, "tp": 2, "schedule": "wave", "shard": "2"},
    ]
    for layout in layouts:
        assert losses_of(run, tmp_path, composed_plan(**layout)) == pytest.approx(one, rel=1e-5), layout


def test_bf16_stays_near_fp32(run: Run, tmp_path: Path) -> None:
    """Eight bits of mantissa: a loss of 4 is known to some hundredths."""
    exact = losses_of(run, tmp_path, composed_plan(pp=2, dp=2, schedule="1f1b"))
    rough = losses_of(run, tmp_path, composed_plan(pp=2, dp=2, schedule="1f1b", precision="bf16", shard="2"))
    assert rough == pytest.approx(exact, abs=0.03)
    assert rough != pytest.approx(exact, abs=1e-6)  # it did compute in bf16


CONFIGS = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16},
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("family", sample(CONFIGS, 1))
def test_models_of_transformers_train_in_three_dimensions(run: Run, tmp_path: Path, family: str) -> None:
    """Fifty steps with the curve of one process; the saved model is transformers' own."""
    import torch
    import transformers

    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS[family] | special | {"model_type": family, "vocab_size": 61}))
    request = Request(
        model=load_model(str(config)), cluster=load_cluster("dgx-h100:1").part(8), global_batch=8, precision="fp32"
    )
    three = plan_of(replace(request, pp=2, dp=2, tp=2, schedule="wave", shard="2"))
    one = plan_of(replace(request, cluster=request.cluster.part(1), pp=1, dp=1, tp=1))
    options = ["--config", str(config), "--learning-rate", "0.003", "--lr-schedule", "cosine", "--warmup", "5"]
    curves = [
        losses_of(run, tmp_path, plan, *options, "--save", str(tmp_path / name), steps=often(50, 8))
        for plan, name in ((one, "one"), (three, "three"))
    ]
    assert curves[0][-1] < curves[0][0] - 0.2
    assert curves[1] == pytest.approx(curves[0], rel=2e-4)
    kind = getattr(transformers, CONFIGS[family]["architectures"][0])  # type: ignore[index]
    loaded = [kind.from_pretrained(tmp_path / name).eval() for name in ("one", "three")]
    state = loaded[0].state_dict()
    for name, value in loaded[1].state_dict().items():
        assert torch.allclose(value, state[name], atol=2e-3), name
    tokens = torch.arange(16)[None]
    assert torch.allclose(loaded[0](tokens).logits, loaded[1](tokens).logits, atol=2e-2)
    assert (tmp_path / "three" / "model.safetensors.index.json").exists()


def test_a_users_own_module_trains(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from wavetrain.model.traced import trace

    (tmp_path / "my_model.py").write_text(
        "from torch import nn\n\n\ndef build():\n"
        "    return nn.Sequential(nn.Embedding(61, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 61))\n"
    )
    monkeypatch.chdir(tmp_path)
    from importlib import import_module

    monkeypatch.syspath_prepend(str(tmp_path))
    model = trace(import_module("my_model").build(), torch.zeros(2, 16, dtype=torch.int64))
    request = Request(
        model=model, cluster=load_cluster("dgx-h100:1").part(2), global_batch=4, dp=2, shard="2", precision="fp32"
    )
    plan = plan_of(request)
    losses = losses_of(run, tmp_path, plan, "--module", "my_model:build", "--learning-rate", "0.05", steps=20)
    assert losses[-1] < losses[0] - 0.5
    options = ("--module", "my_model:build", "--learning-rate", "0.05", "--steps", "20", "--json")
    alone = run("train", plan_file(tmp_path, plan), "--local", "1", "--replan", *options)
    assert json.loads(alone.out)["losses"] == pytest.approx(losses, rel=1e-5)
    for wrong, words in (("my_model", "package:function"), ("my_model:nothing", "can't be imported")):
        ran = run("train", plan_file(tmp_path, plan), "--local", "2", "--module", wrong)
        assert ran.code == 2
        assert words in ran.err


def test_another_model_than_the_plans_is_refused(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["gpt2"] | {"model_type": "gpt2", "vocab_size": 61}))
    ran = run("train", plan_file(tmp_path, composed_plan(dp=2)), "--local", "2", "--config", str(config))
    assert ran.code == 2
    assert "has no such parameter" in ran.err


def test_a_memory_limit_is_kept_or_the_run_ends_with_reasons(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = composed_plan(dp=2, shard="2")
    ran = run("train", plan_file(tmp_path, plan), "--local", "2", "--memory-limit", "0.0001")
    assert ran.code == 4
    assert re.search(r"rank \d holds .* before the first step, .* more than its limit of .* alone takes", caplog.text)
    assert losses_of(run, tmp_path, plan, "--memory-limit", "0.1", steps=1)


def test_a_loss_that_is_no_number_ends_the_run(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = plan_file(tmp_path, composed_plan(dp=2, pp=2, schedule="1f1b"))
    ran = run("train", file, "--local", "4", "--learning-rate", "10", "--clip", "0", "--steps", "60")
    assert ran.code == 4, ran.out
    assert re.search(r"step \d+: the loss is .* the gradient of \S+ on rank [23] is not finite", caplog.text)


def test_a_killed_run_is_restarted_from_its_checkpoint(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = plan_file(tmp_path, composed_plan(pp=2, dp=2, schedule="wave", shard="2"))
    options = ["train", file, "--local", "4", "--steps", "6", "--checkpoints", str(tmp_path / "kept"), "--json"]
    ran = run(*options, "--save-every", "2", "--restarts", "1", "--inject", "kill:1:3:backward")
    assert ran.code == 0, caplog.text
    document = json.loads(ran.out)
    assert document["restarts"] == 1
    assert len(document["losses"]) == 4  # after the two that were saved
    assert "rank 1 was killed" in caplog.text
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-00000004", "step-00000006"]
    ran = run("train", file, "--local", "4", "--restarts", "1")
    assert ran.code == 2
    assert "means nothing without --checkpoints" in ran.err


def test_a_run_in_memory_alone_survives_a_kill(run: Run, tmp_path: Path) -> None:
    file = plan_file(tmp_path, small_plan(pp=2, waves=2, microbatches=4, blocks=8))
    words = ("train", file, "--local", "2", "--steps", "6", "--json")
    expected = json.loads(run(*words).out)
    kept = ("--memory-every", "1", "--memory-dir", str(tmp_path / "memory"), "--restarts", "1")
    ran = run(*words, *kept, "--inject", "kill:1:4:backward", "-o", str(tmp_path / "out"))
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["restarts"] == 1
    assert [done.loss for done in read_steps(tmp_path / "out" / "log.jsonl")] == expected["losses"]
    assert not list((tmp_path / "memory").iterdir())


def test_a_run_that_is_done_is_done(run: Run, tmp_path: Path) -> None:
    """A launcher may start it again; fewer steps than it has are a mistake."""
    file = plan_file(tmp_path, small_plan(pp=2, waves=2, microbatches=4, blocks=8))
    words = ("train", file, "--local", "2", "--checkpoints", str(tmp_path / "kept"), "--steps")
    assert run(*words, "3").code == 0
    again = run(*words, "3", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["already_done"] is True
    assert "nothing left to do: 3 steps are done" in run(*words, "3").out
    fewer = run(*words, "2")
    assert fewer.code == 2
    assert "has 3 steps already" in fewer.err


def test_another_number_of_ranks_is_planned_again(run: Run, tmp_path: Path) -> None:
    plan = small_plan(pp=2, waves=1, microbatches=4, blocks=8)
    file = plan_file(tmp_path, plan)
    refused = run("train", file, "--local", "1", "--steps", "3")
    assert refused.code == 2
    assert "--replan" in refused.err
    losses = [
        json.loads(run("train", file, "--local", ranks, "--replan", "--steps", "3", "--json").out)["losses"]
        for ranks in ("2", "1")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    more = run("train", file, "--local", "4", "--replan", "--steps", "3")
    assert more.code == 2
    assert "has 2 devices, and this run 4 ranks" in more.err
