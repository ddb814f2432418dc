"""Stages: any cut computes what the whole computes, holds its own values only, and ties what is tied."""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.base.document import parse_yaml
from wavetrain.model.read import read_model
from wavetrain.runtime.parts import Parts, boundary_shape
from wavetrain.runtime.stages import IGNORED, Stage, cut_into_stages, load, materialize
from wavetrain.runtime.transformer import parts_of
from wavetrain.schedule.placement import bidirectional, loop, snake

BLOCKS, SEQ, VOCAB, HIDDEN = 5, 16, 97, 32
FAMILIES = ("gpt", "gpt2", "llama", "qwen2", "bert")


def small(family: str, more: str = "") -> Parts:
    text = f"family: {family}\nlayers: {BLOCKS}\nhidden: {HIDDEN}\nheads: 4\nvocab: {VOCAB}\nseq_len: {SEQ}\nffn: 48\n"
    return parts_of(read_model(parse_yaml(text + more, file="model.yaml")))


PARTS = {family: small(family) for family in FAMILIES} | {"llama-tied": small("llama", "tied: true\n")}
TIED = [name for name, parts in PARTS.items() if parts.twins]

cuts = st.lists(st.integers(0, BLOCKS), max_size=7).map(
    lambda places: tuple(b - a for a, b in zip([0, *sorted(places)], [*sorted(places), BLOCKS], strict=True))
)


def made(parts: Parts, cut, wanted=None, **how) -> dict[int, Stage]:
    stages = cut_into_stages(parts, cut, range(len(cut)) if wanted is None else wanted)
    materialize(stages, **{"seed": 7} | how)
    return stages


def batch(size: int = 2):
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(VOCAB, (2, size, SEQ), generator=generator)
    targets[0, :3] = IGNORED
    return tokens, targets


def loss_and_gradients(stages: dict[int, Stage]):
    tokens, targets = batch()
    x = tokens
    for stage in stages.values():
        x = stage(x, targets)
    x.backward()
    return x.detach(), {name: p.grad for stage in stages.values() for name, p in stage.named()}


@cache
def whole(name: str):
    return loss_and_gradients(made(PARTS[name], (BLOCKS,)))


@pytest.mark.parametrize("name", PARTS)
@settings(max_examples=12)
@given(cuts)
def test_any_cut_gives_the_whole_models_loss_and_gradients(name, cut):
    loss, gradients = loss_and_gradients(made(PARTS[name], cut))
    expected_loss, expected = whole(name)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", PARTS)
@settings(max_examples=12)
@given(cuts, st.data())
def test_a_rank_has_its_own_stages_with_the_same_values_as_in_any_layout(name, cut, data):
    wanted = data.draw(st.sets(st.integers(0, len(cut) - 1)))
    everything = dict(made(PARTS[name], (BLOCKS,))[0].named())
    stages = made(PARTS[name], cut, sorted(wanted))
    assert stages.keys() == wanted
    for stage in stages.values():
        assert all(torch.equal(parameter, everything[key]) for key, parameter in stage.named())


@pytest.mark.parametrize("name", PARTS)
def test_every_parameter_is_in_one_stage_under_its_name(name):
    stages = made(PARTS[name], (0, 2, 1, 2, 0))
    names = [key for stage in stages.values() for key, _ in stage.named()]
    assert sorted(names) == sorted(key for key, _ in PARTS[name].named())
    assert len({id(p) for stage in stages.values() for p in stage.parameters()}) == len(names)
    assert [len(stage.blocks) for stage in stages.values()] == [0, 2, 1, 2, 0]
    assert [(stage.is_first, stage.is_last) for stage in stages.values()] == [
        (True, False),
        (False, False),
        (False, False),
        (False, False),
        (False, True),
    ]


def test_forward_is_the_composition():
    first, middle, last = made(PARTS["gpt"], (1, 3, 1)).values()
    tokens, targets = batch()
    hidden = first.run(first.enter(tokens))
    assert torch.equal(first(tokens), hidden)
    assert torch.equal(middle(hidden), middle.run(hidden))
    assert torch.equal(last(hidden, targets), last.leave(last.run(hidden), targets))
    assert hidden.shape == boundary_shape(PARTS["gpt"], microbatch_size=2, seq_len=SEQ)


