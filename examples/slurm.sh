#!/bin/bash
# A federated run on two nodes of four GPUs, which continues until it is done; or a sweep, by an array of jobs:
#   sbatch [options] examples/slurm.sh experiment/fedgloss/cifar10_alpha0.05 [settings]
#   sbatch --array=1-8 --nodes=1 --ntasks-per-node=1 --gpus-per-node=1 examples/slurm.sh sweep sweeps/digits [--seeds 0,1,2]
#SBATCH --job-name=fl-lightning
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
config=$1
if [ "$config" != sweep ]; then
    shift
    set -- fit --config "$config" --trainer.name "$(basename "$config" .yaml)" "$@" \
        --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" --trainer.strategy ddp \
        --trainer.default_root_dir runs --ckpt_path auto
fi
srun fl-lightning "$@"
code=$?
# 128 + SIGUSR1: the time limit is near, and the run is saved. The job starts again if it has trained since its start,
# when SLURM wrote this script to its spool folder
if [ $code -eq 138 ] && [ -n "$(find runs -name last.ckpt -newer "$0" -print -quit)" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # SLURM ends the script
fi
# 128 + SIGTERM: scancel, or a preemption with a grace time, at whose end SLURM starts the job again if it still runs
if [ $code -eq 143 ]; then sleep 600; fi
exit $code
