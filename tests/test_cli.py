import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHORT = "layers: 4\nhidden: 64\nheads: 4\nvocab: 100\nseq_len: 32\n"


def test_a_model_for_people(run):
    ran = run("describe", "llama2-7b")
    assert ran.code == 0
    assert "6,738,415,616" in ran.out
    assert "self_attn.q_proj" in ran.out
    assert ran.err == ""
    assert max(map(len, ran.out.splitlines())) <= 80


def test_a_model_for_machines(run):
    document = json.loads(run("describe", "tiny-moe", "--json", "--microbatch", "2", "--seq-len", "64").out)
    assert document["schema"] == "wavetrain.description.model/1"
    assert document["work"] == {"seq_len": 64, "microbatch": 2, "dtype": "bf16", "attention": "fused"}
    total = sum(layer["count"] * layer["num_parameters"] for layer in document["layers"])
    assert total == document["num_parameters"] > document["num_active_parameters"]
    operators = [operator for layer in document["layers"] for operator in layer["operators"]]
    flops = sum(layer["count"] * layer["forward_flops"] for layer in document["layers"])
    assert flops == document["forward_flops"]
    assert {"kind", "tensor_axis", "tensor_units", "slices", "saved_bytes", "output_bytes"} <= set(operators[0])


def test_a_cluster_for_people_and_machines(run):
    assert "256 in 32 nodes" in run("describe", "dgx-h100:32").out
    document = json.loads(run("describe", "dgx-h100:32", "--json").out)
    assert document["num_devices"] == 256
    assert document["tiers"][1]["bytes_per_s"] == 50e9
    assert all(source["citation"] for source in document["sources"])


def test_files_are_told_apart_by_their_keys(run, tmp_path):
    (tmp_path / "m.yaml").write_text(SHORT)
    (tmp_path / "c.yaml").write_text("nodes: 2\nnode: dgx-a100\n")
    (tmp_path / "x.yaml").write_text("colour: red\nlayer: 4\n")
    assert json.loads(run("describe", str(tmp_path / "m.yaml"), "--json").out)["kind"] == "model"
    assert json.loads(run("describe", str(tmp_path / "c.yaml"), "--json").out)["kind"] == "cluster"
    neither = run("describe", str(tmp_path / "x.yaml"))
    assert neither.code == 2
    assert "neither a model" in neither.err
    assert "nearest: layers" in neither.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["describe", "lama2-7b"], "llama2-7b"),
        (["describe", "dgx-h100:0"], "number of nodes"),
        (["describe", "nowhere/model.yaml"], "no such file"),
        (["describe", "llama2-7b", "--dtype", "bf61"], "nearest: bf16"),
        (["describe", "llama2-7b", "--attention", "flash"], "possible: fused, unfused"),
        (["describe", "llama2-7b", "--microbatch", "0"], "microbatch"),
        (["describe", "llama2-7b", "--seq-len", "-5"], "seq_len"),
        (["describe", "examples/short.yaml", "--seq-len", "-5"], "seq_len"),
        (["describe", "examples/short.yaml", "--seq-len", "0"], "seq_len"),
        (["describe", "dgx-a100:2", "--seq-len", "5"], "an option for models"),
        (["describe", "dgx-a100:2", "--dtype", "fp8"], "an option for models"),
        (["describe", "h100"], "nearest: h100-"),
        (["describe"], "Missing argument"),
        (["describe", "llama2-7b", "--jsn"], "--json"),
        (["descibe"], "describe"),
        (["describe", "a\x1b[2Jb"], "\\x1b"),
        (["describe", "x" * 5000], "no such file"),
        (["describe", "a\x00b"], "no "),
    ],
)
def test_bad_arguments_end_with_2(run, arguments, says, monkeypatch):
    monkeypatch.chdir(ROOT)
    ran = run(*arguments)
    assert ran.code == 2
    assert says in ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert "\x1b[2J" not in ran.err


def test_the_installed_command_has_exit_codes():
    command = [sys.executable, "-m", "wavetrain", "describe", "lama2-7b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: lama2-7b")
    assert "Traceback" not in done.stderr


def test_a_pipe_is_not_waited_for(run, tmp_path):
    os.mkfifo(tmp_path / "f.yaml")
    ran = run("describe", str(tmp_path / "f.yaml"))
    assert ran.code == 2
    assert "regular file" in ran.err


def test_a_terminal_without_the_letters_gets_escapes(tmp_path):
    (tmp_path / "m.yaml").write_text(SHORT + "name: é\n", encoding="utf-8")
    command = [sys.executable, "-m", "wavetrain", "describe", str(tmp_path / "m.yaml")]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0
    assert "\\xe9" in done.stdout


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m wavetrain describe llama2-7b --json | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_an_interrupt_ends_with_130(run, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("wavetrain.cli.load", interrupted)
    assert run("describe", "llama2-7b").code == 130


def test_a_machine_is_examined(run):
    ran = run("doctor", "--json")
    document = json.loads(ran.out)
    assert ran.code == (0 if document["ok"] else 5)
    by_name = {check["name"]: check for check in document["checks"]}
    assert by_name["python"]["state"] == "fine"
    assert by_name["torch"]["state"] == "fine"


def test_what_is_wrong_with_a_machine_is_said_with_its_remedy(run, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    ran = run("doctor")
    assert ran.code == 5
    assert "nosuch0 does not exist" in " ".join(ran.out.split())
