"""A user's own module and loop, on real processes, against the same loop in one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from tests.runtime.sharding import HIDDEN, SEQ, VOCAB, config_of, described, plan_for
from torch import nn

import wavetrain as wt
from wavetrain.base.errors import InputError
from wavetrain.plan import Choice, OperatorChoice
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.parallelize import accumulating, clip, groups, whole_state
from wavetrain.runtime.world import gloo_group

STEPS, PER_RANK = 3, 4


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Mixers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for mixer in self.mixers:
            hidden = mixer(hidden)
        return self.out(hidden)


def mixers():
    torch.manual_seed(2)
    return Mixers().double()


def llama():
    import transformers

    torch.manual_seed(2)
    return transformers.LlamaForCausalLM(config_of("hf-llama", True)).double().eval()


def batch(step, replicas):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (replicas * PER_RANK, SEQ + 1), generator=generator)


def loss_of(module, sequences):
    made = module(sequences[:, :-1])
    logits = getattr(made, "logits", made)
    return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def clip_plain(module, most):
    gradients = [p.grad for p in module.parameters()]
    norm = nn.utils.get_total_norm(gradients).item()
    for gradient in gradients:  # torch's own function divides by the norm and a millionth
        gradient.mul_(min(1.0, most / norm))
    return norm


def train(module, optimizer, own, *, clipped):
    """A loop as users write it: the mean loss of two microbatches."""
    seen = []
    for step in range(STEPS):
        first, second = own(step).chunk(2)
        with accumulating(module) if clipped else torch.enable_grad():
            loss = loss_of(module, first) / 2
            loss.backward()
        other = loss_of(module, second) / 2
        other.backward()
        norm = clip(module, 0.5) if clipped else clip_plain(module, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item() + other.item(), norm))
    return seen


def compare(build, plan):
    replicas = plan.layout.dp
    plain = build()
    expected = train(
        plain, torch.optim.AdamW(plain.parameters(), foreach=False), lambda s: batch(s, replicas), clipped=False
    )

    def work(world):
        with gloo_group(world, timeout_s=60):
            module = wt.parallelize(build(), plan)
            optimizer = torch.optim.AdamW(groups(module), foreach=False)
            replica = world.rank // plan.layout.tp
            halves = [torch.arange(h * PER_RANK // 2, (h + 1) * PER_RANK // 2) for h in range(2 * replicas)]

            def own(step):  # the same microbatches as one process has, dealt out
                return batch(step, replicas)[torch.cat([halves[replica], halves[replicas + replica]])]

            found = train(module, optimizer, own, clipped=True)
            losses = torch.tensor([loss for loss, _ in found], dtype=torch.float64) / (replicas * plan.layout.tp)
            dist.all_reduce(losses)
            for step, (loss, norm) in enumerate(expected):
                assert abs(losses[step].item() - loss) <= 1e-12 * loss, f"loss of step {step}"
                assert abs(found[step][1] - norm) <= 1e-12 * norm, f"norm of step {step}"
            state = whole_state(module)
            for name, parameter in plain.named_parameters(remove_duplicate=False):
                worst = (state[name] - parameter).abs().max().item()
                assert worst <= 1e-12 * parameter.abs().max().item() + 1e-14, f"{name}: off by {worst}"

    run_local(work, plan.layout.num_devices).check()


@pytest.mark.parametrize("choice", [Choice(), Choice(2), Choice(2, keep=True)])
def test_a_traced_module_in_a_users_loop(choice):
    model = wt.trace(Mixers(), torch.zeros(2, SEQ, dtype=torch.int64))
    block = model.blocks[0].layer
    choices = [
        OperatorChoice(block, "mixers.{}.down", Choice(2, slices=4)),
        OperatorChoice(block, "mixers.{}.up", Choice()),
    ]
    compare(mixers, plan_for(model, dp=2, choice=choice, choices=choices))


def test_a_module_of_transformers_on_replicas_of_two_parts():
    from dataclasses import replace

    model = described("hf-llama", True)
    plan = plan_for(model, dp=4, choice=Choice(2))
    compare(llama, replace(plan, layout=replace(plan.layout, dp=2, tp=2, global_batch=2)))


def test_what_is_asked_of_the_caller():
    plan = plan_for(described("llama", False), dp=2)
    with pytest.raises(InputError, match="no process group"):
        wt.parallelize(mixers(), plan)
    with pytest.raises(InputError, match="was not given to parallelize"):
        clip(mixers(), 1.0)

    def work(world):
        with gloo_group(world, timeout_s=60), pytest.raises(InputError, match=r"for 2 ranks .* this run has 1"):
            wt.parallelize(mixers(), plan)

    run_local(work, 1).check()
