"""Small models cut by tensor parallelism and trained on real processes, against one plain process, in float64."""

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from tests.runtime.near import close
from torch.distributed.fsdp import fully_shard

from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.model import load_model
from wavetrain.plan import Choice, Layout, Plan, Precision
from wavetrain.plan.check import check
from wavetrain.runtime.chunk import Batch, Computed
from wavetrain.runtime.cuts import joined_parts
from wavetrain.runtime.grid import open_grid
from wavetrain.runtime.hf import parts_of_config
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.split import Split, joined, split
from wavetrain.runtime.stages import IGNORED, cut_into_stages, materialize, sum_of_losses
from wavetrain.runtime.tensor import add_partial, connect, cut_parameters
from wavetrain.runtime.transformer import parts_of
from wavetrain.runtime.whole import full
from wavetrain.runtime.world import gloo_group

SEQ, HIDDEN, HEADS, FFN, STEPS, BATCH = 8, 16, 4, 24, 3, 2
FAMILIES = ("gpt", "gpt2", "llama", "qwen3", "phi3", "bert")
TAKEN_APART = ("hf-gpt2", "hf-llama", "hf-mistral", "hf-qwen2", "hf-bert")
GROUPED = ("gpt", "llama", "qwen3", "phi3", "hf-llama", "hf-mistral", "hf-qwen2")


@dataclass(frozen=True)
class Case:
    """A model and how it is run."""

    family: str
    tp: int = 2
    sequence: bool = False
    tied: bool = False
    kv_heads: int = HEADS
    vocab: int = 30
    cut: tuple[int, ...] = (2,)
    slices: tuple[tuple[str, int], ...] = ()  # ends of operators' paths, and into how many each is split
    split_backward: bool = False
    dp: int = 1
    late: bool = False  # connected after it is sharded
    own: bool = False  # a transformers model as its user has it, not taken apart

    @property
    def blocks(self):
        return sum(self.cut)


