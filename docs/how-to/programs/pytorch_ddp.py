import torch
from torch.nn.parallel import DistributedDataParallel

import kvstore as kv
from kvstore.torch import HookState, allreduce_hook


def train(store):
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model.register_comm_hook(HookState(store), allreduce_hook)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    images = torch.randn(32, 4)
    for _ in range(100):
        sgd.zero_grad()
        loss = (model(images) - images.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        sgd.step()
    assert loss < 0.01
    print(f"worker {store.rank} of {store.num_workers} has learned: {loss:.6f}")


torch.distributed.init_process_group("gloo")
with kv.create("shared") as store:
    train(store)
torch.distributed.destroy_process_group()  # when the model is gone; else torch may hang at the end
