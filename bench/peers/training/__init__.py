"""Ways to train a model in PyTorch."""
