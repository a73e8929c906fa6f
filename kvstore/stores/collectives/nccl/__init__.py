"""The store on NCCL."""
