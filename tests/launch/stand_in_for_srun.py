"""A stand-in for srun: sets the variables of Slurm as its manual has them, for tasks of this machine.

``stand_in_for_srun.py NODELIST TASKS-PER-NODE COMMAND...`` runs the tasks of two nodes. The first task that
fails ends the other tasks, as with --kill-on-bad-exit. Slurm itself is not here, nor are several nodes.
"""

import os
import subprocess
import sys
import time


def main() -> None:
    nodes, each, *command = sys.argv[1:]
    size = 2 * int(each)
    common = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x2)",
    }
    tasks = []
    for rank in range(size):
        place = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % int(each)),
            "SLURM_NODEID": str(rank // int(each)),
        }
        tasks.append(subprocess.Popen(command, env={**os.environ, **common, **place}))
    asked = False
    while None in [task.poll() for task in tasks]:
        time.sleep(0.02)
        if not asked and any(task.returncode for task in tasks):
            asked = True
            for task in tasks:
                task.terminate()
    sys.exit(max(abs(task.returncode) for task in tasks))


if __name__ == "__main__":
    main()
