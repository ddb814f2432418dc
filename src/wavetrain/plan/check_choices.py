"""Rules for choices: what they name, groups that divide the replicas, slices, recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wavetrain.base.errors import Problem, nearest
from wavetrain.model.limits import closest, divisors
from wavetrain.model.operator import Attention, Operator, slice_counts
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import EVERY, OperatorChoice, Plan
from wavetrain.plan.rules import Checked, broken, each_choice


def _shards(checked: Checked) -> Iterator[Problem]:
    dp = checked.plan.layout.dp
    for key, choice in each_choice(checked.plan):
        if not checked.good(f"{key}.shard", "layout.dp"):
            continue
        if dp % choice.shard:
            legal = divisors(dp)
            rule = f"must divide dp ({dp})"
            yield broken(f"{key}.shard", choice.shard, rule, legal=legal, near=closest(choice.shard, legal))
        if choice.keep and choice.shard == 1:
            rule = "keeps gathered parameters, but shard 1 gathers none"
            remedy = f"false, or a shard of {dp}" if dp > 1 else "false"
            yield broken(f"{key}.keep", True, rule, legal=("false",), remedy=remedy)


def _operators(plan: Plan, position: int) -> tuple[Operator, ...]:
    """The operators that a choice is for: one, or all of the layer that no other choice names."""
    item = plan.choices[position]
    layer = plan.model.by_name.get(item.layer)
    if layer is None:
        return ()
    if item.operator == EVERY:
        named = {other.operator for other in plan.choices if other.layer == item.layer}
        return tuple(o for o in layer.operators if o.name not in named)
    return tuple(o for o in layer.operators if o.name == item.operator)


def _names(checked: Checked) -> Iterator[Problem]:
    model = checked.plan.model
    for position, item in enumerate(checked.plan.choices):
        key, layer = f"choices[{position}]", model.by_name.get(item.layer)
        if layer is None:
            names = tuple(model.by_name)
            near = nearest(item.layer, names)
            yield broken(f"{key}.layer", item.layer, f"{model.name} has no such layer", legal=names, near=near)
        elif item.operator != EVERY and not _operators(checked.plan, position):
            names = tuple(operator.name for operator in layer.operators)
            rule, near = f"{item.layer} has no such operator", _nearest_path(item.operator, names)
            yield broken(f"{key}.operator", item.operator, rule, legal=names, near=near)
        else:
            yield from _range(checked, position)


def _range(checked: Checked, position: int) -> Iterator[Problem]:
    """Blocks that a choice is for: some that there are, and none that an earlier choice is for."""
    plan, item, key = checked.plan, checked.plan.choices[position], f"choices[{position}]"
    blocks = plan.model.num_blocks if item.layer in plan.model.block_counts else 1
    if not checked.good(f"{key}.first", f"{key}.count"):
        return
    if item.first >= blocks:
        legal = (f"0 to {blocks - 1}",)
        yield broken(f"{key}.first", item.first, f"there are {blocks} of them", legal=legal, near=(blocks - 1,))
    elif item.count is not None and item.first + item.count > blocks:
        most = blocks - item.first
        rule = f"from block {item.first} on there are {most}"
        yield broken(f"{key}.count", item.count, rule, legal=(f"1 to {most}",), near=(most,))
    for before, other in enumerate(plan.choices[:position]):
        same = (other.layer, other.operator) == (item.layer, item.operator)
        if same and _end(other) > item.first and _end(item) > other.first:
            rule = f"has a choice already, choices[{before}]"
            yield broken(f"{key}.operator", item.operator, rule, remedy="one choice for each operator of a block")
            return


def _end(item: OperatorChoice) -> float:
    return float("inf") if item.count is None else item.first + item.count


def _nearest_path(name: str, legal: Sequence[str]) -> tuple[str, ...]:
    """Names meant by a dotted one: those that end like it first, since all of a layer's begin alike."""
    by_end = {path.rpartition(".")[2]: path for path in legal}
    ends = [by_end[end] for end in nearest(name.rpartition(".")[2], by_end)]
    return tuple(dict.fromkeys([*ends, *nearest(name, legal)]))[:3]


def _slices(checked: Checked) -> Iterator[Problem]:
    plan = checked.plan
    for position, item in enumerate(plan.choices):
        key, operators = f"choices[{position}].choice.slices", _operators(plan, position)
        if operators and checked.good(key):
            yield from _sliced(key, item.choice.slices, _slices_of(operators), item.operator)
    if checked.good("choice.slices"):
        yield from _sliced("choice.slices", plan.choice.slices, _common_slices(plan), "every operator with a product")


def _sliced(key: str, slices: int, legal: tuple[int, ...], what: str) -> Iterator[Problem]:
    if slices not in legal:
        rule = f"{what} can't be cut into so many slices"
        yield broken(key, slices, rule, legal=legal, near=closest(slices, legal))


def _common_slices(plan: Plan) -> tuple[int, ...]:
    """Slices that all operators without a choice of their own allow."""
    pairs = ((layer.name, operator) for layer in plan.model.layers for operator in layer.operators)
    chosen = {(item.layer, item.operator) for item in plan.choices}
    return _slices_of([o for layer, o in pairs if not {(layer, o.name), (layer, EVERY)} & chosen])


def _slices_of(operators: Sequence[Operator]) -> tuple[int, ...]:
    """Slices that all of some operators allow, of those that can be sliced at all."""
    free = [set(slice_counts(o)) for o in operators if o.slice_dims]
    return tuple(sorted(set.intersection(*free))) if free else (1,)


def _recompute(checked: Checked) -> Iterator[Problem]:
    """Operators are chosen one by one, or the plan says for all what is computed again; not both."""
    plan = checked.plan
    if plan.recompute is not Recompute.SELECTIVE:
        return
    for position, (key, choice) in enumerate(each_choice(plan)):
        operators = _operators(plan, position - 1) if position else ()
        if choice.recompute and not (operators and all(isinstance(o, Attention) for o in operators)):
            rule = "goes beyond what the plan computes again: its recompute is selective"
            remedy = "false, or recompute: none and every operator by its own choice, or recompute: full"
            yield broken(f"{key}.recompute", True, rule, legal=("false",), remedy=remedy)


CHOICE_RULES = (_names, _shards, _slices, _recompute)
