"""From a layout without a pipeline to the inner problem and back: which blocks and operators are run how.

Every number comes from the laws that the simulator uses (`sim.estimate`, `sim.memory`), so that the time of a selection
is the simulated one, in picoseconds; its memory is never below the simulated one. Two kinds of choices per block: all
of its operators together (a bundle: one collective each way), or each operator by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wavetrain.cost.kernels import Split
from wavetrain.cost.layers import local_parameters
from wavetrain.cost.memory import Unit as Held
from wavetrain.model.limits import divisors
from wavetrain.model.operator import Operator, slice_counts
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import EVERY, OperatorChoice, Plan
from wavetrain.planner.problem import MILLION, Option, Problem, Selection, Unit
from wavetrain.planner.question import Question
from wavetrain.planner.rates import Rates, first_row
from wavetrain.planner.space import node_group
from wavetrain.sim.batch import Batch, Sharded
from wavetrain.sim.ending import rank_parameters, tensors_seconds
from wavetrain.sim.estimate import Estimate, estimate, part_seconds, straggling
from wavetrain.sim.gather import gather
from wavetrain.sim.memory import Place, block_ways, end_units, output_bytes, reserve_bytes, saved_bytes, static_parts

Floats = NDArray[np.float64]

PICO = 1e12
SLICES = (2, 4, 8)
WORTH = 0.01  # of a block's parameters: operators with fewer, norms and such, are not sharded by themselves
MODES = (Recompute.NONE, Recompute.FULL)


@dataclass(frozen=True)
class Instance:
    """An inner problem, and what its numbers stand for."""

    plan: Plan  # without choices
    problem: Problem
    kinds: tuple[str, ...]  # layer of every unit; nothing for the ends
    together: tuple[Choice, ...]  # of the bundles, the same for all units
    apart: dict[str, tuple[tuple[str, tuple[Choice, ...]], ...]]  # operators of a layer and their options
    slower: float  # factor for slow nodes

    def step_s(self, time: int) -> float:
        return time / MILLION / PICO * self.slower


def instance(question: Question, layout: Layout, end_shard: int, *, sliced: bool = False) -> Instance:
    """The inner problem of a layout: how embedding and head are cut is given, how blocks are is to be found.

    Operators may be split into slices where that is asked for: it costs time and is for what does not fit without.
    """
    base = _base(question, layout, end_shard)
    together = tuple(_together(layout))
    batch = gather([_uniform(base, choice) for choice in together])
    found = estimate(batch, question.laws)
    made = _Builder(question, base, together, batch, found, sliced)
    return made.instance()


def _base(question: Question, layout: Layout, end_shard: int) -> Plan:
    """The layout with its ends cut as given and blocks replicated."""
    ends = dict.fromkeys(layer.name for layer in question.model.ends if layer.name in question.model.by_name)
    cut = tuple(OperatorChoice(name, EVERY, Choice(shard=end_shard)) for name in ends if end_shard > 1)
    return Plan(
        model=question.model,
        cluster=question.cluster.part(layout.num_devices),
        layout=layout,
        cut=(question.model.num_blocks,),
        seq_len=question.seq_len,
        choices=cut,
        stack=question.stack,
        precision=question.precision,
    )


def _uniform(base: Plan, choice: Choice) -> Plan:
    blocks = (OperatorChoice(name, EVERY, choice) for name in base.model.block_counts)
    return replace(base, choices=(*base.choices, *blocks))


def _together(layout: Layout) -> Iterator[Choice]:
    """Replicated first: what all else is compared with."""
    for mode in MODES:
        again = mode is Recompute.FULL
        yield Choice(recompute=again)
        for group in divisors(layout.dp)[1:]:
            for keep in (True, False):
                yield Choice(shard=group, keep=keep, recompute=again)


@dataclass
class _Builder:
    """Numbers of one layout, gathered once."""

    question: Question
    base: Plan
    together: tuple[Choice, ...]
    batch: Batch
    found: Estimate
    slices: bool
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        self.rates = Rates(self.question, first_row(self.batch), float(rank_parameters(self.batch)[0]))
        self.grown = 1 + self.question.laws.fragmentation
        self.once = float(self.batch.microbatches[0]) <= 1
        self.ways = block_ways(self.batch, self.question.laws)
        self.output = float(output_bytes(self.batch)[0])
        one = np.ones((1, len(self.batch.tp)))
        place = Place(np.zeros((1, *self.batch.blocks.shape)), one, one)
        self.first, self.last = (_scalar(unit) for unit in end_units(self.batch, place))
        saved = saved_bytes(self.batch, self.question.laws)
        self.logits, self.saved_ends = float(saved.logits[0]), float(saved.embedding[0] + saved.head[0])
        self.ends_static = float(
            sum(part[0, 0] for part in static_parts(self.batch, place, self.question.laws).values())
        )

    def instance(self) -> Instance:
        layers = tuple(self.base.model.block_counts)
        apart = {name: self._operators(name) for name in layers}
        units, kinds = [self._ends_unit()], [""]
        names = [run.layer for run in self.base.model.blocks for _ in range(run.count)]
        at = 0
        for (name, first, last), group in groupby(_places(names)):
            count = len(list(group))
            units.append(self._unit(layers.index(name), name, count, (first, last), apart[name]))
            kinds.append(name)
            at += count
        laws, layout = self.question.laws, self.base.layout
        wide = layout.dp * layout.data_stride * layout.cp > self.batch.node_devices
        share = round(MILLION * (laws.network_exposed if wide else laws.link_exposed))
        shown = laws.gradient_exposed if self.batch.stack.gradient_overlap else 1.0
        problem = Problem(
            units=tuple(units),
            limit=int(self.question.capacity_bytes),
            microbatches=layout.num_microbatches,
            forward_share=share,
            backward_share=share,
            reduction_share=round(MILLION * shown),
            fixed=_ps(self._fixed_s(names)),
        )
        slower = 1 + float(straggling(self.batch, laws)[0])
        return Instance(self.base, problem, tuple(kinds), self.together, apart, slower)

    def _fixed_s(self, names: Sequence[str]) -> float:
        """What every selection takes: kernels of blocks, both ends, the host."""
        layers, found = tuple(self.base.model.block_counts), self.found.variants
        each = found.f_s[0] + found.b_s[0]  # of the first row: replicated, nothing computed again
        blocks = sum(float(each[layers.index(name)]) for name in names)
        ends = float(self.found.embedding.total_s[0] + self.found.head.total_s[0])
        once = self.question.laws.step_s + float(tensors_seconds(self.batch, self.question.laws)[0])
        return self.base.layout.num_microbatches * (blocks + ends) + once

    def _ends_unit(self) -> Unit:
        """Embedding and head: what they hold, and their part of the end of a step."""
        choice = Choice(shard=int(self.batch.end_group[0]))
        parameters = self.batch.facts.parameters
        number = float(parameters[self.batch.embedding[0]] + parameters[self.batch.head[0]])
        reduction_s, after_s = self.rates.reduction_s(choice)
        first, last = self.first, self.last
        begins = max(2 * first.gathered, first.gathered + first.reduced + first.scattered + self.output) + last.shard
        reserve = float(reserve_bytes(np.zeros(1), self.question.laws)[0])
        option = Option(
            label="ends",
            fixed=_ps(number * (self.rates.optimizer_s(choice) + after_s)),
            reduction=_ps(number * reduction_s),
            held=_bytes(self.ends_static + reserve + self.grown * self.saved_ends),
            own=_bytes(self.grown * begins),
        )
        return Unit(operators=((option,),))

    def _unit(
        self,
        kind: int,
        name: str,
        count: int,
        place: tuple[bool, bool],
        apart: tuple[tuple[str, tuple[Choice, ...]], ...],
    ) -> Unit:
        found = self.found.variants
        forward_s = float((found.f_s - found.shard_f_s)[0, kind])
        backward_s = float(found.hiding_s[0, kind])
        bundles = tuple(self._bundle(row, kind, place) for row in range(len(self.together)))
        own = self._own(kind, name, apart, place) if apart else ()
        return Unit(forward=_ps(forward_s), backward=_ps(backward_s), operators=own, bundles=bundles, count=count)

    # --- all operators together ---

    def _bundle(self, row: int, kind: int, place: tuple[bool, bool]) -> Option:
        found, choice, ways = self.found.variants, self.together[row], self.ways
        m = self.base.layout.num_microbatches
        whole_s = float((found.f_s + found.b_s)[row, kind])
        more_s = whole_s - float((found.f_s + found.b_s)[0, kind])
        number = float(self.batch.facts.parameters[self.batch.blocks[row, kind]])
        g, k, r, s = (
            float(getattr(ways, part)[row, kind].max()) for part in ("gathered", "kept", "reduced", "scattered")
        )
        saved, working, freed, shard = (
            float(getattr(ways, part)[row, kind]) for part in ("saved", "working", "freed", "shard")
        )
        own = max(
            self._moments(g, k, r, s, place, working=working, saved=saved),
            self._beginning(r, place) - saved - freed + shard,
        )
        return self._option(
            choice,
            number,
            label=_label(choice),
            fixed_s=m * more_s,
            hides_s=self._hides_s(row, kind),
            saved=self.grown * saved + freed,
            left=self.grown * shard,
            own=self.grown * own,
        )

    def _hides_s(self, row: int, kind: int) -> float:
        """What a backward grows by that computes things again."""
        hiding = self.found.variants.hiding_s
        return float(hiding[row, kind] - hiding[0, kind])

    def _moments(
        self, g: float, k: float, r: float, s: float, place: tuple[bool, bool], *, working: float, saved: float
    ) -> float:
        """The fullest moment of a block (`cost.memory.walked_bytes`), on top of what it and those before it saved."""
        is_first, is_last = place
        last, free = self.last, g - k
        ahead = self.first.gathered if is_first else free
        behind = last.reduced if is_last else r
        moments = [2 * g - k + ahead + behind + working + last.shard, 3 * g - k + self.output - saved]
        if is_last:
            moments += [
                free + ahead + r + s + self.output - saved,
                2 * last.gathered + g + self.logits,
                last.gathered + last.reduced + last.scattered + free + self.output,
            ]
        return max(moments)

    def _beginning(self, r: float, place: tuple[bool, bool]) -> float:
        """The embedding's moment, which needs to know the block behind it."""
        return 2 * self.first.gathered + r + self.last.shard if place[0] else 0.0

    # --- operators by themselves ---

    def _operators(self, name: str) -> tuple[tuple[str, tuple[Choice, ...]], ...]:
        """Operators of a layer that are worth a choice, with what may be done with each; the others are replicated."""
        layout = self.base.layout
        split = Split(layout.tp, layout.sequence_parallel, layout.cp)
        node = node_group(self.batch.node_devices, layout.tp, layout.cp, layout.dp)
        operators = self.base.model.by_name[name].operators
        numbers = [local_parameters(operator, split) for operator in operators]
        found = []
        for operator, number in zip(operators, numbers, strict=True):
            if layout.dp == 1 or number < WORTH * sum(numbers):
                continue
            sliced = [k for k in SLICES if k in slice_counts(operator)] if self.slices else []
            choices = [Choice()]
            for group in sorted({node, layout.dp} - {1}):
                choices += [Choice(group, keep=True), Choice(group), *(Choice(group, slices=k) for k in sliced)]
            found.append((operator.name, tuple(choices)))
        return tuple(found)

    def _own(
        self, kind: int, name: str, apart: tuple[tuple[str, tuple[Choice, ...]], ...], place: tuple[bool, bool]
    ) -> tuple[tuple[Option, ...], ...]:
        layout = self.base.layout
        split = Split(layout.tp, layout.sequence_parallel, layout.cp)
        by_name = {operator.name: operator for operator in self.base.model.by_name[name].operators}
        made = [
            self._activations(kind),
            self._others([by_name[o] for o in by_name if o not in dict(apart)], split),
        ]
        for operator, choices in apart:
            number = float(local_parameters(by_name[operator], split))
            gathers, scatters = self._travel(number, choices)
            options = []
            for choice, gather_s, scatter_s in zip(choices, gathers, scatters, strict=True):
                options.append(self._alone(kind, operator, choice, number, (gather_s, scatter_s), place))
            made.append(tuple(options))
        return tuple(made)

    def _others(self, operators: Sequence[Operator], split: Split) -> tuple[Option, ...]:
        """What is replicated whatever is chosen for the rest."""
        number = float(sum(local_parameters(operator, split) for operator in operators))
        own = self.grown * self._moments(0.0, 0.0, 0.0, 0.0, (False, False), working=0.0, saved=0.0)
        return (self._option(Choice(), number, label="others", fixed_s=0.0, own=own, saved=0.0, left=0.0),)

    def _activations(self, kind: int) -> tuple[Option, ...]:
        """What a block keeps of its activations, and computes again."""
        found, made = self.found.variants, []
        per_mode = len(self.together) // len(MODES)
        for row in range(0, len(self.together), per_mode):  # the replicated choice of every mode
            again_s = float((found.f_s + found.b_s)[row, kind]) - float((found.f_s + found.b_s)[0, kind])
            made.append(
                Option(
                    label=str(MODES[row // per_mode]),
                    fixed=_ps(self.base.layout.num_microbatches * again_s),
                    hides=_ps(self._hides_s(row, kind)),
                    saved=_bytes(self.grown * float(self.ways.saved[row, kind])),
                    beside=_bytes(self.grown * float(self.ways.working[row, kind])),
                )
            )
        return tuple(made)

    def _travel(self, number: float, choices: Sequence[Choice]) -> tuple[list[float], list[float]]:
        """Gathering an operator's parameters and scattering its gradients, for every choice."""
        shape = (1, len(choices))
        group = np.array([[float(choice.shard) for choice in choices]])
        part = Sharded(
            parameters=np.where(group > 1, number, 0.0),
            group=group,
            keep=np.array([[choice.keep for choice in choices]]),
            collectives=np.array([[float(choice.slices) for choice in choices]]),
            whole=np.full(shape, number),
            named=np.ones(shape, dtype=bool),
        )
        gather_s, scatter_s = part_seconds(self.rates.batch, part)
        return gather_s[0].tolist(), scatter_s[0].tolist()

    def _alone(
        self,
        kind: int,
        operator: str,
        choice: Choice,
        number: float,
        travel: tuple[float, float],
        place: tuple[bool, bool],
    ) -> Option:
        precision, m = self.batch.precision, self.base.layout.num_microbatches
        gather_s, scatter_s = travel
        cut = number / choice.slices if choice.shard > 1 else 0.0
        g, r = cut * precision.compute.num_bytes, cut * precision.gradients.num_bytes
        k = g if choice.keep else 0.0
        least_working = float(self.ways.working[0, kind])
        own = max(
            self._moments(g, k, r, r / choice.shard, place, working=0.0, saved=0.0),
            self._beginning(r, place) - least_working,
        )
        more_s = self._sliced(kind, operator, choice)
        kept = number * precision.compute.num_bytes if choice.keep else 0.0
        shard = r / choice.shard * choice.slices if self.once else 0.0
        return self._option(
            choice,
            number,
            label=_label(choice),
            fixed_s=m * more_s,
            forward_s=gather_s / m if choice.keep else gather_s,
            backward_s=scatter_s + (0.0 if choice.keep else gather_s),
            saved=kept if self.once else 0.0,
            left=self.grown * shard,
            beside=self.grown * shard if place[0] else 0.0,  # its shards are there when the embedding's turn comes
            own=self.grown * own,
        )

    def _sliced(self, kind: int, operator: str, choice: Choice) -> float:
        """What products lose that are computed in slices, per microbatch."""
        if choice.slices == 1:
            return 0.0
        key = (kind, operator, choice.slices)
        if not self.losses:
            self._measure_slices()
        return self.losses.get(key, 0.0)

    losses: dict[tuple[int, str, int], float] = field(default_factory=dict)

    def _measure_slices(self) -> None:
        layers = tuple(self.base.model.block_counts)
        keys, plans = [], [self.base]
        for kind, name in enumerate(layers):
            for operator, choices in self._operators(name):
                for slices in sorted({choice.slices for choice in choices} - {1}):
                    keys.append((kind, operator, slices))
                    chosen = OperatorChoice(name, operator, Choice(slices=slices))
                    plans.append(replace(self.base, choices=(*self.base.choices, chosen)))
        times = estimate(gather(plans), self.question.laws).variants
        whole = times.f_s + times.b_s
        for row, key in enumerate(keys, start=1):
            self.losses[key] = max(0.0, float(whole[row, key[0]] - whole[0, key[0]]))

    # --- both ---

    def _option(
        self, choice: Choice, number: float, *, label: str, fixed_s: float, own: float, **rest: float
    ) -> Option:
        """An option with what its parameters cost beside their gathering."""
        reduction_s, after_s = self.rates.reduction_s(choice)
        kept = number * self.batch.precision.compute.num_bytes if choice.keep else 0.0
        copies = self.batch.stack.kept_copies - (1.0 if self.once else 0.0)
        return Option(
            label=label,
            fixed=_ps(fixed_s + number * (self.rates.optimizer_s(choice) + after_s)),
            forward=_ps(rest.get("forward_s", 0.0)),
            backward=_ps(rest.get("backward_s", 0.0)),
            hides=_ps(rest.get("hides_s", 0.0)),
            reduction=_ps(number * reduction_s),
            held=_bytes(number * self.rates.state_bytes(choice) + copies * kept),
            saved=_bytes(rest["saved"]),
            left=_bytes(rest["left"]),
            beside=_bytes(rest.get("beside", 0.0)),
            own=_bytes(own),
        )


def _places(names: Sequence[str]) -> Iterator[tuple[str, bool, bool]]:
    """Every block with whether it is next to the embedding or the head."""
    for number, name in enumerate(names):
        yield name, number == 0, number == len(names) - 1


class _End(NamedTuple):
    """Bytes of the embedding or the head, as `cost.memory.Unit` has them."""

    gathered: float
    kept: float
    reduced: float
    scattered: float
    shard: float
    freed: float


def _scalar(unit: Held) -> _End:
    return _End(*(float(np.asarray(getattr(unit, name)).reshape(-1)[0]) for name in _End._fields))


def _label(choice: Choice) -> str:
    words = "replicate" if choice.shard == 1 else f"shard {choice.shard}{' keep' if choice.keep else ''}"
    return words + (f" slices {choice.slices}" if choice.slices > 1 else "") + (" again" if choice.recompute else "")


def _ps(seconds: float) -> int:
    return max(0, round(seconds * PICO))


def _bytes(number: float) -> int:
    return max(0, int(np.ceil(number)))


# --- and back ---


def plan_of(made: Instance, selection: Selection) -> Plan:
    """The plan that a selection stands for; neighbours that are run alike are one entry."""
    found: list[tuple[str, dict[str, Choice], int]] = []  # layer, choices by operator, blocks
    for unit, runs in enumerate(selection):
        name = made.kinds[unit]
        if not name:
            continue
        for run in runs:
            chosen = _choices(made, name, run.picks)
            if found and found[-1][:2] == (name, chosen):
                found[-1] = (name, chosen, found[-1][2] + run.count)
            else:
                found.append((name, chosen, run.count))
    items, first = list(made.plan.choices), 0
    for name, chosen, count in found:
        items += [OperatorChoice(name, operator, choice, first, count) for operator, choice in chosen.items()]
        first += count
    return replace(made.plan, choices=tuple(items))


def _choices(made: Instance, name: str, picks: tuple[int, ...]) -> dict[str, Choice]:
    if len(picks) == 1 and picks[0] < 0:
        return {EVERY: made.together[-1 - picks[0]]}
    mode, _, *rest = picks
    again = MODES[mode] is Recompute.FULL
    chosen = {EVERY: Choice(recompute=again)}
    for (operator, choices), pick in zip(made.apart[name], rest, strict=True):
        if choices[pick] != Choice():
            chosen[operator] = replace(choices[pick], recompute=again)
    return chosen
