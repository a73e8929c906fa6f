"""The Hugging Face Trainer: its DDP, with gradients that a store of kvstore averages.

    kvstore run -n 4 hf_trainer.py

The Trainer gives each worker its part of every batch. Each prints the mean loss of the first ten steps and of
the last ten, and the sum of all weights without their signs, which is the same on all:

    worker 0 of 4: loss 0.60 -> 0.05, weights 731.6310
"""

import argparse
import tempfile

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import kvstore as kv
from kvstore.torch import HookState, allreduce_hook


class Classifier(torch.nn.Module):
    """A small network, which returns the loss as models of transformers do."""

    def __init__(self, width):
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )
        self.losses = []

    def forward(self, images, labels):
        """Return the loss of a batch."""
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.network(images), labels)
        self.losses.append(loss.item())
        return {"loss": loss}


class Averages(TrainerCallback):
    """Has a store average the gradients, from the first step on."""

    def __init__(self, store, prefix="ddp."):
        self.store, self.prefix, self.trainer = store, prefix, None

    def on_step_begin(self, args, state, control, **kwargs):
        """Register the hook with the DDP model, which exists now."""
        model = self.trainer.model_wrapped
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) and state.global_step == 0:
            model.register_comm_hook(HookState(self.store, self.prefix), allreduce_hook)


def train(options):
    """Train, and print the result."""
    torch.manual_seed(0)
    model = Classifier(options.width)
    images = torch.randn(options.images, 16)
    labels = (images.sum(dim=1, keepdim=True) > 0).float()
    data = [{"images": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder, kv.create("shared") as store:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=options.steps, per_device_train_batch_size=options.batch,
            learning_rate=0.01, use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no",
            logging_strategy="no", ddp_find_unused_parameters=False,
        )  # fmt: skip
        averages = Averages(store)
        trainer = averages.trainer = Trainer(model, arguments, train_dataset=data, callbacks=[averages])
        trainer.train()
        rank, size = store.rank, store.num_workers
    total = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
    first, last = (sum(part) / len(part) for part in (model.losses[:10], model.losses[-10:]))
    print(f"worker {rank} of {size}: loss {first:.2f} -> {last:.2f}, weights {total:.4f}", flush=True)


def main():
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--images", type=int, default=10_000, help="of all workers")
    parser.add_argument("--batch", type=int, default=100, help="images of a worker in a step")
    parser.add_argument("--width", type=int, default=256, help="of the hidden layer")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
