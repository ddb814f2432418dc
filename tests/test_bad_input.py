"""Thousands of generated bad model and cluster files: each refused with exit code 2, its key named, no traceback."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.soak import often, sample

from wavetrain.cli import main
from wavetrain.model import load_model, write_model

CASES = often(2400, 240)
BATCHES = 8

MODEL = {
    "family": "llama",
    "layers": 4,
    "hidden": 64,
    "heads": 8,
    "kv_heads": 4,
    "ffn": 96,
    "vocab": 100,
    "seq_len": 32,
    "tied": True,
    "experts": 4,
    "experts_per_token": 2,
    "window": 16,
    "name": "mine",
}
CLUSTER = {
    "name": "lab",
    "nodes": 4,
    "node": {
        "name": "box",
        "devices": 8,
        "host_w": 100,
        "device": {
            "name": "gizmo",
            "peak_tflops": {"bf16": 100, "fp32": 20.5},
            "memory_gib": 16,
            "memory_gb_per_s": 500,
            "efficiency": {"matmul": 0.7, "memory": 0.8},
            "idle_w": 10,
            "busy_w": 90,
            "limit_w": 100,
            "usd_per_hour": 0.5,
        },
        "tiers": [{"name": "pcie", "size": 8, "gb_per_s": 30, "latency_us": 5}],
        "network": {"name": "ethernet", "nics": 1, "nic_gbit_per_s": 25, "latency_us": 30},
    },
}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
}
NEEDED = {
    "model": ["layers", "hidden", "heads", "ffn", "vocab", "seq_len"],
    "config": ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"],
}

# Written as they stand in the file; each is wrong for every number, and for most other values too.
NOT_NUMBERS = ["'four'", "[4]", "{a: 4}", "true", "null", "-3", "0x", "1e400", "9" * 120, "1000000000000000000000"]
YAML_ONLY = [".nan", ".inf", "-.inf", "&a 4", "*a", "!!int 4", "!!python/object/apply:os.system 4", "-0.5"]
JSON_ONLY = ["NaN", "Infinity", "-Infinity", '"\\u0000"', '"four"', '{"a": 4}', "[[[]]]", "false"]
NOT_WORDS = ["4", "true", "[a]", "{a: b}", '"\\x1b[2J"', '"' + "x" * 5000 + '"', "''"]


def leaves(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all scalars."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path
        return
    for key, item in items:
        yield from leaves(item, (*path, key))


def put(value: object, path: tuple, new: object) -> object:
    """A copy with the value at a path replaced; `None` at a new key removes it."""
    if not path:
        return new
    if isinstance(value, list):
        return [put(item, path[1:], new) if i == path[0] else item for i, item in enumerate(value)]
    assert isinstance(value, dict)
    return {key: put(item, path[1:], new) if key == path[0] else item for key, item in value.items()}


def at(value: object, path: tuple) -> object:
    for key in path:
        value = value[key]
    return value


class Raw(str):
    """Text that goes into the file unquoted."""


def as_yaml(value: object, depth: int = 0) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        pad = "  " * depth
        lines = [f"{pad}{key}: {nested(item, depth)}" for key, item in value.items()]
        return ("\n" if depth else "") + "\n".join(lines)
    if isinstance(value, list):
        return "[" + ", ".join(as_flow(item) for item in value) + "]"
    return json.dumps(value)


def nested(item: object, depth: int) -> str:
    return as_yaml(item, depth + 1).rstrip("\n")


def as_flow(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_flow(item)}" for key, item in value.items()) + "}"
    return as_yaml(value)


def as_json(value: object) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",\n".join(f'"{key}": {as_json(item)}' for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_json, value)) + "]"
    return json.dumps(value)


def misspelt(key: str, rng: random.Random) -> str:
    letters = list(key)
    i = rng.randrange(len(letters))
    letters[i] = rng.choice([c for c in "qxzk" if c != letters[i]])
    return "".join(letters)


def renamed(value: object, path: tuple, name: str) -> object:
    parent = at(value, path[:-1])
    assert isinstance(parent, dict)
    return put(value, path[:-1], {name if key == path[-1] else key: item for key, item in parent.items()})


Case = tuple[str, str, str]  # file name, text, a word the message must have


def wrong_value(rng: random.Random, base: dict, suffix: str) -> Case:
    path = rng.choice([p for p in leaves(base) if p != ("model_type",)])
    old = at(base, path)
    choices = NOT_WORDS if isinstance(old, str) else NOT_NUMBERS
    if suffix == "json":
        choices = JSON_ONLY if not isinstance(old, str) else ["4", "true", '"\\u001b"', "[]"]
        if isinstance(old, bool):
            choices = ["NaN", '"yes"', "1", "[]"]
        elif path == ("attention_dropout",):
            choices = ["NaN", '"no"', "-1", "true"]
        elif isinstance(old, int):
            choices = [*choices, "-1", "0", "1.5", "10000000000000000000"]
    elif not isinstance(old, str):
        choices = [*choices, *YAML_ONLY]
        if isinstance(old, bool):
            choices = ["'yes'", "1", "[true]", ".nan", "on", "&a true"]
    new = rng.choice([c for c in choices if not (c == "null" and optional(path))])
    bad = put(base, path, Raw(new))
    text = as_json(bad) if suffix == "json" else as_yaml(bad)
    return suffix, text, str(named(path))


def named(path: tuple) -> object:
    """The innermost key of a path (a list's position is not a key)."""
    return next(key for key in reversed(path) if isinstance(key, str))


def optional(path: tuple) -> bool:
    """Keys whose absence is legal, so null is too."""
    free = {"kv_heads", "tied", "window", "experts", "experts_per_token", "name", "family", "fp32", "host_w", "nodes"}
    return path[-1] in free or path == ("node", "device", "peak_tflops", "bf16")


def unknown_key(rng: random.Random, base: dict, suffix: str) -> Case:
    path = rng.choice([p for p in leaves(base) if isinstance(p[-1], str) and p[-1] not in ("model_type", "name")])
    if suffix == "json":  # other programs' keys are legal there, so only the absence of a needed one is wrong
        path = (rng.choice(NEEDED["config"]),)
        return suffix, as_json(renamed(base, path, misspelt(path[-1], rng))), path[-1]
    name = misspelt(str(path[-1]), rng)
    return suffix, as_yaml(renamed(base, path, name)), name


def missing_key(rng: random.Random, base: dict, suffix: str) -> Case:
    kind = "config" if suffix == "json" else "model" if "layers" in base else "cluster"
    if kind == "cluster":
        paths = [p for p in leaves(base) if not optional(p) and p[-1] not in ("name", "title") and "tiers" not in p]
        path = rng.choice([p for p in paths if p[-1] != "bf16"])
    else:
        path = (rng.choice(NEEDED[kind]),)
    parent = {key: item for key, item in at(base, path[:-1]).items() if key != path[-1]}
    bad = put(base, path[:-1], parent)
    return suffix, as_json(bad) if suffix == "json" else as_yaml(bad), path[-1]


def twice(rng: random.Random, base: dict, suffix: str) -> Case:
    key = rng.choice(list(base))
    text = as_json(base) if suffix == "json" else as_yaml(base)
    extra = f',\n"{key}": 3}}' if suffix == "json" else f"\n{key}: 3\n"
    return suffix, (text[:-1] if suffix == "json" else text) + extra, key


FAMILY_KEYS = {
    "gpt2": ("n_layer", "n_embd", "n_head"),
    "gpt_neox": ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
    "opt": ("num_hidden_layers", "hidden_size", "num_attention_heads", "ffn_dim"),
    "bloom": ("n_layer", "hidden_size", "n_head"),
    "mpt": ("n_layers", "d_model", "n_heads"),
    "bert": ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"), tuple(CONFIG)[1:6]),
    "mixtral": (*tuple(CONFIG)[1:6], "num_local_experts", "num_experts_per_tok"),
    "qwen3_moe": (*tuple(CONFIG)[1:6], "num_experts", "num_experts_per_tok"),
}
NEVER_A_SIZE = ['"four"', "-1", "0", "1.5", "true", "[4]", "NaN", "1e999", "10000000000000000000", '{"value": 8}']


@pytest.mark.parametrize("family", sample(sorted(FAMILY_KEYS), 4))
def test_every_size_of_every_family_is_checked(family, tmp_path, capsys):
    good = {"model_type": family, "vocab_size": 97, **dict.fromkeys(FAMILY_KEYS[family], 8)}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(good))
    assert main(["describe", str(path)]) == 0, capsys.readouterr().err
    for key in ("vocab_size", *FAMILY_KEYS[family]):
        needed = not (key == "num_key_value_heads" and family in ("llama", "phi3"))
        for bad in [*NEVER_A_SIZE, None] if needed else NEVER_A_SIZE:
            spoilt = {name: value for name, value in good.items() if name != key}
            path.write_text(as_json(spoilt if bad is None else spoilt | {key: Raw(bad)}))
            assert main(["describe", str(path)]) == 2, (key, bad)
            err = capsys.readouterr().err
            assert key in err, (key, bad, err)
            assert "Traceback" not in err


