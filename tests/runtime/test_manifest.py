"""Strangers' checkpoints are refused, with the file and the reason, and nothing of them is executed."""

import hashlib
import json
import os
import pickle
import stat
import struct
from contextlib import nullcontext
from dataclasses import replace

import pytest
from tests.runtime.checkpoints import SHARDS, assert_falls_back, assert_is, manifest_of, names_in, save, two_good_ones
from tests.runtime.crafted import Trap, facts, tensor_file

from wavetrain.base.errors import InputError
from wavetrain.runtime import manifest as manifests
from wavetrain.runtime.checkpoint import (
    newest,
    opened,
    published,
    step_name,
    verify,
)
from wavetrain.runtime.manifest import (
    MANIFEST,
    Piece,
    Shard,
    extents,
    faults_of_cover,
    manifest_bytes,
    place_text,
    read_manifest,
    strict_json,
)


@pytest.fixture
def root(tmp_path):
    return two_good_ones(tmp_path)


# --- strangers' checkpoints ---


def test_links_folders_and_pipes_are_not_followed(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for step, file in ((30, SHARDS[0]), (40, MANIFEST)):
        path = save(root, step)
        (path / file).rename(elsewhere / file)
        (path / file).symlink_to(elsewhere / file)
        assert verify(path) == [f"{path / file}: is a symbolic link"]
    with pytest.raises(InputError, match="is a symbolic link"):
        opened(root / step_name(40))
    with pytest.raises(InputError, match="is a symbolic link"):
        opened(root / step_name(30)).read("layers.0.bias", "value", (((0, 6),),))
    (root / step_name(50)).symlink_to(root / step_name(20))
    assert verify(root / step_name(50)) == [f"{root / step_name(50)}: is a symbolic link"]
    path = save(root, 60)
    (path / SHARDS[0]).unlink()
    os.mkfifo(path / SHARDS[0])
    assert verify(path) == [f"{path / SHARDS[0]}: must be a regular file"]
    (root / step_name(70)).write_text("a file")
    assert_is(newest(root), 20)
    assert sorted(path.name for path in published(root)) == [step_name(10), step_name(20)]
    assert names_in(elsewhere) == [MANIFEST, SHARDS[0]]


def forged(root, data, *, piece=None, file=SHARDS[0]):
    """A checkpoint with one shard of these bytes, its digests all right."""
    path = root / step_name(90)
    path.mkdir(parents=True)
    piece = piece or Piece(name="w", kind="value", shape=(4,), dtype="F32", place=(((0, 4),),))
    shard = Shard(file=file, size=len(data), sha256=hashlib.sha256(data).hexdigest(), pieces=(piece,))
    (path / MANIFEST).write_bytes(manifest_bytes(manifest_of(90, [shard])))
    if "/" not in file:
        (path / file).write_bytes(data)
    return path


HEADERS = {
    "oversized": (tensor_file({"value/w": facts()}, length=1 << 63), "a header of"),
    "longer than the file": (tensor_file({"value/w": facts()}, length=200), "a header of"),
    "shorter than a length": (b"1234567", "a header of"),
    "empty": (b"", "a header of"),
    "no JSON": (tensor_file(b"{'value/w'"), "not valid JSON"),
    "no mapping": (tensor_file([1]), "must be a mapping"),
    "deep": (tensor_file(b"[" * 100_000), "nested too deeply"),
    "not a number": (tensor_file(b'{"value/w": NaN}'), "no number"),
    "twice": (tensor_file(b'{"value/w": 1, "value/w": 2}'), "given twice"),
    "binary": (tensor_file(b'{"\xff": 1}'), "UTF-8"),
    "negative": (tensor_file({"value/w": facts(offsets=(-16, 0))}), "whole number from 0"),
    "beyond the end": (tensor_file({"value/w": facts(offsets=(16, 32))}), "whole number from 0 to 16"),
    "backwards": (tensor_file({"value/w": facts(offsets=(16, 0))}), "its shape takes 16"),
    "too few bytes": (tensor_file({"value/w": facts(offsets=(0, 8))}), "its shape takes 16"),
    "a hole": (tensor_file({"value/w": facts(offsets=(8, 24))}, bytes(24)), "overlap or hole"),
    "a rest": (tensor_file({"value/w": facts()}, bytes(17)), "the file at"),
    "three offsets": (tensor_file({"value/w": facts(offsets=(0, 8, 16))}), "two numbers"),
    "true": (tensor_file({"value/w": facts(offsets=(False, 16))}), "whole number"),
    "fractions": (tensor_file({"value/w": facts(offsets=(0.0, 16.0))}), "whole number"),
    "unknown format": (tensor_file({"value/w": facts(dtype="F31")}), "unknown number format"),
    "a list as format": (tensor_file({"value/w": facts() | {"dtype": ["F32"]}}), "unknown number format"),
    "another format": (tensor_file({"value/w": facts(dtype="I32")}), "the manifest says F32"),
    "another shape": (tensor_file({"value/w": facts(shape=(2, 2))}), "the manifest says F32 [4]"),
    "endless": (tensor_file({"value/w": facts(shape=[1 << 40] * 3)}), "elements"),
    "more dimensions": (tensor_file({"value/w": facts(shape=[1] * 40)}), "at most 16"),
    "another name": (tensor_file({"value/v": facts()}), "only"),
    "another beside it": (
        tensor_file({"value/w": facts(), "value/v": facts("F32", (0,), (16, 16))}),
        "in the file only",
    ),
    "no facts": (tensor_file({"value/w": 3}), "exactly the keys"),
    "more facts": (tensor_file({"value/w": facts() | {"run": "me"}}), "exactly the keys"),
    "10**7 values": (tensor_file(b'{"a":[' + b"0," * 5_000_000 + b"0]}"), "values"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_crafted_headers_are_refused(tmp_path, name):
    data, said = HEADERS[name]
    path = forged(tmp_path, data)
    (line,) = verify(path)
    assert line.startswith(str(path / SHARDS[0]))
    assert said in line
    with pytest.raises(InputError, match=SHARDS[0]):  # nor does it help that nobody looked before
        opened(path).read("w", "value", (((0, 4),),))


def test_a_header_may_be_long_but_not_endless():
    for length, refused in ((manifests.MOST_BYTES, False), (manifests.MOST_BYTES + 1, True)):
        with pytest.raises(InputError, match="a header of") if refused else nullcontext():
            assert manifests.header_length(struct.pack("<Q", length), 1 << 40, where="x.safetensors") == length


def test_the_crafting_itself_is_right(tmp_path):
    path = forged(tmp_path, tensor_file({"__metadata__": {"format": "pt"}, "value/w": facts()}))
    assert verify(path) == []
    assert opened(path).read("w", "value", (((0, 4),),)).tolist() == [0, 0, 0, 0]


def test_overlapping_tensors_are_refused(tmp_path):
    header = {"value/v": facts(offsets=(0, 16)), "value/w": facts(offsets=(8, 24))}
    data = tensor_file(header, bytes(24))
    path = forged(tmp_path, data)
    pieces = [Piece(name=name, kind="value", shape=(4,), dtype="F32", place=(((0, 4),),)) for name in "vw"]
    digest = hashlib.sha256(data).hexdigest()
    shard = Shard(file=SHARDS[0], size=len(data), sha256=digest, pieces=tuple(pieces))
    (path / MANIFEST).write_bytes(manifest_bytes(manifest_of(90, [shard])))
    (line,) = verify(path)
    assert "overlap" in line


def test_a_pickle_is_refused_and_not_run(tmp_path):
    mark = tmp_path / "executed"
    trap = pickle.dumps(Trap(mark))
    path = forged(tmp_path, trap)
    (line,) = verify(path)
    assert "no safetensors file" in line
    with pytest.raises(InputError):
        opened(path).read("w", "value", (((0, 4),),))
    (path / MANIFEST).write_bytes(trap)
    assert verify(path)
    with pytest.raises(InputError):
        newest(tmp_path)
    assert not mark.exists()
    pickle.loads(trap)  # the trap works
    assert mark.exists()


@pytest.mark.parametrize(
    "file",
    [
        "../step-00000010/rank-00000.safetensors",
        "/etc/passwd",
        "/etc/x.safetensors",
        "..",
        "",
        "a/b.safetensors",
        ".hidden.safetensors",
        "rank\x00.safetensors",
        "rank 0.safetensors",
        "rank-0.pt",
        MANIFEST,
        "x" * 200 + ".safetensors",
        "rank\\0.safetensors",
        "\u0440ank.safetensors",
    ],
)
def test_names_that_lead_elsewhere_are_refused(root, file):
    path = root / step_name(90)
    path.mkdir()
    piece = Piece(name="w", kind="value", shape=(4,), dtype="F32", place=(((0, 4),),))
    shard = Shard(file=file, size=1, sha256="0" * 64, pieces=(piece,))
    (path / MANIFEST).write_bytes(manifest_bytes(manifest_of(90, [shard])))
    (line,) = verify(path)
    assert line.startswith(str(path / MANIFEST))
    assert_is(newest(root), 20)


def sealed(document):
    """A manifest's bytes with a right digest, whatever they say."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    body = text.rstrip()[:-1]
    return body + f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def document():
    shard = {"file": "a.safetensors", "size": 4, "sha256": "0" * 64, "places": {"value": {"w": ["0:1"]}}}
    head = {"schema": manifests.SCHEMA, "run": "r", "step": 1, "plan_hash": "x"}
    head |= {"position": {}, "counters": {}, "versions": {}}
    return head | {"tensors": {"value": {"w": {"dtype": "F32", "shape": [1]}}}, "shards": [shard]}


def changed(*keys, to):
    found = document()
    inner = found
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return found


PLACES = ("shards", 0, "places", "value", "w")
DOCUMENTS = {
    "twice": (json.dumps(document()).encode().replace(b'"step": 1', b'"step": 1, "step": 2'), "given twice"),
    "not a number": (json.dumps(document()).encode().replace(b'"step": 1', b'"step": NaN'), "no number"),
    "digits": (json.dumps(document()).encode().replace(b'"step": 1', b'"step": ' + b"9" * 5000), "digits"),
    "binary": (b'{"\xff\xfe": 1}', "UTF-8"),
    "deep": (b'{"schema": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested too deeply"),
    "many": (b'{"schema": [' + b"0," * 4_000_001 + b"0]}", "values"),
    "schema": (changed("schema", to="wavetrain.checkpoint/2"), "unknown schema"),
    "unknown key": (document() | {"more": 1}, "exactly the keys"),
    "missing key": ({key: value for key, value in document().items() if key != "run"}, "exactly the keys"),
    "step true": (changed("step", to=True), "whole number"),
    "step negative": (changed("step", to=-1), "whole number"),
    "step of text": (changed("step", to="1"), "whole number"),
    "run": (changed("run", to="../r"), "must be like"),
    "run empty": (changed("run", to=""), "1 to"),
    "controls": (changed("plan_hash", to="\x1b[2J"), "printable"),
    "nested facts": (changed("position", to={"a": [1]}), "finite number"),
    "infinite fact": (json.dumps(changed("position", to={"a": 7})).encode().replace(b"7}", b"1e999}"), "finite number"),
    "huge fact": (changed("counters", to={"a": 10**300}), "finite number"),
    "facts as list": (changed("versions", to=[]), "mapping"),
    "shards as mapping": (changed("shards", to={}), "list"),
    "shard as text": (changed("shards", to=["a"]), "exactly the keys"),
    "file twice": (changed("shards", to=document()["shards"] * 2), "a file twice"),
    "size": (changed("shards", 0, "size", to=1 << 60), "whole number"),
    "digest": (changed("shards", 0, "sha256", to="0" * 63 + "G"), "must be like"),
    "no shard": (changed("shards", to=[]), "in no shard"),
    "unlisted": (changed("tensors", to={"value": {}}), "not under tensors"),
    "kind": (changed("tensors", to={"Value": document()["tensors"]["value"]}), "must be like"),
    "surrogate": (changed("tensors", "value", "\ud800", to={"dtype": "F32", "shape": [1]}), "printable"),
    "long name": (changed("tensors", "value", "n" * 2000, to={"dtype": "F32", "shape": [1]}), "1 to 1,024"),
    "dtype": (changed("tensors", "value", "w", "dtype", to="F31"), "unknown number format"),
    "shape": (changed("tensors", "value", "w", "shape", to=[-1]), "whole number"),
    "overflow": (changed("tensors", "value", "w", "shape", to=[1 << 30, 1 << 30]), "elements"),
    "dimensions": (changed("tensors", "value", "w", "shape", to=[1] * 17), "at most 16"),
    "gap": (changed("tensors", "value", "w", "shape", to=[2]), "[1:2] is in no shard"),
    "overlap": (changed(*PLACES, to=["0:1", "0:1"]), "in more than one piece"),
    "outside": (changed(*PLACES, to=["0:2"]), "not inside"),
    "empty range": (changed(*PLACES, to=["0:0"]), "is written like"),
    "backwards": (changed(*PLACES, to=["3:1"]), "not inside"),
    "place": (changed(*PLACES, to=["0-1"]), "is written like"),
    "place of two": (changed(*PLACES, to=["0:1, 0:1"]), "2 dimensions"),
    "long number": (changed(*PLACES, to=["0:" + "9" * 5000]), "is written like"),
    "place as number": (changed(*PLACES, to=[1]), "list of places"),
    "no places": (changed(*PLACES, to=[]), "list of places"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_crafted_manifests_are_refused(name):
    given, said = DOCUMENTS[name]
    with pytest.raises(InputError) as caught:
        read_manifest(sealed(given), where="m.json")
    assert said in str(caught.value)
    assert "m.json" in str(caught.value)


def test_that_manifest_is_good_without_the_change():
    assert read_manifest(sealed(document()), where="m.json").run == "r"
    with pytest.raises(InputError, match="must be a mapping"):
        strict_json(b"[]", where="m.json")


def test_a_manifest_that_is_too_large_is_not_read(root):
    path = root / step_name(20) / MANIFEST
    os.truncate(path, manifests.MOST_BYTES + 1)
    assert_falls_back(root, file=MANIFEST, said="at most 64 MiB")


def test_a_long_list_of_overlaps_is_not_gone_through(monkeypatch):
    counted, real = [], manifests.np.ix_
    monkeypatch.setattr(manifests.np, "ix_", lambda *given: counted.append(1) or real(*given))
    piece = Piece(name="w", kind="value", shape=(4,), dtype="F32", place=(((1, 4),),))
    pieces = tuple(replace(piece, number=number) for number in range(1000))
    shard = Shard(file="a.safetensors", size=1, sha256="0" * 64, pieces=pieces)
    assert "[1:4] is in more than one piece" in faults_of_cover(manifest_of(1, [shard]))[0]
    assert len(counted) == 3  # of two cells


def test_a_tensor_cut_too_finely_is_refused_in_no_time():
    lines = " ".join(f"{n}:{n + 1}" for n in range(0, 8192, 2))
    place = manifests._place_of(f"{lines}, {lines}", (8192, 8192))
    piece = Piece(name="w", kind="value", shape=(8192, 8192), dtype="F32", place=place)
    shard = Shard(file="a.safetensors", size=1, sha256="0" * 64, pieces=(piece,))
    (fault,) = faults_of_cover(manifest_of(1, [shard]))
    assert "is cut into more than" in fault


# --- small parts ---


def test_places_are_written_as_read():
    for shape, place, text in (
        ((16, 16), (((0, 4), (8, 12)), ((0, 16),)), "0:4 8:12, 0:16"),
        ((), (), ""),
        ((4,), ((),), ""),
        ((4, 2), ((), ((0, 2),)), ", 0:2"),
        ((9,), (((6, 9), (0, 2)),), "6:9 0:2"),
    ):
        assert place_text(place) == text
        assert manifests._place_of(text, shape) == place
    assert extents((((0, 4), (8, 12)), ((0, 16),))) == (8, 16)


def test_a_published_file_is_an_ordinary_file(root):
    mode = stat.S_IMODE((root / step_name(20) / SHARDS[0]).stat().st_mode)
    assert not mode & 0o111
