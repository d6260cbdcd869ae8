"""The cases of `dtensor bench kernels` in PyTorch, one thread. Reads `case samples inner`, answers in JSON."""
import json
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
device = os.environ.get("DTENSOR_DEVICE", "cpu")
torch.set_default_device(device)


def finish():
    """Waits for a GPU."""
    if device != "cpu":
        torch.cuda.synchronize()


torch.manual_seed(0)

x, y = torch.randn(1024, 2048), torch.randn(1024, 2048)
row, column, bias = torch.randn(2048), torch.randn(1024, 1), torch.randn(2048)
table, ids = torch.randn(1024, 2048, requires_grad=True), torch.randint(0, 1024, (1024,))
square = {n: (torch.randn(n, n), torch.randn(n, n)) for n in (256, 512, 1024)}
batch_a, batch_b = torch.randn(32, 128, 64), torch.randn(32, 64, 128)
linear_x, linear_w, linear_b = torch.randn(256, 1024), torch.randn(1024, 1024), torch.randn(1024)
tiny, tiny_a, tiny_b = torch.ones(4, 4), torch.ones(4, 8), torch.ones(8, 8)
wide = (1024, 2048)
probabilities = torch.rand(wide)
looked_up = F.embedding(ids, table)
weights = table.detach()

cases = {
    "add": lambda: x + y,
    "mul": lambda: x * y,
    "relu": lambda: torch.relu(x),
    "exp": lambda: torch.exp(x),
    "gelu": lambda: F.gelu(x),
    "softmax": lambda: torch.softmax(x, -1),
    "layernorm": lambda: F.layer_norm(x, (2048,), row, bias),
    "sum0": lambda: x.sum(0),
    "sum1": lambda: x.sum(1),
    "sum_all": lambda: x.sum(),
    "bcast_row": lambda: x + row,
    "bcast_col": lambda: x + column,
    "transpose_contiguous": lambda: x.t().contiguous(),
    "cat0": lambda: torch.cat([x, y], 0),
    "cat1": lambda: torch.cat([x, y], 1),
    "embedding": lambda: F.embedding(ids, weights),
    "embedding_backward": lambda: torch.autograd.grad(looked_up, table, x, retain_graph=True),
    "mm256": lambda: square[256][0] @ square[256][1],
    "mm512": lambda: square[512][0] @ square[512][1],
    "mm1024": lambda: square[1024][0] @ square[1024][1],
    "linear_bias": lambda: F.linear(linear_x, linear_w, linear_b),
    "bmm_32x128x64": lambda: torch.bmm(batch_a, batch_b),
    "rand": lambda: torch.rand(wide),
    "randn": lambda: torch.randn(wide),
    "uniform": lambda: torch.empty(wide).uniform_(-1, 1),
    "normal": lambda: torch.empty(wide).normal_(1, 0.5),
    "trunc_normal": lambda: torch.nn.init.trunc_normal_(torch.empty(wide)),
    "randint": lambda: torch.randint(0, 1024, wide),
    "bernoulli": lambda: torch.empty(wide).bernoulli_(0.3),
    "bernoulli_each": lambda: torch.bernoulli(probabilities),
    "dropout": lambda: F.dropout(x, 0.1),
    "tiny_add": lambda: tiny + tiny,
    "tiny_mm": lambda: tiny_a @ tiny_b,
}

if os.environ.get("DTENSOR_LARGE"):
    big = torch.randn(8192, 8192)
    big_weight, big_bias, big_ids = torch.randn(8192), torch.randn(8192), torch.randint(0, 8192, (8192,))
    cases |= {
        "large_add": lambda: big + big,
        "large_gelu": lambda: F.gelu(big),
        "large_softmax": lambda: big.softmax(-1),
        "large_layernorm": lambda: F.layer_norm(big, (8192,), big_weight, big_bias),
        "large_sum0": lambda: big.sum(0),
        "large_sum1": lambda: big.sum(1),
        "large_sum_all": lambda: big.sum(),
        "large_transpose_contiguous": lambda: big.t().contiguous(),
        "large_embedding": lambda: F.embedding(big_ids, big),
        "large_cat0": lambda: torch.cat([big, big], 0),
        "large_cat1": lambda: torch.cat([big, big], 1),
        "large_dropout": lambda: F.dropout(big, 0.1),
        "large_randn": lambda: torch.randn(8192, 8192),
    }
    if device != "cpu":
        low_a, low_b = big.bfloat16(), torch.randn(8192, 8192).bfloat16()
        q, k, v, dy = (torch.randn(8, 16, 4096, 64).bfloat16() for _ in range(4))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]

        def attention_backward():
            y = F.scaled_dot_product_attention(*leaves, is_causal=True)
            return torch.autograd.grad(y, leaves, dy)

        cases |= {
            "large_mm_bf16": lambda: low_a @ low_b,
            "large_attention_bf16": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            "large_attention_backward_bf16": attention_backward,
        }

for line in sys.stdin:
    case, samples, inner = line.split()
    body, times = cases[case], []
    for _ in range(int(samples)):
        start = time.perf_counter()
        for _ in range(int(inner)):
            body()
        finish()
        times.append((time.perf_counter() - start) / int(inner))
    print(json.dumps({"case": case, "seconds": statistics.median(times)}), flush=True)
