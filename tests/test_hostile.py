"""Files of strangers, given to a run: refused with 2 and a reason; nothing is executed, time and memory are bounded."""

import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.conftest import Ran
from tests.runtime.crafted import Trap, facts, tensor_file
from tests.runtime.plans import small_plan

from wavetrain.plan.read import write_plan
from wavetrain.runtime.checkpoint import begin, publish, step_name
from wavetrain.runtime.imported import INDEX, SINGLE
from wavetrain.runtime.manifest import MANIFEST, Manifest
from wavetrain.runtime.tensorfile import Entry, write_shard

Run = Callable[..., Ran]
Write = Callable[[Path, Path], None]  # given where, and a file that exists as soon as a pickle is loaded

SECONDS = 30.0
MIB = 1 << 20
PLAN = json.loads(write_plan(small_plan(pp=2, microbatches=4, blocks=8, vocab=256)))


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


@contextmanager
def bounded(most_bytes: int = 400 * MIB) -> Iterator[None]:
    """Neither long nor much."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before, begun = resident("VmRSS:"), time.monotonic()
    yield
    assert time.monotonic() - begun < SECONDS
    assert resident("VmHWM:") - before < most_bytes


def changed(*keys: Any, to: Any) -> str:
    """The plan with one value another."""
    plan = json.loads(json.dumps(PLAN))
    inner = plan
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return json.dumps(plan)


def train(run: Run, folder: Path, *options: str, plan: Path | None = None) -> Ran:
    file = plan or folder / "plan.json"
    if plan is None:
        file.write_text(json.dumps(PLAN))
    with bounded():
        return run("train", str(file), "--local", "2", "--steps", "1", *options)


def refused(ran: Ran, mark: Path, said: str) -> None:
    assert ran.code == 2, ran.err
    assert ran.err.startswith("error: ")
    assert said in " ".join(ran.err.split())
    assert "Traceback" not in ran.err
    assert ran.err.replace("\n", "").isprintable()
    assert ran.out == ""
    assert not mark.exists()


# --- plans ---

SEQ_LEN = '"seq_len": '
LAYERS = ("model", "architecture", "layers", 0, "count")
PLANS: dict[str, tuple[str, str | bytes, str]] = {
    "of 5 MiB": ("plan.json", "[" + " " * 5 * MIB + "]", "4 MiB"),
    "with aliases": ("plan.yaml", "schema: &a [x]\nlayout: [*a, *a]\n", "alias"),
    "with a tag": ("plan.yaml", "schema: !!python/object/apply:os.system ['true']\n", "tag"),
    "of 300,000 values": ("plan.json", "[" + "0," * 300_000 + "0]", "values"),
    "too deep": ("plan.json", "[" * 100_000, "nest"),
    "of 10^9 layers": ("plan.json", changed(*LAYERS, to=10**9), "1,000,000,000 layers"),
    "of 10^9 equal layers in a row": ("plan.json", changed("model", "order", 1, "count", to=10**9), "counts in order"),
    "of 10^9 microbatches": ("plan.json", changed("layout", "global_batch", to=10**9), "more than"),
    "of 10^9 ranks": ("plan.json", changed("layout", "pp", to=10**9), "layout.pp"),
    "that is not a number": ("plan.json", changed("seq_len", to=float("nan")), "seq_len"),
    "that is infinite": ("plan.json", changed("layout", "microbatch", to=float("inf")), "microbatch"),
    "of a number of 5,000 digits": ("plan.json", json.dumps(PLAN).replace(SEQ_LEN, SEQ_LEN + "9" * 5000), "seq_len"),
    "with a control character": ("plan.json", changed("recompute", to="\x1b[2J"), "recompute"),
    "with a path for a schedule": ("plan.json", changed("layout", "schedule", to="../../etc/passwd"), "schedule"),
    "of bytes": ("plan.json", b"\x80\x04\x95", "UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_crafted_plan(run: Run, tmp_path: Path, name: str) -> None:
    file, text, said = PLANS[name]
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(train(run, tmp_path, plan=tmp_path / file), tmp_path / "mark", said)


def test_a_plan_that_is_a_pickle_or_a_pipe(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(pickle.dumps(Trap(tmp_path / "mark")))
    refused(train(run, tmp_path, plan=tmp_path / "plan.json"), tmp_path / "mark", "plan.json")
    os.mkfifo(tmp_path / "pipe.json")
    refused(train(run, tmp_path, plan=tmp_path / "pipe.json"), tmp_path / "mark", "regular file")


def test_a_name_in_a_plan_leads_nowhere(run: Run, tmp_path: Path) -> None:
    """Names are for people: no file is named by them, and a terminal is not told anything."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "plan.json").write_text(changed("model", "name", to="../../../x\x1b[2J/y"))
    ran = train(run, tmp_path, "-o", str(tmp_path / "out"), plan=tmp_path / "in" / "plan.json")
    assert ran.code in (0, 2)
    assert "\x1b[2J" not in ran.out + ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) in (["in"], ["in", "out"])


