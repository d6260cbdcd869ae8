"""The cases of `dtensor bench dispatch` in PyTorch. Appended to `ranks_peer.py`.

A case is `world:name`. In the world `simulated` rank 0 runs alone while the others wait. In any other world all ranks run at
once, and the time is from the first rank that starts to the last rank that finishes.
"""
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

WARM_UP = 3


def body(name, mesh):
    if name == "matmul_shard":
        a = distribute_tensor(torch.ones(4 * ranks, 8), mesh, [Shard(0)])
        b = distribute_tensor(torch.ones(8, 8), mesh, [Replicate()])

        def calls(n):
            for _ in range(n):
                a @ b

        return calls
    rows, placement = {
        "local_add": (4, None),
        "add_replicate": (4, Replicate()),
        "add_shard": (4 * ranks, Shard(0)),
    }[name.removesuffix("_grad")]
    x = torch.ones(rows, 4)
    if placement is not None:
        x = distribute_tensor(x, mesh, [placement])
    x = x.detach().requires_grad_(name.endswith("_grad"))

    def calls(n):
        for _ in range(n):
            x + x

    return calls


def seconds(case, samples, inner, mesh):
    world, name = case.split(":")
    alone = world == "simulated"
    calls = body(name, mesh)
    spans = []
    for _ in range(WARM_UP + samples):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0 or not alone:
            calls(inner)
            finish()
        spans.append((start, time.perf_counter()))
    # All processes of the machine share this clock.
    everybody = [None] * ranks
    dist.all_gather_object(everybody, spans)
    timings = zip(*everybody[:1] if alone else everybody)
    times = [max(end for _, end in timing) - min(start for start, _ in timing) for timing in timings]
    return statistics.median(times[WARM_UP:]) / inner


main(seconds)
