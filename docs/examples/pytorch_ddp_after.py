"""DistributedDataParallel with a communication hook: gradients are averaged by a store of kvstore.

    torchrun --nproc-per-node 4 pytorch_ddp_after.py

pytorch_ddp_before.py is the same program without it. Each worker trains on images of its own, and prints
its loss before and after and the sum of all weights without their signs, which is the same on all:

    worker 0 of 4: loss 0.67 -> 0.01, weights 785.1341
"""

import argparse

import torch
from torch.nn.parallel import DistributedDataParallel

import kvstore as kv
from kvstore.torch import HookState, allreduce_hook


def train(options):
    """Train a small network, and print the result."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(16, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 1)
    )
    model = DistributedDataParallel(network)
    store = kv.create("shared")
    model.register_comm_hook(HookState(store), allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    torch.manual_seed(1 + rank)
    images = torch.randn(options.images, 16)
    labels = (images.sum(dim=1, keepdim=True) > 0).float()
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    store.close()
    total = sum(parameter.detach().double().abs().sum().item() for parameter in network.parameters())
    print(f"worker {rank} of {size}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, weights {total:.4f}")


def main():
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--images", type=int, default=10_000, help="for each worker")
    parser.add_argument("--width", type=int, default=256, help="of the hidden layer")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    train(options)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
