"""How a plan file is started: torchrun's command line, and a Slurm job that runs it on every node."""

from __future__ import annotations

import re

from wavetrain.plan.export.exported import Exported, comments
from wavetrain.plan.plan import Plan

PORT = 29500
PLAN_FILE = "plan.json"
HOST_DEVICE = "cpu"  # what names of devices that Slurm need not hand out begin with
SITE = "time limit, partition and account: they are the site's"


def write_torchrun(plan: Plan) -> Exported:
    """The command to run on every node; the plan file itself says all else."""
    nodes = plan.cluster.num_nodes
    where = "" if nodes == 1 else f"on each of the {nodes} nodes, with HEAD_NODE the name of the first; "
    title = f"{where}{PLAN_FILE} is the plan this was made from"
    return Exported("torchrun", f"{comments(title, ())}{_command(plan)}\n", "launch.sh")


def write_slurm(plan: Plan) -> Exported:
    """A job for sbatch: one torchrun per node."""
    cluster = plan.cluster
    gpus = "" if cluster.device.name.startswith(HOST_DEVICE) else f"#SBATCH --gpus-per-node={_per_node(plan)}\n"
    name = re.sub(r"[^\w.-]", "-", plan.model.name)
    title = f"{plan.model.name} on {cluster.name}; {PLAN_FILE} is the plan this was made from"
    head = 'HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nexport HEAD_NODE\n'
    text = (
        "#!/bin/bash\n"
        f"#SBATCH --job-name=wavetrain-{name}\n"
        f"#SBATCH --nodes={cluster.num_nodes}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"{gpus}"
        "#SBATCH --exclusive\n"
        "#SBATCH --output=%x-%j.out\n"
        f"{comments(title, (SITE,))}"
        "set -euo pipefail\n"
        f"{head if cluster.num_nodes > 1 else ''}"
        f"srun {_command(plan, prefix='env ')}\n"
    )
    return Exported("slurm", text, "job.sbatch", (SITE,))


def _command(plan: Plan, *, prefix: str = "") -> str:
    nodes = plan.cluster.num_nodes
    meeting = (
        "--standalone"
        if nodes == 1
        else f'--rdzv-backend=c10d --rdzv-endpoint="$HEAD_NODE:{PORT}" --rdzv-id="${{SLURM_JOB_ID:-wavetrain}}"'
    )
    size = f"--nnodes={nodes} --nproc-per-node={_per_node(plan)}"
    return f"{prefix}OMP_NUM_THREADS=1 torchrun {size} {meeting} -m wavetrain train {PLAN_FILE}"


def _per_node(plan: Plan) -> int:
    return plan.cluster.node.num_devices