@pytest.mark.parametrize("name", sample(["tiny-moe", "tiny-gpt", "gemma2-9b"], 1))
def test_every_value_of_our_own_files_is_checked(name, tmp_path, capsys):
    """A spoilt value may be harmless (a name, a flag), but it never ends in a traceback, an endless run or a NaN."""
    write_model(load_model(name), tmp_path / "good.json")
    good = json.loads((tmp_path / "good.json").read_text())
    rng = random.Random(1)
    paths = list(leaves(good))
    refused = 0
    chosen = rng.sample(paths, min(len(paths), often(150, 15)))
    for path in chosen:
        for bad in ("-7", "0", "1e300", "10" + "0" * 90, '"x\\u0000"', "null", "[]", "true"):
            (tmp_path / "bad.json").write_text(as_json(put(good, path, Raw(bad))))
            code = main(["describe", str(tmp_path / "bad.json"), "--json"])
            captured = capsys.readouterr()
            assert code in (0, 2), (path, bad)
            assert "Traceback" not in captured.err
            assert ("bad.json:" in captured.err) == (code == 2)
            refused += code == 2
            if code == 0:
                assert json.loads(captured.out)["num_parameters"] >= 0
    assert refused > 4 * len(chosen)


KINDS: list[Callable[[random.Random, dict, str], Case]] = [
    wrong_value,
    wrong_value,
    wrong_value,
    unknown_key,
    missing_key,
    twice,
]
BASES = [(MODEL, "yaml"), (CLUSTER, "yaml"), (CONFIG, "json")]


