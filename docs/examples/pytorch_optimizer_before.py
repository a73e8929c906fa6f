"""A training loop of PyTorch in one process.

    python pytorch_optimizer_before.py

pytorch_optimizer_after.py is the same program for several processes. It prints the loss before and after,
and the sum of all weights without their signs:

    worker 0 of 1: loss 0.67 -> 0.01, weights 783.2238
"""

import argparse

import torch


def train(options):
    """Train a small network, and print the result."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 1)
    )
    images = torch.randn(options.images, 16)
    labels = (images.sum(dim=1, keepdim=True) > 0).float()
    rank, size = 0, 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
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
