"""``python -m kvstore``: the `kvstore` command where its script is not on the path."""

from .launch.cli import main

if __name__ == "__main__":
    main(prog_name="kvstore")
