"""A module and a training loop of your own under the best plan for them: torchrun --nproc-per-node 2 three_lines.py."""

import torch
import torch.distributed as dist
from own_module import Net
from torch.nn.functional import cross_entropy

import wavetrain as wt
from wavetrain.runtime.parallelize import clip, groups

dist.init_process_group("gloo")
torch.manual_seed(0)
module = Net(layers=4, width=128, heads=4, vocab=512)
sample = torch.zeros(4, 64, dtype=torch.long)

ranks = dist.get_world_size()
cluster = wt.load_cluster("dgx-h100:1").part(ranks)
plan = wt.search(wt.trace(module, sample), cluster, global_batch=4 * ranks, dp=ranks, precision="fp32").best
module = wt.parallelize(module, plan)
optimizer = torch.optim.AdamW(groups(module), lr=3e-3)

for step in range(20):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = (torch.randint(512, (4, 1), generator=generator) + torch.arange(65)) % 512
    loss = cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norm = clip(module, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step}: loss {loss.item():.3f}, norm of all gradients {norm:.3f}")
dist.destroy_process_group()
