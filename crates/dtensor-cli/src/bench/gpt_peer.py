"""The cases of `dtensor bench gpt` in PyTorch: one process, no mesh. Reads `case samples inner`, answers in JSON.

The formula for parameters and tokens is that of `gpt.rs`, so both programs must have the same loss.
"""
import json
import os
import re
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

device = os.environ.get("DTENSOR_DEVICE", "cpu")
on_gpu = device != "cpu"
torch.set_num_threads(1)
torch.set_default_device(device)
WARM_UP = 3
NOISE = 1009
whole_noise = torch.tensor([(31 * i * i + 7 * i) % NOISE for i in range(NOISE)])
noise = whole_noise.float() / NOISE - 0.5


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        # The outputs are ordered by head, as in `gpt.rs`.
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, self.heads, 3, width // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Gpt(nn.Module):
    def __init__(self, vocab, length, width, heads, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def fill(model):
    for name, parameter in model.named_parameters():
        scale = 1 / parameter.shape[-1] ** 0.5
        pattern = scale * noise + (1.0 if name.endswith("norm.weight") else 0.0)
        count = parameter.numel()
        parameter.copy_(pattern.repeat(count // NOISE + 1)[:count].view(parameter.shape))


def training(case):
    """Returns a function that takes one training step and returns the loss before the step."""
    layers, vocab, length, width, heads, batch = (int(size) for size in re.findall(r"[a-z](\d+)", case)[:6])
    model = Gpt(vocab, length, width, heads, layers)
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **({"fused": True} if on_gpu else {}))
    compiled = torch.compile(model) if case.endswith("_compiled") else model
    count = batch * length
    ids = whole_noise.repeat((count + 1) // NOISE + 1) % vocab
    tokens, targets = ids[:count].view(batch, length), ids[1 : count + 1].clone()
    kind = "cuda" if on_gpu else "cpu"

    def step():
        with torch.autocast(kind, torch.bfloat16, enabled="_bf16" in case):
            loss = F.cross_entropy(compiled(tokens).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def finish():
    if on_gpu:
        torch.cuda.synchronize()


current, step, loss = None, None, 0.0
for line in sys.stdin:
    case, samples, inner = line.split()
    if case != current:
        # The last model is kept, so that it is compiled once.
        step = None
        current, step = case, training(case)
        for _ in range(WARM_UP):
            loss = step().item()
    else:
        for _ in range(WARM_UP):
            step()
    finish()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(int(samples)):
        start = time.perf_counter()
        for _ in range(int(inner)):
            step()
        finish()
        times.append((time.perf_counter() - start) / int(inner))
    answer = {"seconds": statistics.median(times), "loss": loss}
    if on_gpu:
        answer["peak_bytes"] = torch.cuda.max_memory_allocated()
    print(json.dumps({"case": case, **answer}), flush=True)
