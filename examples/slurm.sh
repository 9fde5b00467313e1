#!/bin/bash
# A federated run on two nodes of four GPUs, which continues until it is done:
#   sbatch examples/slurm.sh experiment/fedgloss/cifar10_alpha0.05 [settings]
#SBATCH --job-name=fl-lightning
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300
#SBATCH --open-mode=append
set -u
config=$1
shift
name=$(basename "$config" .yaml)
last=$(ls -t runs/"$name"/version_*/checkpoints/last.ckpt 2>/dev/null | head -n 1)

srun fl-lightning fit --config "$config" --trainer.name "$name" \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" --trainer.strategy ddp \
    "$@" ${last:+--ckpt_path "$last"}
code=$?
# 130: it was interrupted, here by the signal before the time limit, and has saved its last whole round
if [ $code -eq 130 ]; then sbatch examples/slurm.sh "$config" "$@"; fi
exit $code
