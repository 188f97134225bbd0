#!/bin/bash
# A job of Slurm, for sbatch in the folder of the scripts: two machines with eight GPUs each train a
# critic. Ten minutes before the limit, Slurm sends USR1 to this script, which has SIGTERM sent to
# torchrun. The run saves, torchrun ends with a traceback of its own and status 1, and the job is
# queued again. With --requeue it also is after a machine has failed; --resume auto continues it.
# The torchrun of torch 2.11 has no --shutdown-timeout: there a save must end within 30 seconds.
#
#SBATCH --job-name=critic --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64
#SBATCH --time=24:00:00 --signal=B:USR1@600 --requeue --open-mode=append

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    .venv/bin/torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" \
    --shutdown-timeout 600 \
    critic_fsdp.py --model Qwen/Qwen2.5-7B --rollouts train.jsonl --gradient-checkpointing \
    --resume auto --save-every 50 --keep 3 --out-dir out/7b &
run=$!
trap 'stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1  # srun itself would kill all

wait "$run"  # returns early when the signal comes
wait "$run"
status=$?
[ -z "${stopped:-}" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
