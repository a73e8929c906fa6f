#!/bin/bash
# Training with parameter servers on two machines that torchrun connects: 8 workers, 2 servers.
#
#     bash torchrun_nodes.sh     # on each machine
#
# torchrun gives each process its rank; `kvstore role` also runs the scheduler with rank 0 and the servers with
# other ranks. They meet in a folder that both machines see: rank 0 writes the keys of the job there, and
# deletes them at the end. Between the machines, connections are encrypted.
# A firewall must pass RDZV_PORT and the ports of KVSTORE_PORTS.
set -euo pipefail

FIRST=${FIRST:-10.0.0.5}    # address of the first machine
NODES=${NODES:-2}
WORKERS=${WORKERS:-4}       # of each machine
SERVERS=${SERVERS:-2}       # of all machines
RDZV_PORT=${RDZV_PORT:-29400}
FOLDER=${FOLDER:-$PWD}      # on a file system that all machines see
PROGRAM=${PROGRAM:-$FOLDER/numpy_workers.py}

export KVSTORE_JOB=${KVSTORE_JOB:-two-machines}       # the same on all machines, and new for each job
export KVSTORE_PORTS=${KVSTORE_PORTS:-7000-7100}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

torchrun --nnodes "$NODES" --nproc-per-node "$WORKERS" \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST:$RDZV_PORT" --rdzv-id "$KVSTORE_JOB" --no-python \
    kvstore role --servers "$SERVERS" --meet "$FOLDER/meeting" "$PROGRAM" --store dist_sync "$@"
