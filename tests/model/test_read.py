import json
from dataclasses import replace

import pytest

from wavetrain.base.errors import InputError
from wavetrain.model import load_model, presets, write_model
from wavetrain.model.families import FAMILIES

SHORT = "layers: 4\nhidden: 64\nheads: 4\nvocab: 100\nseq_len: 32\n"


def written(tmp_path, text, name="m.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_reads_and_round_trips(name, tmp_path):
    model = load_model(name)
    assert model.name == name
    assert model.source
    path = tmp_path / "model.json"
    write_model(model, path)
    assert load_model(path) == model


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_a_short_form(family, tmp_path):
    model = load_model(written(tmp_path, SHORT + f"family: {family}\nffn: 96\n"))
    names = [parameter.name for parameter in model.parameters()]
    assert len(names) == len(set(names))
    assert model.counts["encoder" if family == "bert" else "decoder"] == 4


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        *(("llama-2-7b", "llama2-7b"), ("llama-3.1-405b", "llama3-405b"), ("mixtral-8x7b", "mixtral-8x7b")),
        *(("bloom-176b", "bloom-176b"), ("gpt2", "gpt2"), ("opt-6.7b", "opt-6.7b"), ("qwen3-8b", "qwen3-8b")),
        *(("gemma-2-9b", "gemma2-9b"), ("phi-3-mini-4k", "phi3-mini"), ("bert-large-uncased", "bert-large")),
        *(("gpt-neox-20b", "gpt-neox-20b"), ("qwen3-30b-a3b", "qwen3-30b-a3b"), ("mistral-7b-v0.1", "mistral-7b")),
        *(("qwen2-7b", "qwen2-7b"), ("mixtral-8x22b", "mixtral-8x22b"), ("llama-3.2-1b", "llama3.2-1b")),
    ],
)
def test_presets_equal_the_published_config(config, preset, request):
    configs = request.path.parent / "configs"
    theirs, ours = load_model(configs / f"{config}.json"), load_model(preset)
    assert list(ours.parameters()) == list(theirs.parameters())


def test_a_directory_with_a_config_is_a_model(tmp_path, request):
    directory = tmp_path / "My-Llama"
    directory.mkdir()
    source = request.path.parent / "configs" / "llama-2-7b.json"
    (directory / "config.json").write_text(source.read_text())
    assert load_model(directory).name == "My-Llama"


def test_sequence_length_can_be_chosen(request):
    configs = request.path.parent / "configs"
    assert load_model("llama2-7b", seq_len=10**6).seq_len == 10**6
    shorter = load_model("gpt3-125m", seq_len=100)
    assert shorter.num_parameters == load_model("gpt3-125m").num_parameters
    for name, length in [("gpt3-125m", 4096), (configs / "gpt2.json", 1025), (configs / "opt-125m.json", 2049)]:
        with pytest.raises(InputError, match="positions it has learned"):
            load_model(name, seq_len=length)
    for length in (0, -1, 10**20):
        for name in ("llama2-7b", configs / "llama-2-7b.json"):
            with pytest.raises(InputError, match="seq_len"):
                load_model(name, seq_len=length)


def test_folding_counts_every_layer():
    model = load_model("gemma2-9b")
    assert len(model.layers) == 4
    assert model.counts == {"embedding": 1, "decoder-windowed": 21, "decoder": 21, "head": 1}
    numbers = [number for layer, number in model.instances() if layer.path]
    assert numbers == list(range(42))


def test_a_bias_can_be_left_out(tmp_path):
    whole = load_model(written(tmp_path, SHORT))
    part = load_model(written(tmp_path, SHORT + "qkv_bias: false\n"))
    assert whole.num_parameters - part.num_parameters == 4 * 3 * 64
    names = [p.name for p in load_model(written(tmp_path, SHORT + "norm: rmsnorm\n")).parameters()]
    assert "layers.0.attention_norm.bias" not in names


def test_the_deepest_alternating_model_round_trips(tmp_path):
    text = SHORT.replace("layers: 4", "layers: 10000") + "window: 8\nwindows: alternate\n"
    model = load_model(written(tmp_path, text))
    write_model(model, tmp_path / "deep.json")
    assert load_model(tmp_path / "deep.json") == model


