"""Where a run's modules come from: built in, transformers' own by a config.json, or a user's function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wavetrain.base.document import read_document
from wavetrain.base.errors import InputError, Problem
from wavetrain.model import read_model
from wavetrain.model.operator import Linear
from wavetrain.plan.plan import Plan
from wavetrain.runtime.composed import ties_of
from wavetrain.runtime.hf import parts_of_config
from wavetrain.runtime.parts import Part, Parts
from wavetrain.runtime.units import check_parameters


def builder(plan: Plan, *, config: Path | None, module: str | None, seed: int) -> Callable[[], Parts] | None:
    """How to make the parts of a run's model; None: the built-in ones."""
    if config is not None and module is not None:
        raise InputError(Problem(where="--module", rule="means nothing beside --config"))
    if config is not None:
        read = _config(config, plan)
        return lambda: parts_of_config(read)
    if module is not None:
        build = _function(module)
        return lambda: whole_module(build, plan, seed=seed, where=module)
    return None


def _config(path: Path, plan: Plan) -> Any:
    """transformers' configuration of the plan's model; what may be a stranger's is read by our own reader first."""
    node = read_document(path)
    stated = node.plain()
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise InputError(
            Problem(where="--config", rule="needs the package transformers", remedy="pip install transformers")
        ) from None
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    kind = stated.get("model_type") if isinstance(stated, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise InputError(
            Problem(where=str(path), key="model_type", value=kind, rule="transformers knows no such model")
        )
    described = read_model(node).parameters()  # bounded; transformers would build whatever it says
    check_parameters({parameter.name: parameter.shape for parameter in described}, plan)
    try:
        return kinds[kind].from_dict(stated)
    except Exception as error:  # transformers' own rules, by many names
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise InputError(Problem(where=str(path), rule=f"transformers refuses it: {reason.strip()}")) from None


def _function(named: str) -> Callable[[], Any]:
    package, _, name = named.partition(":")
    where = f"--module {named}"
    if not package or not name:
        raise InputError(Problem(where=where, rule="must be package:function", remedy="my_model:build"))
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as python -m has it
    try:
        found = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError) as error:
        raise InputError(Problem(where=where, rule=f"can't be imported: {error}")) from None
    if not callable(found):
        raise InputError(Problem(where=where, rule=f"is a {type(found).__name__}, not a function that builds a module"))
    return found  # type: ignore[no-any-return]


def whole_module(build: Callable[[], Any], plan: Plan, *, seed: int, where: str = "module") -> Parts:
    """A user's module as parts: nothing before it and nothing after it. Parts themselves are taken as they are."""
    torch.manual_seed(seed)  # every rank builds the same values
    made = build()
    if isinstance(made, Parts):
        return made
    if not isinstance(made, nn.Module):
        raise InputError(Problem(where=where, rule=f"built a {type(made).__name__}, not a torch.nn.Module"))
    if plan.layout.pp > 1:
        rule = "a module that was not taken apart can't be cut into stages"
        remedy = "pp of 1, or a function that gives wavetrain.runtime.parts.Parts"
        raise InputError(
            Problem(where="plan", key="layout.pp", value=plan.layout.pp, rule=rule, legal=("1",), remedy=remedy)
        )
    names = {f"module.{path}": path for path, _ in made.named_parameters(remove_duplicate=False)}
    ties = ties_of(made)
    linears = [o for layer in plan.model.layers for o in layer.operators if isinstance(o, Linear)]
    return Parts(
        embedding=Part(Logits(made), names),
        blocks=(),
        head=Part(nn.Identity(), {}),
        hidden=0,
        vocab=linears[-1].outputs if linears else 0,  # the last one makes the logits
        ties=ties,
        is_whole=True,
    )


class Logits(nn.Module):
    """What a module makes of tokens, where transformers' models put it in an object."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        made = self.module(tokens)
        return getattr(made, "logits", made)  # type: ignore[no-any-return]