def cases(seed: int, count: int) -> Iterator[Case]:
    rng = random.Random(seed)
    for _ in range(count):
        base, suffix = rng.choice(BASES)
        yield rng.choice(KINDS)(rng, base, suffix)


@pytest.mark.parametrize(("base", "suffix"), BASES)
def test_the_files_are_good_before_they_are_spoilt(base, suffix, tmp_path, capsys):
    path = tmp_path / f"good.{suffix}"
    path.write_text(as_json(base) if suffix == "json" else as_yaml(base))
    assert main(["describe", str(path)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("seed", range(BATCHES))
def test_generated_bad_files_are_refused_by_name(seed, tmp_path, capsys):
    for number, (suffix, text, word) in enumerate(cases(seed, CASES // BATCHES)):
        path = Path(tmp_path / f"bad-{number}.{suffix}")
        path.write_text(text)
        code = main(["describe", str(path)])
        captured = capsys.readouterr()
        about = f"{text}\n--- exit {code}\n{captured.err}"
        assert code == 2, about
        assert captured.err.startswith("error: "), about
        assert f"bad-{number}.{suffix}:" in captured.err, about
        assert word in captured.err, about
        assert "Traceback" not in captured.err, about
        assert captured.out == "", about
        assert captured.err.replace("\n", "").isprintable(), about


GARBAGE = [
    b"",
    b"\x00",
    b"\xff\xfe\x00",
    b"{",
    b"[",
    b"- 1",
    b"a",
    b"3",
    b"null",
    b"[" * 10**5,
    b"{" * 10**5,
    b"a: " * 10**4,
]
GARBAGE += [b"a: &a [" + b"*a, " * 1000 + b"]", b"%YAML 9.9\n---\na: 1", b"? ? ? a", b'"' + b"x" * 10**6, b"\t\ta: 1"]


@pytest.mark.parametrize("suffix", ["yaml", "json", "yml", "txt"])
@pytest.mark.parametrize("number", range(len(GARBAGE)))
def test_garbage_is_refused(suffix, number, tmp_path, capsys):
    path = tmp_path / f"garbage.{suffix}"
    path.write_bytes(GARBAGE[number])
    assert main(["describe", str(path)]) == 2
    err = capsys.readouterr().err
    assert "garbage" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_never_end_in_a_traceback(seed, tmp_path, capsys):
    rng = random.Random(seed)
    text = (as_yaml(CLUSTER), as_json(CONFIG), as_yaml(MODEL))[seed % 3].encode()
    for number in range(often(150, 50)):
        data = bytearray(text)
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path = tmp_path / f"noise-{number}.{'json' if seed % 3 == 1 else 'yaml'}"
        path.write_bytes(bytes(data))
        assert main(["describe", str(path)]) in (0, 2)
        assert "Traceback" not in capsys.readouterr().err
