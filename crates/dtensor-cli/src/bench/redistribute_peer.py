"""The cases of `dtensor bench redistribute` in PyTorch. `ranks_peer.py` comes before it.

The time is from the first rank that starts to the last that is done.
"""
import math

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

WARM_UP = 3

# What each rank holds before, and what it is to hold after.
kinds = {
    "all_gather": (Shard(0), Replicate()),
    "all_reduce": (Partial(), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_to_all": (Shard(0), Shard(1)),
}


def source(size, placement, mesh):
    rows = max(ranks, math.isqrt(size // 4) // ranks * ranks)
    cols = max(ranks, size // 4 // rows // ranks * ranks)
    local = torch.ones(rows // ranks if placement == Shard(0) else rows, cols)
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def seconds(case, samples, inner, mesh):
    kind, size = case.rsplit("_", 1)
    before, after = kinds[kind]
    x = source(int(size), before, mesh)

    def calls(n):
        for _ in range(n):
            y = x.redistribute(mesh, [after]).to_local()
            if hasattr(y, "wait"):  # a collective that is still on its way
                y.wait()

    calls(WARM_UP)
    spans = []
    for _ in range(samples):
        dist.barrier()
        start = time.perf_counter()
        calls(inner)
        spans.append((start, time.perf_counter()))
    # The clock is the machine's, the same for all processes.
    everybody = [None] * ranks
    dist.all_gather_object(everybody, spans)
    times = [max(end for _, end in timing) - min(start for start, _ in timing) for timing in zip(*everybody)]
    return statistics.median(times) / inner


main(seconds)
