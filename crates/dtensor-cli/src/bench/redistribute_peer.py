"""The cases of `dtensor bench redistribute` in PyTorch. Appended to `ranks_peer.py`.

The time is from the first rank that starts to the last rank that finishes.
"""
import math

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

WARM_UP = 3

# Placements before and after.
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
            if hasattr(y, "wait"):  # an asynchronous collective
                y.wait()

    calls(WARM_UP)
    spans = []
    for _ in range(samples):
        dist.barrier()
        start = time.perf_counter()
        calls(inner)
        spans.append((start, time.perf_counter()))
    # All processes of the machine share this clock.
    everybody = [None] * ranks
    dist.all_gather_object(everybody, spans)
    times = [max(end for _, end in timing) - min(start for start, _ in timing) for timing in zip(*everybody)]
    return statistics.median(times) / inner


main(seconds)
