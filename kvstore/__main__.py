"""``python -m kvstore``: the `kvstore` command, for environments whose path does not have its script."""

from .launch.cli import main

if __name__ == "__main__":
    main(prog_name="kvstore")
