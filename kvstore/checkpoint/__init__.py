"""Values as files, and checkpoints: model, optimizer, position and step in one file for each step."""