# --- datasets ---


def header(**facts_of: Any) -> str:
    return json.dumps({"schema": "wavetrain.tokens/1", "dtype": "uint16", "vocab": 256, "count": 500, **facts_of})


def dataset(name: str, content: bytes, told: str | None) -> Write:
    def write(folder: Path, _: Path) -> None:
        (folder / name).write_bytes(content)
        if told is not None:
            (folder / name).with_suffix(".json").write_text(told)

    return write


def piped(folder: Path, _: Path) -> None:
    os.mkfifo(folder / "data.bin")
    (folder / "data.json").write_text(header())


def pickled(folder: Path, mark: Path) -> None:
    trap = pickle.dumps(Trap(mark))
    (folder / "data.bin").write_bytes(trap)
    (folder / "data.json").write_bytes(trap)


def looped(folder: Path, _: Path) -> None:
    (folder / "data.bin").symlink_to(folder / "data.bin")
    (folder / "data.json").write_text(header())


DATA: dict[str, tuple[Write, str]] = {
    "whose count is more than the file": (dataset("data.bin", bytes(1000), header(count=10**12)), "count"),
    "of 10^30 tokens": (dataset("data.bin", bytes(1000), header(count=10**30)), "count"),
    "of objects": (dataset("data.bin", bytes(1000), header(dtype="object")), "dtype"),
    "of a larger vocabulary": (dataset("data.bin", bytes(1000), header(vocab=60_000)), "vocabulary"),
    "without a header": (dataset("data.bin", bytes(1000), None), "data.json"),
    "with a header of 5 MiB": (dataset("data.bin", bytes(1000), " " * 5 * MIB), "4 MiB"),
    "that is a pipe": (piped, "regular file"),
    "that is a pickle": (pickled, "data.json"),
    "that is a link to itself": (looped, "symbolic links"),
}


@pytest.mark.parametrize("name", DATA)
def test_a_crafted_dataset(run: Run, tmp_path: Path, name: str) -> None:
    write, said = DATA[name]
    write(tmp_path, tmp_path / "mark")
    refused(train(run, tmp_path, "--data", str(tmp_path / "data.bin")), tmp_path / "mark", said)


# --- checkpoints ---


def stepped(folder: Path) -> Path:
    path = folder / step_name(0)
    path.mkdir(parents=True)
    return path


def pickled_manifest(folder: Path, mark: Path) -> None:
    (stepped(folder) / MANIFEST).write_bytes(pickle.dumps(Trap(mark)))


def piped_manifest(folder: Path, _: Path) -> None:
    os.mkfifo(stepped(folder) / MANIFEST)


