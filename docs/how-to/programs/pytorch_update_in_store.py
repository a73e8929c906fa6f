import torch

import kvstore as kv
from kvstore.torch import DistributedOptimizer

with kv.create("dist_sync") as store:
    torch.manual_seed(store.rank)
    model = torch.nn.Linear(4, 1)
    rule = kv.optimizer.SGD(learning_rate=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(rule, model.named_parameters(), store, update_on_kvstore=True)
    images = torch.randn(32, 4)
    for _ in range(150):
        optimizer.zero_grad()
        loss = (model(images) - images.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()  # the servers have updated the weights; here they come back
    assert loss < 0.01
    print(f"worker {store.rank} of {store.num_workers} has learned: {loss:.6f}")
