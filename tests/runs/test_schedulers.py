"""The job files in tests/tools: the script for Slurm runs with stand-ins for Slurm's programs, and
the one for Kubernetes is read."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import torch.distributed.run
import tyro
import yaml
from helpers import ROOT

import critic_fsdp

SLURM = (ROOT / "tests" / "tools" / "slurm.sh").read_text()
KUBERNETES = (ROOT / "tests" / "tools" / "k8s.yaml").read_text()

# srun kills the job when it gets SIGTERM itself, and scancel signals what srun has started
STAND_INS = {
    "srun": """#!/bin/bash
while [[ $1 != *torchrun && $1 != *python* ]]; do shift; done
"$@" &
echo $! > step
trap 'kill -KILL $(cat step)' TERM HUP QUIT
wait $!
""",
    "scancel": """#!/bin/bash
[ "$*" = "--signal=TERM 7.0" ] && kill -TERM "$(cat step)"
""",
    "scontrol": """#!/bin/bash
case $1 in
show) echo localhost ;;
requeue) echo "$2" >> requeued ;;
esac
""",
}


def flags_of(command):
    """What a command says after critic_fsdp.py, as flags."""
    return tyro.cli(critic_fsdp.Run, args=command[command.index("critic_fsdp.py") + 1 :])


def test_the_flags_exist():
    """Both jobs have 16 ranks, which save where all machines can read."""
    [line] = re.findall(r"^srun (.*) &$", SLURM.replace("\\\n", " "), flags=re.M)
    [job] = [x for x in yaml.safe_load_all(KUBERNETES) if x["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    for command in (shlex.split(line), container["command"]):
        run = flags_of(command)
        critic_fsdp.check_layout(run.critic, 16)
        assert (run.resume, run.save_every, run.critic.model) == ("auto", 50, "Qwen/Qwen2.5-7B")


def test_pods_find_each_other():
    """The pods' names are in the domain of the service, and the first is the one that all meet."""
    service, job = yaml.safe_load_all(KUBERNETES)
    pods = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pods["subdomain"] == service["metadata"]["name"]
    [container] = pods["containers"]
    assert f"--rdzv-endpoint={name}-0.{pods['subdomain']}:29500" in container["command"]
    assert f"--nnodes={job['spec']['completions']}" in container["command"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    grace = pods["terminationGracePeriodSeconds"]
    [shutdown] = re.findall(r"--shutdown-timeout=(\d+)", " ".join(container["command"]))
    assert int(shutdown) < grace
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pods["volumes"]}


def start(folder, steps):
    """The script for Slurm on one rank, with small rows and this many steps."""
    script = SLURM.replace("--nproc-per-node 8", "--nproc-per-node 1")
    script = script.replace(".venv/bin/torchrun", f"{sys.executable} -m torch.distributed.run")
    script = script.replace("critic_fsdp.py", str(ROOT / "critic_fsdp.py"))
    script = script.replace("29500", "0")  # a free port, on one machine
    if "--shutdown-timeout" not in torch.distributed.run.get_args_parser().format_help():
        script = script.replace("--shutdown-timeout 600", "")  # torch 2.11 waits 30 s
    script = re.sub(r"--model \S+ --rollouts \S+", f"--steps {steps} --eval-every 0", script)
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1"}
    slurm["SLURM_CPUS_PER_TASK"] = "1"
    path = f"{programs}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, **slurm, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_job_that_slurm_stops_saves_is_queued_again_and_goes_on(tmp_path):
    job = start(tmp_path, steps=10_000)
    log = tmp_path / "out" / "7b" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text()):
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()[0]
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)  # what --signal=B:USR1@600 sends
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 1, said  # that of torchrun after any signal
    assert (tmp_path / "requeued").read_text() == "7\n"

    # the queued job continues from the step that was saved, to its end
    [saved] = (tmp_path / "out" / "7b" / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step_"))
    again = start(tmp_path, steps=step + 2)
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert re.search(rf"^resume .*step_{step}\b", said, flags=re.M)
    assert (tmp_path / "requeued").read_text() == "7\n"