def huge_manifest(folder: Path, _: Path) -> None:
    with (stepped(folder) / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk


def linked_step(folder: Path, _: Path) -> None:
    folder.mkdir()
    (folder.parent / "elsewhere").mkdir()
    (folder / step_name(0)).symlink_to(folder.parent / "elsewhere")


def another_run(folder: Path, _: Path) -> None:
    writing = begin(folder, step=0)
    shard = write_shard(writing, 0, [Entry("w", "value", (2,), (((0, 2),),), torch.ones(2))])
    publish(writing, Manifest(run="another", step=0, plan_hash="p", shards=(shard,)))


def a_file(folder: Path, _: Path) -> None:
    folder.write_text("not a folder")


CHECKPOINTS: dict[str, tuple[Write, str]] = {
    "with a pickle for a manifest": (pickled_manifest, "must end with its own SHA-256"),
    "with a pipe for a manifest": (piped_manifest, "regular file"),
    "with a manifest of a terabyte": (huge_manifest, "at most 64 MiB"),
    "that is a link": (linked_step, "symbolic link"),
    "of another run": (another_run, "is of another run"),
    "that is a file": (a_file, "Not a directory"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_crafted_directory_of_checkpoints(run: Run, tmp_path: Path, name: str) -> None:
    write, said = CHECKPOINTS[name]
    write(tmp_path / "kept", tmp_path / "mark")
    ran = train(run, tmp_path, "--checkpoints", str(tmp_path / "kept"))
    refused(ran, tmp_path / "mark", said)
    ran = run("export", str(tmp_path / "kept"), "-o", str(tmp_path / "out"))
    if name != "of another run":  # which is a good one, for whoever asks for it
        assert ran.code == 2
        assert "Traceback" not in ran.err
        assert not (tmp_path / "mark").exists()


def test_a_checkpoint_of_this_run_with_a_crafted_shard(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its bytes are read by a rank, so the run has begun and ends with 4; nothing is executed."""
    kept, mark = tmp_path / "kept", tmp_path / "mark"
    assert train(run, tmp_path, "--checkpoints", str(kept)).code == 0
    shard = next((kept / step_name(1)).glob("*.safetensors"))
    shard.write_bytes(pickle.dumps(Trap(mark)))
    with bounded():
        ran = run("train", str(tmp_path / "plan.json"), "--local", "2", "--steps", "2", "--checkpoints", str(kept))
    assert ran.code == 4
    assert "has no good checkpoint, only bad ones: bad-step-00000001-1" in caplog.text
    assert "Traceback" not in ran.err
    assert not mark.exists()


# --- models ---


def pickled_model(folder: Path, mark: Path) -> None:
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(mark)))


def disguised_model(folder: Path, mark: Path) -> None:
    folder.mkdir()
    (folder / SINGLE).write_bytes(pickle.dumps(Trap(mark)))


def endless_header(folder: Path, _: Path) -> None:
    folder.mkdir()
    (folder / SINGLE).write_bytes(tensor_file({"w": facts()}, length=1 << 62))


def endless_tensor(folder: Path, _: Path) -> None:
    """A terabyte of nothing, which takes no room on the disk."""
    folder.mkdir()
    size = 1 << 40
    with (folder / SINGLE).open("wb") as file:
        file.write(tensor_file({"w": facts(shape=(size // 4,), offsets=(0, size))}, b""))
        file.truncate(file.tell() + size)


def outside(folder: Path, _: Path) -> None:
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder.parent / "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))


def linked_model(folder: Path, _: Path) -> None:
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder.parent / "x.safetensors")
    (folder / SINGLE).symlink_to(folder.parent / "x.safetensors")


def piped_model(folder: Path, _: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / SINGLE)


MODELS: dict[str, tuple[Write, str]] = {
    "of a pickle": (pickled_model, "only safetensors are read"),
    "of a pickle by another name": (disguised_model, "no safetensors file"),
    "of an endless header": (endless_header, "a header of"),
    "of an endless tensor": (endless_tensor, "is no parameter of the model"),
    "whose index leads elsewhere": (outside, "in the same directory"),
    "that is a link": (linked_model, "symbolic link"),
    "that is a pipe": (piped_model, "regular file"),
    "that is not there": (lambda *_: None, "No such file"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_crafted_model(run: Run, tmp_path: Path, name: str) -> None:
    write, said = MODELS[name]
    write(tmp_path / "model", tmp_path / "mark")
    refused(train(run, tmp_path, "--load", str(tmp_path / "model")), tmp_path / "mark", said)


# --- transformers' configurations ---

BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 256}
BERT |= {"intermediate_size": 64}
REMOTE = {"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}
CONFIGS: dict[str, tuple[str, str]] = {
    "too deep": ("[" * 100_000, "nest"),
    "of 10^9 layers": (json.dumps(BERT | {"num_hidden_layers": 10**9}), "num_hidden_layers"),
    "of 10^9 positions": (json.dumps(BERT | {"max_position_embeddings": 10**9}), "has no such parameter"),
    "with code of its own": (json.dumps(BERT | REMOTE), "no such model"),
    "of a list": (json.dumps(BERT | {"model_type": ["bert"]}), "no such model"),
    "that is not a number": (json.dumps(BERT | {"hidden_size": float("nan")}), "hidden_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_crafted_config(run: Run, tmp_path: Path, name: str) -> None:
    text, said = CONFIGS[name]
    (tmp_path / "config.json").write_text(text)
    ran = train(run, tmp_path, "--config", str(tmp_path / "config.json"))
    refused(replace(ran, out=""), tmp_path / "mark", said)


def test_a_config_that_is_a_pipe(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    refused(train(run, tmp_path, "--config", str(tmp_path / "config.json")), tmp_path / "mark", "regular file")


def test_the_trap_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()
