"""Ranks in PyTorch that measure one case per request: DTensor over Gloo, WORLD_SIZE processes with one thread each.

A file of cases is appended to this one and ends with `main(measure)`.

Rank 0 reads a request `case samples inner`, broadcasts it, and answers in JSON. It starts the other ranks from its own command
line, because they cannot import a script that is not a file.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

on_gpu = os.environ.get("DTENSOR_DEVICE", "cpu") != "cpu"
ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ.get("RANK", "0"))


def finish():
    """Waits for the GPU."""
    if on_gpu:
        torch.cuda.synchronize()


def serve(meeting_point, measure):
    torch.set_num_threads(1)
    began = time.perf_counter()
    method = f"file://{meeting_point}"
    if on_gpu:
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=ranks, init_method=method)
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (ranks,))
    dist.barrier()
    # The times when this rank started to create the group, and when it had passed the barrier.
    global started
    started = began, time.perf_counter()
    while True:
        told = [sys.stdin.readline().split() if rank == 0 else None]
        dist.broadcast_object_list(told, src=0)
        if not told[0]:
            break
        case, samples, inner = told[0]
        answer = measure(case, int(samples), int(inner), mesh)
        if rank == 0:
            # A plain number is a time.
            answer = answer if isinstance(answer, dict) else {"seconds": answer}
            print(json.dumps({"case": case, **answer}), flush=True)
    dist.destroy_process_group()


def leave():
    """Ends this process at once, because a thread of PyTorch sometimes aborts the process at interpreter shutdown."""
    sys.stdout.flush()
    os._exit(0)


def main(measure):
    """Answers requests with `measure(case, samples, inner, mesh)` on every rank."""
    if "MEETING_POINT" in os.environ:
        serve(os.environ["MEETING_POINT"], measure)
        leave()
    with tempfile.TemporaryDirectory() as folder:
        point = os.path.join(folder, "ranks")
        others = []
        for other in range(1, ranks):
            environment = {**os.environ, "RANK": str(other), "MEETING_POINT": point}
            command = [sys.executable, *sys.orig_argv[1:]]
            others.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        try:
            serve(point, measure)
        except BaseException:
            for process in others:
                process.kill()
            raise
        for process in others:
            process.wait()
    leave()


