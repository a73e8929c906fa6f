"""PyTorch Lightning: its DDP strategy, with gradients that a store of kvstore averages.

    kvstore run -n 4 lightning_ddp.py

Each worker trains on images of its own, and prints its loss before and after and the sum of all weights
without their signs, which is the same on all:

    worker 0 of 4: loss 0.67 -> 0.01, weights 785.1341
"""

import argparse
import logging
import os
import warnings

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

import kvstore as kv
from kvstore.torch import HookState, allreduce_hook


class Classifier(lightning.LightningModule):
    """A small network."""

    def __init__(self, width):
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )
        self.losses = []

    def training_step(self, batch, index):
        """Return the loss of a batch."""
        images, labels = batch
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.network(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        """Return the optimizer, which Lightning steps."""
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class AveragedByStore(DDPStrategy):
    """DDP, with gradients averaged by a store; DDPStrategy(ddp_comm_hook=...) does nothing on processors."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def configure_ddp(self):
        """Register the hook with the DDP model, on any device."""
        super().configure_ddp()
        self.model.register_comm_hook(HookState(self.store), allreduce_hook)


def train(options, store):
    """Train, and print the result."""
    torch.manual_seed(0)
    model = Classifier(options.width)
    torch.manual_seed(1 + store.rank)
    images = torch.randn(options.images, 16)
    labels = (images.sum(dim=1, keepdim=True) > 0).float()
    batches = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, labels), batch_size=options.images
    )
    trainer = lightning.Trainer(
        strategy=AveragedByStore(store), accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=options.steps, use_distributed_sampler=False,  # each worker has images of its own
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, batches)
    total = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
    name, losses = f"worker {store.rank} of {store.num_workers}", model.losses
    print(f"{name}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, weights {total:.4f}", flush=True)


def main():
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--images", type=int, default=10_000, help="for each worker")
    parser.add_argument("--width", type=int, default=256, help="of the hidden layer")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    with kv.create("shared") as store:
        train(options, store)


if __name__ == "__main__":
    main()
