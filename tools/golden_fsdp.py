#!/usr/bin/env python3
"""Writes the collectives that PyTorch's FSDP2 issues, which `tests/laws/laws_fully_sharded` expects of `fully_shard`.

    python tools/golden_fsdp.py     # rewrites crates/dtensor-tests/tests/golden/fully_shard.json; golden_file.py has more

The model is the transformer of PyTorch's own tests with three blocks; each block is sharded, then the model. Each case is a line: the
calls of all-gather, reduce-scatter and all-reduce in the forward and in the backward pass of the second step, on one of the ranks.
"""

import os
import socket

from golden_file import File, torch

import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch.utils._python_dispatch import TorchDispatchMode

BLOCKS = 3
KINDS = ["all_gather", "reduce_scatter", "all_reduce"]
# Name, shape of the mesh, options of `fully_shard`, options of the model.
CASES = [
    ("default", [2], {}, {}),
    ("kept", [2], {"reshard_after_forward": False}, {}),
    ("freed", [2], {"reshard_after_forward": True}, {}),
    ("recomputed", [2], {}, {"checkpoint_activations": True}),
    ("frozen_block", [2], {}, {}),
    ("no_sync", [2], {}, {}),
    ("hybrid", [2, 2], {}, {}),
]


class Count(TorchDispatchMode):
    """Counts collectives. (CommDebugMode of PyTorch 2.15 fails in the backward pass of FSDP2.)"""

    def __init__(self):
        super().__init__()
        self.calls = [0] * len(KINDS)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d":
            name = op.name().replace("allgather", "all_gather").replace("allreduce", "all_reduce")
            [kind] = [i for i, kind in enumerate(KINDS) if kind in name]
            self.calls[kind] += 1
        return op(*args, **(kwargs or {}))


def count(name, shape, options, args):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicate", "shard")[-len(shape):])
    model = Transformer(ModelArgs(n_layers=BLOCKS, dropout_p=0.0, weight_tying=False, **args))
    if name == "frozen_block":
        model.layers[0].requires_grad_(False)
    for block in model.layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    model.set_requires_gradient_sync(name != "no_sync")
    tokens = torch.randint(8, (2, 6))
    for _ in range(2):
        forward, backward = Count(), Count()
        with forward:
            loss = model(tokens).sum()
        with backward:
            loss.backward()
    return {"case": name, "forward": forward.calls, "backward": backward.calls}


def rank(i, ranks, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=i, world_size=ranks)
    torch.set_num_threads(1)
    for name, shape, options, args in CASES:
        if torch.tensor(shape).prod() == ranks:
            found = count(name, shape, options, args)
            if i == 0:
                results[name] = found
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    golden = File("fully_shard.json", __doc__)
    results = processes.Manager().dict()
    for ranks in (2, 4):
        processes.spawn(rank, (ranks, free_port(), results), nprocs=ranks)
    for name, *_ in CASES:
        golden.case(name, lambda: results[name])
    golden.finish()
