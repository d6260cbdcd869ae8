"""Ranks in PyTorch that time cases when told to: DTensor over Gloo, WORLD_SIZE processes with one thread each.

A file of cases comes after this one in the same script, and ends with `main(measure)`.

Rank 0 reads `case samples inner`, tells the other ranks, and answers in JSON. It starts the others itself: from
its own command line, since a script that is no file cannot be imported by them.
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

ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ.get("RANK", "0"))


def serve(meeting_point, measure):
    torch.set_num_threads(1)
    began = time.perf_counter()
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{meeting_point}")
    mesh = init_device_mesh("cpu", (ranks,))
    dist.barrier()
    # When this rank began to make the group, and when it had met all others on the mesh.
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
            # A number alone is a time.
            answer = answer if isinstance(answer, dict) else {"seconds": answer}
            print(json.dumps({"case": case, **answer}), flush=True)
    dist.destroy_process_group()


def leave():
    """Ends this process at once: when the interpreter is taken down, a thread of PyTorch's at times aborts it."""
    sys.stdout.flush()
    os._exit(0)


def main(measure):
    """Has `measure(case, samples, inner, mesh)` answer, on every rank."""
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


