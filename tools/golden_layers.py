#!/usr/bin/env python3
"""Writes the cases that `tests/modules/layers.rs` compares layers and models with: PyTorch's own answers, in double precision.

    python tools/golden_layers.py     # rewrites crates/dtensor-tests/tests/golden/layers.json; golden_file.py has more

The file is a list of cases, one per line:

    layer       which one it is; the test makes the same
    modules     the dotted paths of its modules, in order
    parameters  the dotted paths of its parameters, in order, each with its shape
    input       [shape, data]: whole numbers for layers that look rows up
    output      [shape, data]
    grads       from a given gradient of the output: that of the input, if it has one, as "", and that of each parameter

Element i of parameter k is 0.3 sin(1 + k + 0.7 i), plus 1 for the weights of norms; element i of the gradient of the output is
cos(0.5 i). Numbers have twelve digits.
"""

import math

from golden_file import File, torch

from torch import nn


def wave(n, phase, step, scale, f=math.sin):
    return torch.tensor([scale * f(phase + step * i) for i in range(n)], dtype=torch.float64)


class HandWrittenRms(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weight


class Mlp(nn.Module):
    def __init__(self, sizes=(10, 16, 10), bias=True):
        super().__init__()
        self.net1 = nn.Linear(sizes[0], sizes[1], bias)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(sizes[1], sizes[2], bias)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


class Stacked(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    def __init__(self, dim, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.resid_dropout = nn.Dropout(0.0)
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(dim, dim, bias=False))

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (w(x).view(b, s, self.heads, d // self.heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.heads)
        if self.causal:
            scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -math.inf)
        found = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, d)
        return self.resid_dropout(self.wo(found))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.gelu = nn.GELU()
        self.w2 = nn.Linear(hidden, dim)
        self.resid_dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.resid_dropout(self.w2(self.gelu(self.w1(x))))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, True)
        self.ffn_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim, 4 * dim)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, tied):
        super().__init__()
        layers, vocabulary, length, dim, heads = 2, 5, 6, 8, 2
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.pos_embeddings = nn.Embedding(length, dim)
        self.dropout = nn.Dropout(0.0)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        h = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def floats(*shape):
    return wave(math.prod(shape), 0.3, 1.1, 1.5).reshape(shape)


def ids(n, *shape):
    return torch.tensor([(3 * i * i + i) % n for i in range(math.prod(shape))]).reshape(shape)


CASES = {
    "Linear": (lambda: nn.Linear(5, 3), floats(2, 4, 5)),
    "Linear without bias": (lambda: nn.Linear(3, 4, bias=False), floats(6, 3)),
    "Embedding": (lambda: nn.Embedding(7, 3), ids(7, 2, 5)),
    "Embedding with padding": (lambda: nn.Embedding(5, 2, padding_idx=-2), ids(5, 9)),
    "LayerNorm": (lambda: nn.LayerNorm(6), floats(2, 3, 6)),
    "LayerNorm over two dims": (lambda: nn.LayerNorm([3, 4], eps=0.1), floats(2, 3, 4)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(5, bias=False), floats(3, 5)),
    "LayerNorm without parameters": (lambda: nn.LayerNorm(5, elementwise_affine=False), floats(3, 5)),
    "RmsNorm": (lambda: nn.RMSNorm(6), 1e-8 * floats(2, 3, 6)),
    "RmsNorm over two dims": (lambda: nn.RMSNorm([3, 4], eps=0.1), floats(2, 3, 4)),
    "RmsNorm without weight": (lambda: nn.RMSNorm(5, elementwise_affine=False), floats(3, 5)),
    "Relu": (nn.ReLU, floats(3, 5)),
    "Gelu": (nn.GELU, floats(3, 5)),
    "Gelu by tanh": (lambda: nn.GELU("tanh"), floats(3, 5)),
    "Silu": (nn.SiLU, floats(3, 5)),
    "Identity": (nn.Identity, floats(3)),
    "Sequential": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Sequential(nn.LayerNorm(6))), floats(3, 4)),
    "MultiHeadAttention": (lambda: Attention(12, 3, False), floats(2, 5, 12)),
    "MultiHeadAttention, causal": (lambda: Attention(8, 2, True), floats(2, 5, 8)),
    "RMSNormPython": (lambda: HandWrittenRms(6), floats(2, 6)),
    "MLPModule": (Mlp, floats(4, 10)),
    "MLPModule with sizes": (lambda: Mlp((3, 7, 2), False), floats(4, 3)),
    "MLPStacked": (lambda: Stacked(2), floats(3, 10)),
    "FeedForward": (lambda: FeedForward(4, 10), floats(2, 3, 4)),
    "TransformerBlock": (lambda: Block(8, 2), floats(2, 5, 8)),
    "Transformer": (lambda: Transformer(True), ids(5, 3, 5)),
    "Transformer, not tied": (lambda: Transformer(False), ids(5, 2, 6)),
}


def data(x):
    number = (lambda v: v) if x.dtype == torch.int64 else (lambda v: float(f"{v:.12g}"))
    return [list(x.shape), [number(v) for v in x.flatten().tolist()]]


def case(name, make, x):
    layer = make().double()
    parameters = dict(layer.named_parameters())
    with torch.no_grad():
        for k, (path, parameter) in enumerate(parameters.items()):
            value = wave(parameter.numel(), 1 + k, 0.7, 0.3).reshape(parameter.shape)
            owner = layer.get_submodule(path.rpartition(".")[0])
            norm = isinstance(owner, (nn.LayerNorm, nn.RMSNorm, HandWrittenRms)) and path.endswith("weight")
            parameter.copy_(value + (1 if norm else 0))
    x = x.clone().requires_grad_(x.is_floating_point())
    y = layer(x)
    y.backward(wave(y.numel(), 0.0, 0.5, 1.0, math.cos).reshape(y.shape))
    grads = {path: data(parameter.grad)[1] for path, parameter in parameters.items()}
    if x.grad is not None:
        grads[""] = data(x.grad)[1]
    return {
        "layer": name,
        "modules": [path for path, _ in layer.named_modules()],
        "parameters": [[path, list(parameter.shape)] for path, parameter in parameters.items()],
        "input": data(x.detach()),
        "output": data(y.detach()),
        "grads": grads,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    golden = File("layers.json", __doc__)
    for name, (make, x) in CASES.items():
        golden.case(name, lambda: case(name, make, x))
    golden.finish()
