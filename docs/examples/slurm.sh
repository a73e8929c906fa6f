#!/bin/bash
# Training with parameter servers under Slurm: 2 hosts, 8 workers, 2 servers.
#
#     sbatch slurm.sh
#
# Each task is a worker. Task 0 also runs the scheduler, and two tasks also run a server, on different hosts. They
# meet in a folder that all hosts see: task 0 writes the keys of the job there, and deletes them at the end.
# The output is written to train-JOB.out, with the lines of each worker.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --output=train-%j.out

set -euo pipefail

# Programs and environment, on a file system that all hosts see.
PROGRAM=${PROGRAM:-$SLURM_SUBMIT_DIR/numpy_workers.py}
source "${VENV:-$HOME/venv}/bin/activate"

# As many threads for a worker as it has processors; a server in the same task shares them.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# Without --kill-on-bad-exit the others would notice the death of a task only by their stores.
srun --kill-on-bad-exit=1 kvstore role --servers 2 --meet "$SLURM_SUBMIT_DIR/meeting" \
    "$PROGRAM" --store dist_sync "$@"
