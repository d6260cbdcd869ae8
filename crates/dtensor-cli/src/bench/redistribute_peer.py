"""The cases of `dtensor bench redistribute` in PyTorch: DTensor over Gloo, WORLD_SIZE processes with one thread each.

Rank 0 reads `case samples inner`, tells the other ranks, and answers in JSON. It starts the others itself: from
its own command line, since a script that is no file cannot be imported by them.
"""
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

WARM_UP = 3
ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ.get("RANK", "0"))

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
    times = []
    for _ in range(samples):
        dist.barrier()
        start = time.perf_counter()
        calls(inner)
        times.append((time.perf_counter() - start) / inner)
    return statistics.median(times)


def serve(meeting_point):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{meeting_point}")
    mesh = init_device_mesh("cpu", (ranks,))
    while True:
        told = [sys.stdin.readline().split() if rank == 0 else None]
        dist.broadcast_object_list(told, src=0)
        if not told[0]:
            break
        case, samples, inner = told[0]
        answer = seconds(case, int(samples), int(inner), mesh)
        if rank == 0:
            print(json.dumps({"case": case, "seconds": answer}), flush=True)
    dist.destroy_process_group()


if "MEETING_POINT" in os.environ:
    serve(os.environ["MEETING_POINT"])
else:
    with tempfile.TemporaryDirectory() as folder:
        point = os.path.join(folder, "ranks")
        others = []
        for other in range(1, ranks):
            environment = {**os.environ, "RANK": str(other), "MEETING_POINT": point}
            command = [sys.executable, *sys.orig_argv[1:]]
            others.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        try:
            serve(point)
        except BaseException:
            for process in others:
                process.kill()
            raise
        for process in others:
            process.wait()
