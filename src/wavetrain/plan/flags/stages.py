"""Layers per stage as Megatron-LM's flags say them."""

from __future__ import annotations

import re

from wavetrain.model.limits import divisors
from wavetrain.plan.flags.parse import Flags

LAYOUT = "pipeline-model-parallel-layout"
MOST_TEXT = 20_000
VIRTUAL = ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage", LAYOUT)
ENDS = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
_TEXT = re.compile(r"(?:[Et|L,]|\((?:[Et|L,]|\*\d{1,4})+\)\*\d{1,4}|\*\d{1,4})+")


def cut_of(flags: Flags, layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage, virtual ones in the order of the model; even where the flags say no more."""
    given = [name for name in VIRTUAL if flags.has(name)]
    if len(given) > 1:
        flags.complain(given[1], f"means nothing beside --{given[0]}")
    elif flags.has(LAYOUT):
        return _written(flags, layers, pp)
    elif flags.on("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"):
        return _counted(flags, layers, pp)
    per_rank = _per_rank(flags, layers, pp)
    chunks = _chunks(flags, per_rank[0], pp)
    if any(count % chunks for count in per_rank):
        flags.complain(given[0], f"{per_rank[0]} layers of a rank can't be dealt out to {chunks} stages evenly")
    return tuple(count // chunks for _ in range(chunks) for count in per_rank)


def _per_rank(flags: Flags, layers: int, pp: int) -> list[int]:
    stated = [name for name in ENDS if flags.has(name)]
    middle, left = pp - len(stated), layers - sum(flags.whole(name) for name in stated)
    if left < 0 or (left % middle if middle else left):
        name = stated[0] if stated else "pipeline-model-parallel-size"
        legal = () if stated else tuple(map(str, divisors(layers)))
        flags.complain(name, f"{left} layers can't be dealt out to {middle} ranks evenly; --{LAYOUT} can", legal=legal)
        return [layers]
    counts = [left // middle] * middle if middle else []
    if flags.has(ENDS[0]):
        counts.insert(0, flags.whole(ENDS[0]))
    return [*counts, flags.whole(ENDS[1])] if flags.has(ENDS[1]) else counts


def _chunks(flags: Flags, per_rank: int, pp: int) -> int:
    name = "num-layers-per-virtual-pipeline-stage"
    chunks = flags.whole("num-virtual-stages-per-pipeline-rank")
    if flags.has(name):
        each = flags.whole(name)
        if per_rank % each:
            flags.complain(
                name, f"must divide the {per_rank} layers of a rank", legal=tuple(map(str, divisors(per_rank)))
            )
            return 1
        chunks = per_rank // each
    if chunks > 1 and pp == 1:
        flags.complain("pipeline-model-parallel-size", "must be 2 or more: virtual stages interleave a pipeline")
    return chunks


def _counted(flags: Flags, layers: int, pp: int) -> tuple[int, ...]:
    """Embedding and loss count as a layer each where the flags say so."""
    first = flags.on("account-for-embedding-in-pipeline-split")
    last = flags.on("account-for-loss-in-pipeline-split")
    places = layers + first + last
    if places % pp:
        rule = f"{places} layers, embedding and loss counted, can't be dealt out to {pp} ranks evenly"
        flags.complain("pipeline-model-parallel-size", rule, legal=tuple(map(str, divisors(places))))
        return (layers,)
    chunks = _chunks(flags, places // pp, pp)
    if places // pp % chunks:
        flags.complain(VIRTUAL[0], f"must divide the {places // pp} layers of a rank")
        return (layers,)
    cut = [places // pp // chunks] * (pp * chunks)
    cut[0] -= first
    cut[-1] -= last
    return tuple(cut)


def _written(flags: Flags, layers: int, pp: int) -> tuple[int, ...]:
    text = flags.word(LAYOUT)
    if not _TEXT.fullmatch(text) or "**" in text or text.startswith("*"):
        flags.complain(LAYOUT, "must be stages of E, t and L between bars, like Et*3|tttt|tttL")
        return (layers,)
    text = text.replace(",", "")
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: (found[1] * int(found[2]))[: MOST_TEXT + 1], text)
        if len(text) > MOST_TEXT:
            flags.complain(LAYOUT, f"must be at most {MOST_TEXT:,} letters when written out")
            return (layers,)
    stages = text.split("|")
    cut = tuple(stage.count("t") for stage in stages)
    rules = {
        "must have one E, in front": text.count("E") != 1 or not text.startswith("E"),
        "must have one L, at the end": text.count("L") != 1 or not text.endswith("L"),
        f"has {sum(cut)} layers, and the model {layers}": sum(cut) != layers,
        f"has {len(cut)} stages, which {pp} ranks can't share evenly": len(cut) % pp > 0,
    }
    for rule in (rule for rule, broken in rules.items() if broken):
        flags.complain(LAYOUT, rule)
    return cut
