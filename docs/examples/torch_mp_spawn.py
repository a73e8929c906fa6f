"""Workers that `torch.multiprocessing.spawn` starts, in the place of a launcher.

    python torch_mp_spawn.py --workers 4

A store, as `init_process_group`, learns from the environment which worker it is of how many. Where no
launcher has set these variables the program sets them, by the names that torchrun has for them. Each worker
has images of its own, and prints its loss before and after and the sum of all weights without their signs,
which is the same on all:

    worker 0 of 4: loss 0.67 -> 0.01, weights 783.4604
"""

import argparse
import os
import socket

import torch

import kvstore as kv
from kvstore.torch import DistributedOptimizer


def place(rank, size, port):
    """Set what torchrun would have set: all workers are on this machine."""
    here = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # also identifies this job
    os.environ.update({name: str(value) for name, value in {**here, **meeting}.items()})


def work(rank, options, port):
    """Be one worker: train a small network, and print the result."""
    place(rank, options.workers, port)  # before anything else
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.workers))
    with kv.create("shared") as store:
        torch.manual_seed(store.rank)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 1)
        )
        images = torch.randn(options.images, 16)
        labels = (images.sum(dim=1, keepdim=True) > 0).float()
        sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), store)  # worker 0's weights for all
        losses = []
        for _ in range(options.steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        total = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
        name = f"worker {store.rank} of {store.num_workers}"
        print(f"{name}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, weights {total:.4f}", flush=True)


def free_port():
    """Find a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def main():
    """Read the options, and start the workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--images", type=int, default=10_000, help="for each worker")
    parser.add_argument("--width", type=int, default=256, help="of the hidden layer")
    options = parser.parse_args()
    torch.multiprocessing.spawn(work, (options, free_port()), nprocs=options.workers)


if __name__ == "__main__":
    main()
