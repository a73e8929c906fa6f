"""A training loop of PyTorch in several processes: DistributedOptimizer averages the gradients.

    kvstore run -n 4 pytorch_optimizer_after.py

pytorch_optimizer_before.py is the same program for one process. Each worker takes every fourth image, and
prints its loss before and after and the sum of all weights without their signs, which is the same on all
and, but for rounding, that of one process:

    [0] worker 0 of 4: loss 0.67 -> 0.01, weights 783.2237
"""

import argparse

import torch

import kvstore as kv
from kvstore.torch import DistributedOptimizer


def train(options):
    """Train a small network, and print the result."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 1)
    )
    images = torch.randn(options.images, 16)
    labels = (images.sum(dim=1, keepdim=True) > 0).float()
    store = kv.create("shared")
    rank, size = store.rank, store.num_workers
    images, labels = images[rank::size], labels[rank::size]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = DistributedOptimizer(optimizer, model.named_parameters(), store)
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    store.close()
    total = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
    print(f"worker {rank} of {size}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, weights {total:.4f}")


def main():
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--images", type=int, default=40_000, help="in all")
    parser.add_argument("--width", type=int, default=256, help="of the hidden layer")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
