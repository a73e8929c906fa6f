import torch

import kvstore as kv
from kvstore.torch import DistributedOptimizer, broadcast

with kv.create("shared") as store:
    torch.manual_seed(store.rank)
    images = torch.randn(64, 8)  # each worker has images of its own
    labels = (images.sum(dim=1, keepdim=True) > 0).float()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = DistributedOptimizer(
        sgd, model.named_parameters(), store
    )  # from here on: the weights of rank 0
    broadcast(store, model.named_buffers())  # and its buffers, if the model has some
    for _ in range(100):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(images), labels)
        loss.backward()  # exchanges gradients while it computes, and returns when they are averages
        optimizer.step()
    assert loss < 0.1
    print(f"worker {store.rank} of {store.num_workers} has learned: {loss:.4f}")
