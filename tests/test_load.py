"""`wavetrain train --load`: a run that begins with a model of transformers' making."""

import json
import logging
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.conftest import Ran
from torch import nn

from wavetrain.cluster import load_cluster
from wavetrain.model import load_model
from wavetrain.plan import Plan, Request, plan_of
from wavetrain.plan.read import write_plan
from wavetrain.runtime.data import counting, sampling_of

Run = Callable[..., Ran]
Save = Callable[..., None]
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": 61}
WIDE = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "gpt2": transformers.GPT2Config(**SPECIAL, n_embd=32, n_layer=4, n_head=4, n_positions=16),
    "llama": transformers.LlamaConfig(**SPECIAL, **WIDE, intermediate_size=64, max_position_embeddings=16),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pipeline of parts": {"pp": 2, "tp": 2, "schedule": "1f1b"},
    "sharded": {"dp": 2, "shard": "2"},
}


def made(family: str) -> nn.Module:
    """A model whose values, norms and biases too, are none that a run would begin with."""
    torch.manual_seed(5)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(deepcopy(CONFIGS[family])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.fixture
def save(capsys: pytest.CaptureFixture[str]) -> Save:
    """transformers may import what prints on stdout."""

    def save(model: nn.Module, directory: Path, **more: Any) -> None:
        model.save_pretrained(directory, **more)  # type: ignore[operator]
        capsys.readouterr()

    return save


def plan_for(directory: Path, **layout: Any) -> Plan:
    ranks = layout.get("pp", 1) * layout.get("tp", 1) * layout.get("dp", 1)
    request = Request(
        model=load_model(str(directory / "config.json")),
        cluster=load_cluster("dgx-h100:1").part(ranks),
        global_batch=8,
        precision="fp32",
    )
    return plan_of(replace(request, **{"pp": 1, "dp": 1, "tp": 1, **layout}))


def train(run: Run, plan: Plan, folder: Path, *options: str) -> Ran:
    file = folder / "plan.json"
    file.write_text(write_plan(plan))
    ranks = str(plan.layout.num_devices)
    return run("train", str(file), "--local", ranks, "--steps", "1", "--learning-rate", "0", "--json", *options)


def first_loss(model: nn.Module, plan: Plan) -> float:
    """transformers' own, of the tokens that a run without data begins with."""
    batch = counting(sampling_of(plan, seed=0), vocab=61, step=0, microbatch=8)
    with torch.no_grad():
        logits = model(batch.tokens[0]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets[0].flatten()).item()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_begins_with_the_models_own_loss_and_writes_the_same_values(
    run: Run, save: Save, tmp_path: Path, family: str, layout: str
) -> None:
    """In one file or several; a learning rate of 0 leaves all as it was, to the bit."""
    model = made(family)
    given, back = tmp_path / "given", tmp_path / "back"
    save(model, given, max_shard_size="40kB" if layout != "one" else "1GB")
    assert len(list(given.glob("*.safetensors"))) > (layout != "one")
    plan = plan_for(given, **LAYOUTS[layout])
    options = ["--config", str(given / "config.json"), "--load", str(given), "--save", str(back), "-o", str(tmp_path)]
    ran = train(run, plan, tmp_path, *options)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["losses"][0] == pytest.approx(first_loss(model, plan), rel=1e-6)
    assert json.loads((tmp_path / "inputs.json").read_text())["load"] == str(given)
    loaded = type(model).from_pretrained(back)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_half_the_bytes_are_cast(run: Run, save: Save, tmp_path: Path, dtype: torch.dtype) -> None:
    model = made("llama").to(dtype)
    save(model, tmp_path / "given")
    plan = plan_for(tmp_path / "given", dp=2, shard="2")
    ran = train(run, plan, tmp_path, "--load", str(tmp_path / "given"), "--save", str(tmp_path / "back"))
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["losses"][0] == pytest.approx(first_loss(model.float(), plan), rel=1e-6)


def test_a_model_without_its_head_is_the_same_model(run: Run, save: Save, tmp_path: Path) -> None:
    """GPT2Model's names have no `transformer.`, and its head is the embedding."""
    model = made("gpt2")
    save(model.transformer, tmp_path / "given")
    plan = plan_for(tmp_path / "given")
    config = str(tmp_path / "given" / "config.json")
    ran = train(run, plan, tmp_path, "--config", config, "--load", str(tmp_path / "given"))
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["losses"][0] == pytest.approx(first_loss(model, plan), rel=1e-6)


def test_a_checkpoint_wins_and_that_is_said(
    run: Run, save: Save, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = made("llama")
    save(model, tmp_path / "given")
    plan = plan_for(tmp_path / "given")
    kept = ["--checkpoints", str(tmp_path / "kept"), "--load", str(tmp_path / "given")]
    ran = train(run, plan, tmp_path, *kept, "--learning-rate", "0.01")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["losses"][0] == pytest.approx(first_loss(model, plan), rel=1e-6)
    (tmp_path / "given" / "model.safetensors").unlink()  # what is not used is not asked for
    ran = train(run, plan, tmp_path, *kept, "--steps", "2")
    assert ran.code == 0, ran.err
    assert "goes on from it, not from --load" in ran.err
    assert len(json.loads(ran.out)["losses"]) == 1


def test_all_that_does_not_fit_is_told_before_anything_starts(run: Run, save: Save, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = made("gpt2")
    save(model, tmp_path / "given")
    file = tmp_path / "given" / "model.safetensors"
    tensors = load_file(file)
    plan = plan_for(tmp_path / "given")
    options = ["--config", str(tmp_path / "given" / "config.json"), "--load", str(tmp_path / "given")]
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8)}
    save_file(tensors | mask, file)
    ran = train(run, plan, tmp_path, *options)
    assert ran.code == 0, ran.err
    assert "1 tensors that are no parameters are not loaded: transformer.h.0.attn.bias" in ran.err
    short = {"transformer.wpe.weight": torch.ones(15, 32), "transformer.h.1.ln_1.bias": torch.ones(32).to(torch.int32)}
    del tensors["transformer.h.3.mlp.c_fc.bias"]
    save_file(tensors | short | {"adapter.weight": torch.ones(2)}, file)
    ran = train(run, plan, tmp_path, *options)
    assert ran.code == 2
    said = " ".join(ran.err.split())
    assert "transformer.h.3.mlp.c_fc.bias is missing" in said
    assert "transformer.wpe.weight has the shape [15, 32], the model's parameter [16, 32]" in said
    assert "transformer.h.1.ln_1.bias has the format I32" in said
    assert "adapter.weight is no parameter of the model" in said
    ran = train(run, plan, tmp_path, "--emulate", "--load", str(tmp_path))
    assert ran.code == 2
    assert "means nothing beside --emulate" in ran.err


# --- export ---


def test_a_checkpoint_becomes_a_model_that_transformers_and_a_run_read(run: Run, save: Save, tmp_path: Path) -> None:
    """What `--save` writes at the end of a run is what `export` makes of its last checkpoint, to the bit."""
    model = made("gpt2")
    save(model, tmp_path / "given")
    config, kept, out = str(tmp_path / "given" / "config.json"), str(tmp_path / "kept"), tmp_path / "out"
    plan = plan_for(tmp_path / "given", pp=2, tp=2, schedule="1f1b")
    options = ["--config", config, "--checkpoints", kept, "--save", str(tmp_path / "saved")]
    ran = train(run, plan, tmp_path, *options, "--learning-rate", "0.01", "--steps", "2")
    assert ran.code == 0, ran.err
    ran = run("export", kept, "-o", str(out), "--config", config, "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert (document["schema"], document["step"]) == ("wavetrain.export.model/1", 2)
    assert document["files"] == ["model.safetensors"]
    theirs, ours = (type(model).from_pretrained(tmp_path / name).state_dict() for name in ("saved", "out"))
    assert theirs.keys() == ours.keys() == model.state_dict().keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    one = plan_for(tmp_path / "given")
    ran = train(run, one, tmp_path, "--config", config, "--load", str(out))
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["losses"][0] == pytest.approx(
        first_loss(type(model).from_pretrained(out), one), rel=1e-6
    )


def test_exports_that_mean_nothing_are_refused(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    for arguments, word in (
        ([str(tmp_path)], "--output"),
        ([str(tmp_path), "-o", str(tmp_path / "x"), "--to", "megatron"], "possible: transformers"),
        ([str(tmp_path), "-o", str(tmp_path / "x")], "has no checkpoint"),
        ([str(plan)], "--to"),
        ([str(plan), "--to", "megatron", "--config", str(plan)], "means nothing beside a plan file"),
        ([str(tmp_path / "nowhere"), "--to", "megatron"], "No such file"),
    ):
        ran = run("export", *arguments)
        assert ran.code == 2, arguments
        assert word in ran.err
        assert "Traceback" not in ran.err