SPOILT = [
    ('"lengths": 1', '"lengths": 3000', "powers"),
    ('"factor": 128', '"factor": 1e308', "factor"),
    ('"experts": 4', '"experts": 0', "sizes"),
    ('"inputs": 128', '"inputs": -128', "sizes"),
    ('"count": 4', '"count": 10000000000', "counts"),
    ('"seq_len": 128', '"seq_len": 0', "seq_len"),
    ('"name": "tiny-moe"', '"name": "\\ud800"', "printable"),
    ('"name": "tiny-moe"', '"name": "\\u202e"', "printable"),
    ('"kind": "linear"', '"kind": "liner"', "kind"),
    ('"axis": "column"', '"axis": "colum"', "nearest: column"),
]


@pytest.mark.parametrize(("old", "new", "says"), SPOILT)
def test_our_own_files_are_checked(tmp_path, old, new, says):
    write_model(load_model("tiny-moe"), tmp_path / "m.json")
    text = (tmp_path / "m.json").read_text()
    assert old in text
    with pytest.raises(InputError) as caught:
        load_model(written(tmp_path, text.replace(old, new, 1), "bad.json"))
    assert says in str(caught.value)
    assert "bad.json:" in str(caught.value)


def test_a_model_without_layers_is_refused(tmp_path):
    write_model(load_model("tiny-moe"), tmp_path / "m.json")
    data = json.loads((tmp_path / "m.json").read_text()) | {"layers": [], "order": []}
    with pytest.raises(InputError, match="must have a layer"):
        load_model(written(tmp_path, json.dumps(data), "bad.json"))


def test_a_model_checks_its_own_consistency():
    model = load_model("tiny-gpt")
    with pytest.raises(ValueError, match="not described"):
        replace(model, layers=model.layers[:1])
    with pytest.raises(ValueError, match="same name"):
        replace(model, layers=(*model.layers, model.layers[0]))
    with pytest.raises(ValueError, match="seq_len"):
        replace(model, seq_len=0)


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        (SHORT + "hiden: 3\n", "hiden", "nearest: hidden"),
        (SHORT.replace("heads: 4", "heads: 6"), "heads", "nearest: 4 or 8"),
        (SHORT + "kv_heads: 3\n", "kv_heads", "must divide heads (4)"),
        (SHORT + "family: lama\n", "family", "nearest: llama"),
        (SHORT + "family: llama\n", "ffn", "missing"),
        (SHORT + "experts: 4\n", "experts_per_token", "missing"),
        (SHORT + "experts: 4\nexperts_per_token: 5\n", "experts_per_token", "at most experts (4)"),
        (SHORT + "family: opt\nexperts: 4\nexperts_per_token: 2\n", "experts", "no module"),
        (SHORT + "family: bloom\npositions: learned\n", "positions", "no module"),
        (SHORT + "positions: lerned\n", "positions", "nearest: learned"),
        (SHORT.replace("layers: 4", "layers: 1000000000000000000"), "layers", "10,000"),
        (SHORT.replace("layers: 4", "layers: 1e3"), "layers", "write 1000"),
        (SHORT + "experts_per_token: 2\n", "experts_per_token", "means nothing without experts"),
        (SHORT + "expert_ffn: 2\n", "expert_ffn", "means nothing without experts"),
        (SHORT + "windows: alternate\n", "windows", "means nothing without window"),
        (SHORT + "family: opt\nkv_heads: 2\n", "kv_heads", "family: llama"),
        (SHORT + "family: opt\nhead_dim: 3\n", "head_dim", "no module"),
        (SHORT + "activation: banana\n", "activation", "gelu, silu"),
        (SHORT + "family: phi3\nffn: 96\nmlp: plain\n", "mlp", "family: gpt2"),
        (SHORT.replace("hidden: 64", "&a hidden: 64"), "", "anchors"),
        ("- 1\n- 2\n", "", "must be a mapping"),
        ("", "", "must be a mapping"),
    ],
)
def test_bad_short_forms(tmp_path, text, key, says):
    with pytest.raises(InputError) as caught:
        load_model(written(tmp_path, text))
    assert key in [problem.key for problem in caught.value.problems]
    assert says in str(caught.value)
    assert "m.yaml:" in str(caught.value)


def test_files_that_are_no_model(tmp_path):
    for name, text, says in [
        ("x.json", "{}", "model_type"),
        ("y.json", '{"schema": "wavetrain.model/9"}', "schema"),
        ("z.json", json.dumps({"schema": "wavetrain.model/1", "name": 3}), "model.name"),
    ]:
        with pytest.raises(InputError, match=says):
            load_model(written(tmp_path, text, name))
    with pytest.raises(InputError, match=r"without a config\.json"):
        load_model(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        load_model(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="llama2-7b"):
        load_model("lama2-7b")
