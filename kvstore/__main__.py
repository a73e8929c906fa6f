"""``python -m kvstore``: the `kvstore` command, for environments without its script on the path."""

from .launch.cli import main

if __name__ == "__main__":
    main(prog_name="kvstore")
