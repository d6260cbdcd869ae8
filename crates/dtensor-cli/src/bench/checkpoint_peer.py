"""The cases of `dtensor bench checkpoint` in PyTorch: torch.distributed.checkpoint. Appended to `ranks_peer.py`.

The time is from the first rank that starts to the last rank that finishes.
"""
import shutil

import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

SIZE = 2048


def drop_from_cache(folder):
    for name in os.listdir(folder):
        file = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def seconds(case, samples, inner, mesh):
    kind, size = case.rsplit("_", 1)
    weights = int(size.removesuffix("x16MiB"))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "checkpoint")
    local = [torch.randn(SIZE // ranks, SIZE) for _ in range(weights)]
    state = {f"{i}.weight": DTensor.from_local(x, mesh, [Shard(0)], run_check=False) for i, x in enumerate(local)}
    if kind != "save":
        dcp.save(state, checkpoint_id=path)
    times = []
    for _ in range(samples):
        if rank == 0 and kind == "save":
            shutil.rmtree(path, ignore_errors=True)
        if rank == 0 and kind == "load":
            drop_from_cache(path)
        dist.barrier()
        start = time.perf_counter()
        if kind == "save":
            dcp.save(state, checkpoint_id=path)
        else:
            dcp.load(state, checkpoint_id=path)
        # All processes of the machine share this clock.
        everybody = [None] * ranks
        dist.all_gather_object(everybody, (start, time.perf_counter()))
        times.append(max(end for _, end in everybody) - min(start for start, _ in everybody))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    return statistics.median(times)


main(seconds)
