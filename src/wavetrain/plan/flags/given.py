"""The command line's `--megatron` and `--deepspeed` with the options beside them, as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import printable
from wavetrain.cluster.read import load_cluster
from wavetrain.model.read import load_model
from wavetrain.plan.flags.deepspeed import plan_of_deepspeed
from wavetrain.plan.flags.megatron import plan_of_megatron
from wavetrain.plan.plan import Plan

MEGATRON, DEEPSPEED = "--megatron", "--deepspeed"
BESIDE_MEGATRON = ("--model", "--cluster", "--attention", "--elementwise")
SAID_BY_DEEPSPEED = ("--shard", "--keep", "--zero1", "--precision", "--gradients", "--overlap")
MOST_DEGREE = 10_000_000


def plan_of_given(given: Mapping[str, Any]) -> tuple[Plan, list[str]]:
    """The plan that options mean, and a line for each flag or key that was not looked at."""
    if MEGATRON in given and DEEPSPEED in given:
        raise InputError(Problem(where=DEEPSPEED, rule=f"means nothing beside {MEGATRON}"))
    return _of_megatron(given) if MEGATRON in given else _of_deepspeed(given)


def _of_megatron(given: Mapping[str, Any]) -> tuple[Plan, list[str]]:
    others = [option for option in given if option not in (MEGATRON, *BESIDE_MEGATRON)]
    _refuse(others, MEGATRON)
    _require(given, ("--cluster",), MEGATRON)
    model = load_model(given["--model"]) if "--model" in given else None
    kernels = {name: given.get(f"--{name}") for name in ("attention", "elementwise")}
    return plan_of_megatron(given[MEGATRON], model=model, cluster=load_cluster(given["--cluster"]), **kernels)


def _of_deepspeed(given: Mapping[str, Any]) -> tuple[Plan, list[str]]:
    _refuse([option for option in given if option in SAID_BY_DEEPSPEED], DEEPSPEED)
    _require(given, ("--model", "--cluster"), DEEPSPEED)
    bad = {option: value for option, value in given.items() if type(value) is int and not 1 <= value <= MOST_DEGREE}
    if bad:
        rule = f"must be from 1 to {MOST_DEGREE:,}"
        raise InputError([Problem(where=option, rule=f"{value}: {rule}") for option, value in bad.items()])
    values = {option.removeprefix("--").replace("-", "_"): value for option, value in given.items()}
    path = values.pop("deepspeed")
    if "cut" in values:
        values["cut"] = _numbers(values["cut"])
    model = load_model(values.pop("model"), seq_len=values.pop("seq_len", None))
    return plan_of_deepspeed(Path(path), model=model, cluster=load_cluster(values.pop("cluster")), options=values)


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise InputError(Problem(where="--cut", rule=f"{printable(text)}: must be layers per stage, like 8,8,7,7"))
    return tuple(map(int, words))


def _refuse(options: list[str], beside: str) -> None:
    if options:
        raise InputError([Problem(where=option, rule=f"means nothing beside {beside}") for option in options])


def _require(given: Mapping[str, Any], options: tuple[str, ...], beside: str) -> None:
    missing = [option for option in options if option not in given]
    if missing:
        raise InputError([Problem(where=option, rule=f"missing beside {beside}") for option in missing])