@cache
def described(case):
    grouped = f"kv_heads: {case.kv_heads}\n" if case.kv_heads != HEADS else ""
    text = (
        f"family: {case.family.removeprefix('hf-')}\nlayers: {case.blocks}\nhidden: {HIDDEN}\nheads: {HEADS}\n"
        f"ffn: {FFN}\nvocab: {case.vocab}\nseq_len: {SEQ}\ntied: {str(case.tied).lower()}\n{grouped}"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.yaml"
        file.write_text(text)
        return load_model(str(file))


def config_of(case):
    import transformers

    common = {"vocab_size": case.vocab, "tie_word_embeddings": case.tied, "pad_token_id": 0}
    if case.family == "hf-gpt2":
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        shape = {"n_embd": HIDDEN, "n_layer": case.blocks, "n_head": HEADS, "n_positions": SEQ, "n_inner": FFN}
        return transformers.GPT2Config(**shape, **ends, **common)
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": case.blocks, "num_attention_heads": HEADS}
    shape |= {"intermediate_size": FFN, "max_position_embeddings": SEQ, **common}
    if case.family == "hf-bert":
        return transformers.BertConfig(**shape)
    shape |= {"num_key_value_heads": case.kv_heads}
    if case.family == "hf-mistral":
        shape |= {"sliding_window": 5}
    name = {"hf-llama": "Llama", "hf-mistral": "Mistral", "hf-qwen2": "Qwen2", "hf-phi3": "Phi3"}[case.family]
    return getattr(transformers, f"{name}Config")(**shape)


def modules_of(case):
    """The stages of a case, or the whole module, with values."""
    if case.own:
        import transformers

        torch.manual_seed(1)
        made = transformers.AutoModelForCausalLM.from_config(config_of(case), attn_implementation="sdpa")
        return [made.double().eval()]
    parts = parts_of_config(config_of(case)) if case.family.startswith("hf-") else parts_of(described(case))
    stages = cut_into_stages(parts, case.cut, range(len(case.cut)))
    materialize(stages, seed=3, dtype=torch.float64)
    for stage in stages.values():  # norms and biases begin with ones and zeros, which hide what is wrong with them
        for number, (_, parameter) in enumerate(stage.named()):
            if parameter.ndim == 1:
                generator = torch.Generator().manual_seed(number)
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return list(stages.values())


@cache
def plan_for(case):
    devices = case.tp * case.dp
    plan = Plan(
        model=described(case),
        cluster=load_cluster("dgx-h100:1").part(devices),
        layout=Layout(global_batch=case.dp, dp=case.dp, tp=case.tp, sequence_parallel=case.sequence),
        cut=(case.blocks,),
        seq_len=SEQ,
        choice=Choice(shard=case.dp),
        precision=Precision(compute=DType.FP32, products=DType.FP32),
    )
    assert not check(plan), check(plan)
    return plan


def batch_of(case, step, replica):
    generator = torch.Generator().manual_seed(step)
    shape = (case.dp, BATCH, SEQ)
    tokens, targets = (torch.randint(case.vocab, shape, generator=generator) for _ in range(2))
    targets[torch.rand(shape, generator=generator) < 0.2] = IGNORED
    return tokens[replica], targets[replica], int((targets != IGNORED).sum())


def backward(case, modules, batch):
    """The loss of a batch, its gradients accumulated."""
    tokens, targets, count = batch
    if case.own:
        logits = modules[0](tokens, use_cache=False).logits
        assert logits.shape == (BATCH, SEQ, case.vocab)
        loss = sum_of_losses(logits.flatten(0, 1), targets.flatten()) / count
    elif case.split_backward:
        return backward_in_two(modules, batch)
    else:
        hidden = tokens
        for stage in modules[:-1]:
            hidden = stage(hidden)
            assert hidden.shape[1] == (SEQ // case.tp if is_cut(stage) and case.sequence else SEQ)
        loss = modules[-1](hidden, targets) / count
    loss.backward()
    return loss.detach()


def is_cut(stage):
    return len(stage._forward_hooks) + sum(len(m._forward_hooks) for m in stage.modules()) > 0


def backward_in_two(modules, batch):
    tokens, targets, count = batch
    chunks = [Computed(stage, split=True) for stage in modules]
    hidden = gradient = None
    for chunk in chunks:
        chunk.begin(Batch({0: tokens}, {0: targets}, count))
        hidden = chunk.forward(0, hidden)
    for chunk in reversed(chunks):
        gradient = chunk.backward_input(0, gradient)
    for chunk in chunks:
        chunk.backward_weight(0)
    return chunks[-1].losses[0]


# --- one process ---


def names_of(module):
    if not hasattr(module, "members"):
        return {path: path for path, _ in module.named_parameters(remove_duplicate=False)}
    found = {}
    for prefix, part in zip(module.prefixes, module.members, strict=True):
        for path, _ in part.module.named_parameters(remove_duplicate=False):
            found[joined(prefix, path)] = part.names[path]
    return found


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, foreach=False)


def tie(modules, by_name):
    """One of each tensor, and what gives all copies of a tied parameter the sum of their gradients."""
    ties = modules[0].parts.ties if hasattr(modules[0], "parts") else {}
    groups = {}
    for name, parameter in by_name.items():
        groups.setdefault(ties.get(name, name), {})[id(parameter)] = parameter

    def share():
        for copies in groups.values():
            given = [copy.grad for copy in copies.values() if copy.grad is not None]
            for copy in copies.values() if len(given) > 1 else ():
                copy.grad = sum(given[1:], given[0]).clone()

    places = {(p.data_ptr(), p.numel()): p for group in groups.values() for p in group.values()}
    return list(places.values()), share


def reference(case):
    """Losses, gradients by name and the parameters after the last step of one plain process."""
    modules = modules_of(case)
    by_name = {name: m.get_parameter(path) for m in modules for path, name in names_of(m).items()}
    unique, share = tie(modules, by_name)
    optimizer, seen = adamw(unique), []
    for step in range(STEPS):
        for parameter in by_name.values():
            parameter.grad = None
        batches = [batch_of(case, step, replica) for replica in range(case.dp)]
        loss = sum(backward(replace(case, split_backward=False), modules, batch) for batch in batches)
        share()
        seen.append((loss, {name: p.grad for name, p in by_name.items()}))
        optimizer.step()
    return seen, {name: p.detach() for name, p in by_name.items()}


# --- many ---


def split_some(case, module):
    """Operators in slices, on top of what the part has of them."""
    for end, slices in case.slices:
        found = [path for path, _ in module.named_modules() if path.endswith(end)]
        for path in found:
            module.set_submodule(path, split(module.get_submodule(path), slices=slices))


def shard(case, module, grid):
    for unit in (*module.blocks, module) if case.dp > 1 else ():
        fully_shard(unit, mesh=grid.sharding(case.dp))
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def held(module, path, part):
    """A parameter's values or gradient, joined from its slices; None where this part has none."""
    owner, _, leaf = path.rpartition(".")
    holder = module.get_submodule(owner)
    if isinstance(holder, Split):
        if leaf not in holder.pieces:
            return None
        pieces = holder.pieces[leaf].under(owner)
        values = [held(module, own, part) for own in pieces.paths]
        return None if any(value is None for value in values) else torch.cat(values, pieces.dim)
    if getattr(holder, leaf, None) is None:
        return None
    found = part(module.get_parameter(path))
    return None if found is None else full(found)


def whole(module, parallel, part):
    """Every tensor by the model's name, from all parts."""
    own = {path: held(module, path, part) for path in parallel.cuts}
    own = {path: None if value is None else value.detach().numpy() for path, value in own.items()}
    gathered = [None] * parallel.mesh.size()
    dist.all_gather_object(gathered, own, group=parallel.mesh.get_group())
    found = {}
    for name, pieces in parallel.pieces.items():
        parts = []
        for path in pieces.paths:
            tensors = [None if one[path] is None else torch.from_numpy(one[path]) for one in gathered]
            empty = all(tensor is None for tensor in tensors)
            parts.append(None if empty else joined_parts(parallel.cuts[path], tensors))
        found[name] = None if None in parts[:1] else torch.cat(parts, pieces.dim)
    return found


def all_whole(modules, parallels, part):
    return {name: v for m, p in zip(modules, parallels, strict=True) for name, v in whole(m, p, part).items()}


def prepared(case, grid):
    """The modules of a part, and how they are cut."""
    modules = modules_of(case)
    parallels = [cut_parameters(module, plan_for(case), grid) for module in modules]
    for module, parallel in zip(modules, parallels, strict=True):
        split_some(case, module)
        if not case.late:
            connect(module, parallel)
        shard(case, module, grid)
        if case.late:
            connect(module, parallel)
    return modules, parallels


def trained(case, modules, parallels):
    """What the optimizer gets, and what makes one gradient of those of tied parameters."""
    if not case.tied:
        return [p for module in modules for p in module.parameters()], lambda: None
    by_name = {}
    for number, (module, parallel) in enumerate(zip(modules, parallels, strict=True)):
        names = {own.paths[0]: name for name, own in parallel.pieces.items() if len(own.paths) == 1}
        held_here = module.named_parameters(remove_duplicate=False)
        by_name |= {names.get(path, f"{path} of stage {number}"): p for path, p in held_here}
    return tie(modules, by_name)


def compare(case, grid, expected):
    """Train; losses, gradients and parameters are those of one process."""
    modules, parallels = prepared(case, grid)
    unique, share = trained(case, modules, parallels)
    optimizer, (steps, last) = adamw(unique), expected
    for step, (loss, gradients) in enumerate(steps):
        for module in modules:
            module.zero_grad()
        found = backward(case, modules, batch_of(case, step, grid.replica))
        for module, parallel in zip(modules, parallels, strict=True):
            add_partial(module, parallel)
        share()
        losses = [torch.empty_like(found) for _ in range(case.tp)]
        dist.all_gather(losses, found, group=grid.tp.get_group())
        assert all(torch.equal(other, found) for other in losses)
        dist.all_reduce(found, group=grid.dp.get_group())
        close(found, loss, f"{case}: loss of step {step}")
        if step == 0:
            wholes = all_whole(modules, parallels, lambda p: p.grad)
            assert wholes.keys() == gradients.keys()
            for name, gradient in gradients.items():
                close(wholes[name], gradient, f"{case}: gradient of {name}")
        optimizer.step()
    wholes = all_whole(modules, parallels, lambda p: p.detach())
    for name, value in last.items():
        close(wholes[name], value, f"{case}: {name}", floor=1e-14)  # Adam enlarges what should be zero


def run(*cases):
    """All of them in one group of processes."""
    expected = [reference(case) for case in cases]
    ranks = cases[0].tp * cases[0].dp

    def work(world):
        with gloo_group(world, timeout_s=60):
            for case, known in zip(cases, expected, strict=True):
                compare(case, open_grid(plan_for(case), rank=world.rank, size=world.size), known)

    run_local(work, ranks).check()


def alone(case, then):
    """`then(grid)` on every part."""

    def work(world):
        with gloo_group(world, timeout_s=60):
            then(open_grid(plan_for(case), rank=world.rank, size=world.size))

    run_local(work, case.tp * case.dp).check()
