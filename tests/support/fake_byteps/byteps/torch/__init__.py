from byteps.torch.ops import declare, init, local_rank, poll, push_pull_async_inplace, rank, size, synchronize

byteps_push_pull = push_pull_async_inplace  # the name that BytePS itself gives it here

__all__ = ["byteps_push_pull", "declare", "init", "local_rank", "poll", "rank", "size", "synchronize"]
