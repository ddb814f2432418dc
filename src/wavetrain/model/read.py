"""`load_model`: a preset's name, an HF config.json (or its directory), a short YAML file, or a model we wrote."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

from wavetrain.base.codec import decode, dumps, encode
from wavetrain.base.document import Node, exists, parse_yaml, read_document
from wavetrain.base.errors import InputError, Problem, unknown_name
from wavetrain.base.fields import Fields
from wavetrain.model.hf import READERS, read_config
from wavetrain.model.limits import MOST_SEQ_LEN
from wavetrain.model.model import SCHEMA, Model
from wavetrain.model.short import read_short
from wavetrain.model.transformer import build


def load_model(name_or_path: str | Path, *, seq_len: int | None = None) -> Model:
    """Read a model by preset name or path; `seq_len` replaces the sequence length it is described for."""
    name = str(name_or_path)
    if name in presets():
        return with_length(_from_short(name, presets()[name]), seq_len)
    path = Path(name_or_path)
    if not exists(path):
        raise InputError(unknown_name(name, "model", presets()))
    if path.is_dir():
        path = _config_in(path)
    return read_model(read_document(path), seq_len=seq_len)


def read_model(node: Node, *, seq_len: int | None = None) -> Model:
    """Read a model from a parsed document of any of the three forms."""
    stem = Path(node.file).stem
    keys = node.value if isinstance(node.value, dict) else {}
    if "schema" in keys:
        model = decode(Model, node, schema=SCHEMA)
    elif "model_type" in keys:
        name = Path(node.file).absolute().parent.name if stem == "config" else stem
        model = build(read_config(node), name=name, source="config.json")
    elif node.file.lower().endswith(".json"):
        rule = "a model in JSON is an HF config.json, which has model_type, or a file of ours, which has schema"
        raise InputError(Problem(where=node.where, key="model_type", rule=rule, legal=tuple(sorted(READERS))))
    else:
        model = _from_short(stem, node)
    return with_length(model, seq_len)


def write_model(model: Model, path: Path) -> None:
    """Write a model as JSON that `load_model` reads back."""
    path.write_text(dumps(encode(model, schema=SCHEMA)), encoding="utf-8")


@cache
def presets() -> dict[str, Node]:
    """The models we know by name, in the short form."""
    known: dict[str, Node] = {}
    for file in sorted(resources.files("wavetrain.model").joinpath("presets").iterdir(), key=lambda f: f.name):
        items = parse_yaml(file.read_text(encoding="utf-8"), file=file.name).value
        assert isinstance(items, dict)
        known |= items
    return known


def _from_short(default_name: str, node: Node) -> Model:
    f = Fields(node)
    name = f.text("name", default=default_name)
    source = f.text("source", default="")
    architecture = read_short(f)
    f.finish()
    return build(architecture, name=name, source=source)


def with_length(model: Model, seq_len: int | None) -> Model:
    """The model for sequences of another length, where it has one; None: its own."""
    if seq_len is None:
        return model
    learned = model.architecture is not None and model.architecture.positions == "learned"
    most = model.architecture.seq_len if model.architecture and learned else MOST_SEQ_LEN
    rule = ""
    if not 1 <= seq_len <= most:
        table = "; that is how many positions it has learned" if learned else ""
        rule = f"must be a whole number from 1 to {most:,}{table}"
    elif model.fixed_length and seq_len != model.seq_len:
        rule = f"must be {model.seq_len}: the traced module fixes its length"
    if rule:
        raise InputError(Problem(where=model.name, key="seq_len", value=seq_len, rule=rule))
    return replace(model, seq_len=seq_len)


def _config_in(directory: Path) -> Path:
    path = directory / "config.json"
    if not path.is_file():
        raise InputError(Problem(where=str(directory), rule="is a directory without a config.json"))
    return path
