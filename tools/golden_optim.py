#!/usr/bin/env python3
"""Writes the cases that `tests/modules/optimizers` compares optimizers, schedules and clipping with: PyTorch's own answers.

    python tools/golden_optim.py     # rewrites crates/dtensor-tests/tests/golden/optimizers.json; golden_file.py has more

The file has three lists, of one case per line.

`steps`: ten steps with given gradients.

    optimizer   Sgd, Adam or AdamW
    dtype       of the parameters
    groups      the options of each; parameter k is in group k, or in the last if there are fewer
    values      of each parameter, after the last step
    state       what is remembered of each parameter after the last step, by name

Parameters have the shapes [3, 5], [7] and [2, 1, 2]; element i of parameter k is sin(1 + k + 0.7 i). In step n, element i of its
gradient is (1 + n) cos(0.3 + k + 0.9 i + 1.3 n), but 0 where i + n is divisible by 4; in steps 3 and 4 the last parameter has no
gradient. All are rounded to the dtype. Half precision is computed by PyTorch's fused kernels, which round once.

`schedules`: the factors of the first 12 steps.

`clips`: the same gradients of step 0, clipped.

    norm_type, max_norm
    norm        before
    grads       of each parameter, after
"""

import math

from golden_file import File, torch

SHAPES = [(3, 5), (7,), (2, 1, 2)]
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}
KINDS = {"Sgd": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
STEPS = 10


def made(shape, f, dtype):
    return torch.tensor([f(i) for i in range(math.prod(shape))], dtype=torch.float64).reshape(shape).to(dtype)


def parameter(k, dtype):
    return torch.nn.Parameter(made(SHAPES[k], lambda i: math.sin(1 + k + 0.7 * i), dtype))


def gradient(k, n, dtype):
    def element(i):
        return 0.0 if (i + n) % 4 == 0 else (1 + n) * math.cos(0.3 + k + 0.9 * i + 1.3 * n)

    return made(SHAPES[k], element, dtype)


def numbers(x):
    return x.detach().to(torch.float64).flatten().tolist()


def steps(kind, dtype, groups):
    parameters = [parameter(k, DTYPES[dtype]) for k in range(len(SHAPES))]
    lists = [[] for _ in groups]
    for k, p in enumerate(parameters):
        lists[min(k, len(groups) - 1)].append(p)
    how = {"fused": True} if dtype == "bf16" else {"foreach": False}
    optimizer = KINDS[kind]([{"params": list(ps), **options} for ps, options in zip(lists, groups)], **how)
    for n in range(STEPS):
        for k, p in enumerate(parameters):
            p.grad = None if k == len(SHAPES) - 1 and n in (3, 4) else gradient(k, n, DTYPES[dtype])
        optimizer.step()
    state = [
        {name: numbers(x) for name, x in optimizer.state[p].items() if torch.is_tensor(x) and x.dim() > 0}
        for p in parameters
    ]
    return dict(
        optimizer=kind, dtype=dtype, groups=groups, values=[numbers(p) for p in parameters], state=state
    )


SGD = [
    [{}],
    [{"lr": 0.1}],
    [{"lr": 0.1, "momentum": 0.9}],
    [{"lr": 0.1, "momentum": 0.9, "dampening": 0.25}],
    [{"lr": 0.1, "momentum": 0.9, "nesterov": True}],
    [{"lr": 0.1, "weight_decay": 0.05}],
    [{"lr": 0.1, "momentum": 0.5, "nesterov": True, "weight_decay": 0.05}],
    [{"lr": 0.1, "momentum": 0.5, "weight_decay": 0.05, "maximize": True}],
    [{"lr": 0.1}, {"lr": 0.05, "momentum": 0.9}, {"lr": 0.2, "weight_decay": 0.1}],
]
ADAM = [
    [{}],
    [{"lr": 0.1}],
    [{"lr": 0.1, "betas": [0.5, 0.75]}],
    [{"lr": 0.1, "betas": [0.0, 0.9]}],
    [{"lr": 0.1, "eps": 0.1}],
    [{"lr": 0.1, "weight_decay": 0.5}],
    [{"lr": 0.1, "weight_decay": 0.0}],
    [{"lr": 0.1, "betas": [0.9, 0.5], "amsgrad": True}],
    [{"lr": 0.1, "weight_decay": 0.5, "maximize": True}],
    [{"lr": 0.1}, {"lr": 0.05, "weight_decay": 0.3}, {"lr": 0.2, "betas": [0.8, 0.9], "amsgrad": True}],
]


def schedules(golden):
    def factors(make):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = make(optimizer)
        found = []
        for _ in range(12):
            found.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return found

    scheduler = torch.optim.lr_scheduler

    def warmup(optimizer, steps):
        return scheduler.LinearLR(optimizer, start_factor=1 / (steps + 1), end_factor=1.0, total_iters=steps)

    def cosine(optimizer, steps, floor):
        return scheduler.CosineAnnealingLR(optimizer, T_max=steps, eta_min=floor)

    def both(optimizer):
        parts = [warmup(optimizer, 4), cosine(optimizer, 8, 0.1)]
        return scheduler.SequentialLR(optimizer, parts, milestones=[4])

    made = {
        "constant": lambda o: scheduler.ConstantLR(o, factor=1.0),
        "warmup": lambda o: warmup(o, 5),
        "cosine": lambda o: cosine(o, 12, 0.25),
        "both": both,
    }
    for name, make in made.items():
        golden.case(name, lambda: dict(name=name, factors=factors(make)), "schedules")


def clip(norm_type, p, bound):
    parameters = [parameter(k, torch.float64) for k in range(len(SHAPES))]
    for k, x in enumerate(parameters):
        x.grad = gradient(k, 0, torch.float64)
    norm = torch.nn.utils.clip_grad_norm_(parameters, bound, norm_type=p)
    return dict(norm_type=norm_type, max_norm=bound, norm=norm.item(), grads=[numbers(x.grad) for x in parameters])


if __name__ == "__main__":
    golden = File("optimizers.json", __doc__)
    for dtype in DTYPES:
        for kind in KINDS:
            for groups in SGD if kind == "Sgd" else ADAM:
                golden.case(kind, lambda: steps(kind, dtype, groups), "steps")
    schedules(golden)
    for p in (2.0, 1.0, math.inf, 3.0, 0.5):
        for bound in (0.5, 100.0):
            golden.case(str(p), lambda: clip(str(p), p, bound), "clips")
    golden.finish()
