"""Hugging Face accelerate: its DDP, with gradients that a store of kvstore averages.

    kvstore run -n 4 accelerate_ddp.py

Each worker trains on images of its own, and prints its loss before and after and the sum of all weights
without their signs, which is the same on all:

    worker 0 of 4: loss 0.67 -> 0.01, weights 785.1341
"""

import argparse

import torch
from accelerate import Accelerator

import kvstore as kv
from kvstore.torch import HookState, allreduce_hook


def train(options):
    """Train a small network, and print the result."""
    accelerator = Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(16, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 1)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = accelerator.prepare(network, optimizer)
    torch.manual_seed(1 + rank)
    images = torch.randn(options.images, 16)
    labels = (images.sum(dim=1, keepdim=True) > 0).float()
    losses = []
    with kv.create("shared") as store:
        model.register_comm_hook(HookState(store), allreduce_hook)  # prepare has made it a DDP model
        for _ in range(options.steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            losses.append(loss.item())
    total = sum(parameter.detach().double().abs().sum().item() for parameter in network.parameters())
    print(
        f"worker {rank} of {size}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, weights {total:.4f}", flush=True
    )
    accelerator.end_training()


def main():
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--images", type=int, default=10_000, help="for each worker")
    parser.add_argument("--width", type=int, default=256, help="of the hidden layer")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
