"""Describe a module of your own: traced on the meta device, no weight is ever allocated."""

import torch
from torch import nn

import wavetrain as wt


class Block(nn.Module):
    """Attention and a wide MLP, as anybody might write them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Net(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, layers: int = 12, width: int = 1024, heads: int = 16, vocab: int = 32000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


if __name__ == "__main__":
    with torch.device("meta"):
        model = wt.trace(Net(), torch.zeros(2, 512, dtype=torch.long))
    for length in (512, 4096):
        work = wt.Work(seq_len=length)
        flops = model.forward_flops(work) / work.tokens
        print(
            f"{model.name}: {model.num_parameters:,} parameters, {flops / 1e9:.3f} GFLOP per token at length {length}"
        )
    print("layers:", ", ".join(f"{run.count} x {model.by_name[run.layer].path or run.layer}" for run in model.order))
