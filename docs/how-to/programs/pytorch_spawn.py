import os
import socket

import torch

import kvstore as kv


def place(rank, size, port):
    here = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
    }  # one machine
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**here, **there}.items()})


def work(rank, size, port):
    place(rank, size, port)  # first of all
    torch.distributed.init_process_group("gloo")
    with kv.create("shared") as store:
        assert store.num_workers == torch.distributed.get_world_size() == size
        assert store.rank == torch.distributed.get_rank() == rank
        print(f"worker {store.rank} of {store.num_workers} is here")
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # also identifies this job
    torch.multiprocessing.spawn(work, (2, port), nprocs=2)
