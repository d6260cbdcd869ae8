"""The cases of `dtensor bench mlp`, `dtensor bench transformer` and `dtensor bench fsdp` in PyTorch. Appended to `ranks_peer.py`.

One training step: zero_grad, forward, backward, optimizer. The time is from the first rank that starts to the last rank that
finishes. The formula for parameters and inputs is that of `models.rs`, so both programs must have the same loss.
"""
import re

import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WARM_UP = 3
NOISE = 1009
# The fastest implementation of the optimizers.
fastest = {"fused": True} if on_gpu else {"foreach": False}
whole_noise = [(31 * i * i + 7 * i) % NOISE for i in range(NOISE)]
noise = torch.tensor(whole_noise, dtype=torch.float32) / NOISE - 0.5


@torch.no_grad()
def fill(model):
    """Initializes parameters in slices, so that no full parameter is in memory twice."""
    for k, (name, parameter) in enumerate(sorted(model.named_parameters())):
        scale = 2 / parameter.shape[-1] ** 0.5
        pattern = (1.0 if name.endswith("norm.weight") else 0.0) + scale * noise.roll(-101 * k % NOISE)
        flat = parameter.view(-1)
        for start in range(0, len(flat), NOISE):
            part = flat[start : start + NOISE]
            part.copy_(pattern[: len(part)])


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(found.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w1, self.gelu, self.w2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.w2(self.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.ffn_norm, self.feed_forward = nn.LayerNorm(dim), FeedForward(dim)

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, layers, vocab, length, dim, heads):
        super().__init__()
        self.tok_embeddings, self.pos_embeddings = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def sequence_parallel(layers):
    """Shards the transformer: sequence- and tensor-parallel."""
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "pos_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for layer in range(layers):
        block = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        plan.update({f"layers.{layer}.{name}": style for name, style in block.items()})
    return plan


def training(case, mesh):
    """Returns a function that takes one training step and returns the loss before the step."""
    sizes = [int(size) for size in re.findall(r"\d+", case)]
    if case.startswith("b"):
        batch, dim, hidden = sizes
        model = Mlp(dim, hidden)
        fill(model)
        parallelize_module(model, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, **fastest)
        x = 2 * noise.repeat(batch * dim // NOISE + 1)[: batch * dim].view(batch, dim)
        x = x.to("cuda" if on_gpu else "cpu")

        def loss():
            return model(x).sum()
    else:
        layers, vocab, length, dim, heads, batch = sizes
        model = Transformer(layers, vocab, length, dim, heads)
        fill(model)
        tokens = torch.tensor([whole_noise[i % NOISE] % vocab for i in range(batch * length)])
        tokens = tokens.view(batch, length)
        if case.startswith("fsdp"):
            rank = mesh.get_local_rank()
            tokens = tokens[rank * batch // ranks : (rank + 1) * batch // ranks]
            for block in model.layers:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            parallelize_module(model, mesh, sequence_parallel(layers))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **fastest)

        def loss():
            return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def step():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value

    return step


def peak_memory():
    """The peak memory of this process, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def answer(case, samples, inner, mesh):
    step = training(case, mesh)
    for _ in range(WARM_UP):
        loss = step().item()
    spans = []
    for _ in range(samples):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(inner):
            step()
        finish()
        spans.append((start, time.perf_counter()))
    # All processes of the machine share this clock.
    everybody = [None] * ranks
    dist.all_gather_object(everybody, (spans, peak_memory()))
    timings = zip(*(spans for spans, _ in everybody))
    times = [max(end for _, end in timing) - min(start for start, _ in timing) for timing in timings]
    return {
        "seconds": statistics.median(times) / inner,
        "loss": loss,
        "peak_bytes": sum(peak for _, peak in everybody),
    }


main(answer)
