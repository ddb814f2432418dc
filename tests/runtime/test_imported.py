"""Directories of models, as transformers writes them and as strangers do."""

import json
import os
import pickle
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.runtime.crafted import Trap, facts, tensor_file
from tests.runtime.near import at

from wavetrain.base.errors import InputError
from wavetrain.runtime import imported
from wavetrain.runtime.imported import INDEX, SINGLE, Imported, matched, open_model

SHAPES = {"model.embed.weight": (6, 4), "model.layers.0.weight": (5, 3), "lm_head.weight": (6, 4)}
TIES = {"lm_head.weight": "model.embed.weight"}


def tensors(*names, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(SHAPES[name], generator=generator).to(dtype) for name in names or SHAPES}


def written(folder, held, file=SINGLE):
    folder.mkdir(exist_ok=True)
    save_file(held, folder / file)
    return folder


def indexed(folder, weights, **more):
    folder.mkdir(exist_ok=True)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights, **more}))
    return folder


# --- reading ---


@st.composite
def places(draw, shape):
    def ranges(size):
        edges = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
        return tuple(zip(edges[::2], edges[1::2], strict=False))

    return tuple(ranges(size) for size in shape)


@given(place=places((7, 5, 3)), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
def test_any_place_is_read_to_the_bit(place, dtype, tmp_path_factory):
    whole = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    folder = written(tmp_path_factory.mktemp("model"), {"before": torch.ones(3), "w": whole, "z": torch.ones(2)})
    assert torch.equal(open_model(folder).read("w", place), at(whole, place))


def leaf_of(values, place):
    return SimpleNamespace(values=values, place=place)


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_a_leaf_is_filled_some_rows_at_a_time(tmp_path, monkeypatch, rows):
    """Whatever its ranges are, and in its own format; single numbers and empty shards too."""
    monkeypatch.setattr(imported, "BLOCK", rows * 3 * 8)
    whole = torch.randn(9, 5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    found = open_model(written(tmp_path, {"w": whole, "one": torch.tensor(3.5)}))
    place = (((1, 3), (4, 8)), ((1, 4),))
    values = torch.zeros(6, 3, dtype=torch.float64)
    imported._fill(leaf_of(values, place), lambda place: found.read("w", place))
    assert torch.equal(values, at(whole, place).double())
    single = torch.zeros(())
    imported._fill(leaf_of(single, ()), lambda place: found.read("one", place))
    assert single.item() == 3.5
    imported._fill(leaf_of(torch.zeros(0, 3), (((2, 2),), ((0, 3),))), lambda place: found.read("w", place))


def test_only_the_bytes_of_a_place_are_read(tmp_path, monkeypatch):
    whole = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    found = open_model(written(tmp_path, {"w": whole, "other": torch.zeros(1 << 20)}))
    counted, preadv = [], os.preadv

    def counting(stream, buffers, offset):
        counted.append(preadv(stream, buffers, offset))
        return counted[-1]

    monkeypatch.setattr(os, "preadv", counting)
    place = (((256, 512),), ((0, 1024),))
    assert torch.equal(found.read("w", place), at(whole, place))
    assert sum(counted) == 1 << 20


def test_several_files_are_one_model(tmp_path):
    held = tensors()
    names = list(held)
    for number, name in enumerate(names):
        written(tmp_path, {name: held[name]}, f"model-{number}.safetensors")
    folder = indexed(tmp_path, {name: f"model-{number}.safetensors" for number, name in enumerate(names)})
    found = open_model(folder)
    for name, value in held.items():
        assert torch.equal(found.read(name, tuple(((0, size),) for size in value.shape)), value)


# --- names ---


def named(folder, *names):
    generator = torch.Generator().manual_seed(3)
    shapes = {name.removeprefix("model."): shape for name, shape in SHAPES.items()}
    held = {name: torch.randn(shapes[name.removeprefix("model.")], generator=generator) for name in names}
    return open_model(written(folder, held))


@pytest.mark.parametrize(
    ("there", "embedding"),
    [
        (["model.embed.weight", "model.layers.0.weight", "lm_head.weight"], "model.embed.weight"),
        (["model.embed.weight", "model.layers.0.weight"], "model.embed.weight"),
        (["lm_head.weight", "model.layers.0.weight"], "lm_head.weight"),
        (["embed.weight", "layers.0.weight"], "embed.weight"),
        (["embed.weight", "layers.0.weight", "lm_head.weight"], "embed.weight"),
    ],
)
def test_well_known_differences_of_names(tmp_path, there, embedding):
    names, ignored = matched(named(tmp_path, *there), SHAPES, TIES)
    assert names["model.embed.weight"] == names["lm_head.weight"] == embedding
    assert names.keys() == SHAPES.keys()
    assert ignored == []


def test_a_head_of_its_own_must_be_there(tmp_path):
    with pytest.raises(InputError, match=r"lm_head.weight\n.*missing"):
        matched(named(tmp_path, "embed.weight", "layers.0.weight"), SHAPES, {})


def test_names_without_a_prefix_find_those_with_one(tmp_path):
    shapes = {name.removeprefix("model."): shape for name, shape in SHAPES.items() if name.startswith("model.")}
    names, _ = matched(named(tmp_path, "model.embed.weight", "model.layers.0.weight"), shapes, {})
    assert names == {name: f"model.{name}" for name in shapes}


@pytest.mark.parametrize("extra", ["h.0.attn.bias", "model.rotary_emb.inv_freq", "bert.pooler.dense.weight"])
def test_what_is_no_parameter_is_named_and_not_loaded(tmp_path, extra):
    folder = written(tmp_path, tensors() | {extra: torch.ones(2)})
    assert matched(open_model(folder), SHAPES, TIES)[1] == [extra]


def test_all_that_does_not_fit_is_told_at_once(tmp_path):
    held = tensors("model.embed.weight") | {"model.layers.0.weight": torch.ones(3, 5), "adapter": torch.ones(1)}
    with pytest.raises(InputError) as raised:
        matched(open_model(written(tmp_path, held)), SHAPES | {"norm": (4,)}, TIES)
    said = [(problem.key, problem.rule) for problem in raised.value.problems]
    assert [key for key, _ in said] == ["model.layers.0.weight", "norm", "adapter"]
    assert "[3, 5]" in said[0][1]


# --- from strangers ---

CRAFTED = {
    "a length beyond the file": (tensor_file({"w": facts()}, length=1 << 62), "a header of"),
    "an overlap": (tensor_file({"v": facts(), "w": facts(offsets=(8, 24))}, bytes(24)), "overlap or hole"),
    "a hole": (tensor_file({"w": facts(offsets=(8, 24))}, bytes(24)), "overlap or hole"),
    "a rest": (tensor_file({"w": facts()}, bytes(99)), "the file at"),
    "bytes that are not there": (tensor_file({"w": facts(shape=(1 << 40,), offsets=(0, 1 << 42))}), "from 0 to 16"),
    "nothing at all": (b"", "a header of"),
    "JSON that is none": (tensor_file(b"{"), "not valid JSON"),
    "a name twice": (tensor_file(b'{"w": 1, "w": 2}'), "given twice"),
    "4 million values": (tensor_file(b'{"a":[' + b"0," * 5_000_000 + b"0]}"), "values"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_refused(tmp_path, name):
    data, said = CRAFTED[name]
    (tmp_path / SINGLE).write_bytes(data)
    with pytest.raises(InputError, match=said):
        open_model(tmp_path)


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", ".x.safetensors", "x.bin", 3, None],
)
def test_an_index_leads_nowhere_else(tmp_path, file):
    written(tmp_path, tensors())
    with pytest.raises(InputError, match=r"in the same directory"):
        open_model(indexed(tmp_path / "inside", {"model.embed.weight": file}))


@pytest.mark.parametrize("weights", [None, {}, [], "x"])
def test_an_index_must_have_a_map(tmp_path, weights):
    with pytest.raises(InputError, match="weight_map"):
        open_model(indexed(tmp_path, weights))


def test_an_index_that_lies_is_refused(tmp_path, monkeypatch):
    for file in ("a.safetensors", "b.safetensors"):
        written(tmp_path, tensors("lm_head.weight"), file)
    indexed(tmp_path, {"x": "a.safetensors", "lm_head.weight": "b.safetensors"})
    with pytest.raises(InputError) as raised:
        open_model(tmp_path)
    said = " ".join(str(raised.value).split())
    assert "x is not in a.safetensors, where the index has it" in said
    assert "lm_head.weight is in a.safetensors and in b.safetensors" in said
    indexed(tmp_path, {"x": "c.safetensors"})
    with pytest.raises(InputError, match=r"c.safetensors\n.*No such file"):
        open_model(tmp_path)
    indexed(tmp_path, {f"w{number}": f"{number}.safetensors" for number in range(imported.MOST_FILES + 1)})
    with pytest.raises(InputError, match="names more than"):
        open_model(tmp_path)
    monkeypatch.setattr(imported, "MOST_BYTES", 100)
    with pytest.raises(InputError, match="must be at most"):
        open_model(tmp_path)


def test_links_and_pipes_are_not_followed_but_the_users_own_path_may_be_one(tmp_path):
    real = written(tmp_path / "real", tensors())
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / SINGLE).symlink_to(real / SINGLE)
    with pytest.raises(InputError, match=r"symbolic link(.|\n)*cp -rL"):
        open_model(inside)
    (inside / SINGLE).unlink()
    os.mkfifo(inside / SINGLE)
    with pytest.raises(InputError, match="must be a regular file"):
        open_model(inside)
    (tmp_path / "link").symlink_to(real)
    assert open_model(tmp_path / "link").tensors.keys() == SHAPES.keys()
    for nowhere in (real / SINGLE, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="can't be read"):
            open_model(nowhere)


def test_a_file_that_has_become_another_is_not_read(tmp_path):
    """A rank opens what its parent has checked; a file that has changed its size since is refused."""
    found = open_model(written(tmp_path, tensors()))
    (tmp_path / SINGLE).write_bytes(bytes(10))
    with pytest.raises(InputError, match="has 10 bytes"):
        found.read("lm_head.weight", (((0, 6),), ((0, 4),)))


def test_a_pickle_is_refused_by_name_or_content_and_not_run(tmp_path):
    mark = tmp_path / "executed"
    trap = pickle.dumps(Trap(mark))
    (tmp_path / "pytorch_model.bin").write_bytes(trap)
    with pytest.raises(InputError, match="only safetensors are read"):
        open_model(tmp_path)
    (tmp_path / SINGLE).write_bytes(trap)
    with pytest.raises(InputError, match="no safetensors file"):
        open_model(tmp_path)
    assert not mark.exists()
    pickle.loads(trap)  # the trap works
    assert mark.exists()


def test_a_directory_of_checkpoints_or_of_nothing_is_told_apart(tmp_path):
    with pytest.raises(InputError, match="has neither"):
        open_model(tmp_path)
    (tmp_path / "step-00000010").mkdir()
    with pytest.raises(InputError, match="wavetrain export"):
        open_model(tmp_path)


def test_very_many_strange_tensors_take_little_time(tmp_path):
    """50,000 of them: each is a problem of its own, and the first are shown."""
    header = {f"x{number}": facts("U8", (0,), (0, 0)) for number in range(50_000)}
    (tmp_path / SINGLE).write_bytes(tensor_file(header, b""))
    begun = time.monotonic()
    with pytest.raises(InputError, match="and 49962 more"):
        matched(open_model(tmp_path), SHAPES, TIES)
    assert time.monotonic() - begun < 10


def test_a_model_without_tensors_lacks_all_of_them(tmp_path):
    found = Imported(tmp_path, {})
    with pytest.raises(InputError) as raised:
        matched(found, SHAPES, TIES)
    assert len(raised.value.problems) == 2