def test_the_loss_is_a_sum_over_the_targets_that_count():
    (stage,) = made(PARTS["gpt"], (BLOCKS,)).values()
    tokens, targets = batch()
    logits = stage.head(stage.run(stage.enter(tokens)))
    chosen = F.log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(stage(tokens, targets), -chosen[targets != IGNORED].sum())
    assert stage(tokens, torch.full_like(targets, IGNORED)) == 0
    parts = [stage(tokens[i : i + 1], targets[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(sum(parts), stage(tokens, targets))


# --- ties ---


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("cut", [(BLOCKS,), (2, 3), (0, BLOCKS, 0)])
def test_both_ends_on_one_rank_share_storage_and_have_their_own_gradients(name, cut):
    stages = made(PARTS[name], cut)
    first, last = (dict(stages[number].named()) for number in (0, len(cut) - 1))
    ((shared, tied),) = PARTS[name].twins
    assert first[shared] is not last[tied]
    assert first[shared].data_ptr() == last[tied].data_ptr()
    _, gradients = loss_and_gradients(stages)
    assert not torch.equal(gradients[shared], gradients[tied])
    with torch.no_grad():
        first[shared].add_(1)
    assert torch.equal(first[shared], last[tied])


@pytest.mark.parametrize("name", TIED)
def test_the_two_gradients_of_a_tied_weight_add_up_to_that_of_one_parameter(name):
    stages = made(PARTS[name], (2, 3), dtype=torch.float64)
    _, gradients = loss_and_gradients(stages)
    ((shared, tied),) = PARTS[name].twins
    single = made(PARTS[name], (BLOCKS,), dtype=torch.float64)
    weight = dict(single[0].named())[shared]
    for owner in single[0].modules():  # one Parameter for both ends
        for leaf, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.data_ptr() == weight.data_ptr():
                setattr(owner, leaf, weight)
    loss_and_gradients(single)
    torch.testing.assert_close(gradients[shared] + gradients[tied], weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", TIED)
def test_ends_on_different_ranks_start_equal(name):
    first, last = (dict(made(PARTS[name], (2, 3), [number])[number].named()) for number in (0, 1))
    ((shared, tied),) = PARTS[name].twins
    assert torch.equal(first[shared], last[tied])
    assert first[shared].data_ptr() != last[tied].data_ptr()


def test_a_masked_head_has_one_bias_by_two_names():
    parts = PARTS["bert"]
    (stage,) = made(parts, (BLOCKS,)).values()
    assert stage.head.head.bias is stage.head.head_bias
    assert "cls.predictions.bias" in dict(stage.named())
    assert "cls.predictions.decoder.bias" not in dict(stage.named())
    untied = parts_of(
        read_model(
            parse_yaml(
                "family: bert\nlayers: 2\nhidden: 8\nheads: 2\nvocab: 9\nseq_len: 4\ntied: false\n", file="m.yaml"
            )
        )
    )
    (stage,) = made(untied, (2,)).values()
    assert {"cls.predictions.bias", "cls.predictions.decoder.bias"} <= dict(stage.named()).keys()


# --- several stages on a rank ---


@pytest.mark.parametrize("placement", [loop(2, 2), snake(2, 1), snake(1, 2), loop(4, 1)])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_ranks_together_are_the_model(placement, name):
    cut = (2, 0, 1, 2)
    ranks = [made(PARTS[name], cut, local) for local in placement.local]
    together = {number: stage for stages in ranks for number, stage in stages.items()}
    loss, _ = loss_and_gradients(dict(sorted(together.items())))
    assert torch.equal(loss, whole(name)[0])
    if placement == snake(2, 1) and name == "gpt":  # first and last stage share rank 0
        ((shared, tied),) = PARTS[name].twins
        assert dict(ranks[0][0].named())[shared].data_ptr() == dict(ranks[0][3].named())[tied].data_ptr()


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_two_chains_are_two_sets_of_parameters(name):
    placement, cut = bidirectional(4), (1, 1, 2, 1)
    assert placement.depth == len(cut)
    for local in placement.local:
        stages = made(PARTS[name], cut, local)
        held = [p for stage in stages.values() for p in stage.parameters()]
        assert len({p.data_ptr() for p in held}) == len({id(p) for p in held}) == len(held)
        assert {stage.chain for stage in stages.values()} == {0, 1}
    everything = made(PARTS[name], cut, range(8))
    for number in range(4):
        one, other = everything[number], everything[number + 4]
        assert (one.is_first, one.is_last) == (other.is_first, other.is_last) == (number == 0, number == 3)
        for (key, a), (same, b) in zip(one.named(), other.named(), strict=True):
            assert key == same
            assert torch.equal(a, b)
            assert a.data_ptr() != b.data_ptr()
    for shared, tied in PARTS[name].twins:  # each chain's ends share with each other
        for first, last in ((0, 3), (4, 7)):
            one, other = dict(everything[first].named())[shared], dict(everything[last].named())[tied]
            assert one.data_ptr() == other.data_ptr()


def test_stages_do_not_share_tables_with_other_stages():
    """Ranks may be threads of one process: what a stage keeps between calls is its own."""
    stages = made(PARTS["llama"], (2, 3))
    first, last = ({block.attention.rotary for block in stage.blocks} for stage in stages.values())
    assert len(first) == len(last) == 1
    assert first.isdisjoint(last)


# --- where values are ---


def test_nothing_is_allocated_before_or_beyond_the_ranks_stages():
    """Tables of 56 GB are no hindrance to the rank that has a block in the middle."""
    text = "layers: 3\nhidden: 1024\nheads: 4\nffn: 8\nvocab: 4000000\nseq_len: 10000000\n"
    parts = parts_of(read_model(parse_yaml(text, file="m.yaml")))
    assert parts.embedding.module.tokens.weight.nbytes > 10**10
    stages = cut_into_stages(parts, (1, 1, 1), [1])
    assert all(parameter.is_meta for parameter in stages[1].parameters())
    materialize(stages, seed=1)
    assert not any(parameter.is_meta for parameter in stages[1].parameters())
    assert all(parameter.is_meta for _, parameter in parts.named())


def test_parts_can_be_cut_again():
    made(PARTS["gpt"], (2, 3))
    again = made(PARTS["gpt"], (2, 3), seed=8)
    assert all(parameter.is_meta for _, parameter in PARTS["gpt"].named())
    assert torch.isfinite(loss_and_gradients(again)[0])


def test_seeds_differ():
    one, other = (dict(made(PARTS["gpt"], (BLOCKS,), seed=seed)[0].named()) for seed in (1, 2))
    assert not torch.equal(one["layers.0.mlp.up.weight"], other["layers.0.mlp.up.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", PARTS)
def test_dtypes(dtype, name):
    first, last = made(PARTS[name], (2, 3), dtype=dtype).values()
    tokens, targets = batch()
    hidden = first(tokens)
    assert hidden.dtype == dtype
    loss = last(hidden, targets)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.item() / (targets != IGNORED).sum() == pytest.approx(math.log(VOCAB), rel=0.1)


def test_boundaries_may_be_narrower_than_the_arithmetic():
    first, last = made(PARTS["llama"], (2, 3), boundary_dtype=torch.bfloat16).values()
    tokens, targets = batch()
    hidden = first.run(first.enter(tokens))
    assert hidden.dtype == torch.bfloat16
    received = hidden.detach().requires_grad_()
    last(received, targets).backward()
    assert received.grad.dtype == torch.bfloat16
    hidden.backward(received.grad)
    assert {p.grad.dtype for stage in (first, last) for p in stage.parameters()} == {torch.float32}


def test_values_can_be_loaded_by_name():
    source = made(PARTS["gpt2"], (BLOCKS,), seed=1)
    values = {key: p.detach() for key, p in source[0].named() if key != "lm_head.weight"}  # as files have them
    target = made(PARTS["gpt2"], (2, 3), seed=2)
    load(target, values)
    assert torch.equal(loss_and_gradients(target)[0], loss_and_gradients(source)[0])


@pytest.mark.parametrize("cut", [(1, 2), (3, 3), (6, -1), ()])
def test_a_cut_must_deal_out_the_blocks(cut):
    with pytest.raises(ValueError, match="5 blocks"):
        cut_into_stages(PARTS["gpt"], cut, [0])
