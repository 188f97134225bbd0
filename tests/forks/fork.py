"""How the files of this folder start: as one of the scripts, a part of which they replace.

    python tests/forks/sp3o.py --steps 3                      critic_fsdp.py, with its flags
    python tests/forks/sp3o.py critic_megatron --steps 3      the other critic
    torchrun --nproc-per-node 2 tests/forks/sp3o.py ppo_loop  PPO, also with --critic megatron

A fork is a class with one or two methods of a critic, or functions that replace those of
ppo_loop.py. To begin one, copy quantiles.py. A fork of a critic changes that of --reward-model,
too, which then does not load unless it has the same outputs.
"""

import inspect
import sys
from importlib import import_module
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))  # the scripts

import common
import critic_fsdp  # noqa: F401
import ppo_loop  # here, because its actor must not inherit from a critic that has changed

NAMES = {"critic_fsdp": "DataParallelPPOCritic", "critic_megatron": "MegatronPPOCritic"}


def forked(script, part):
    """The critic of a script, a module, with the methods of the class `part` before its own. Its
    checkpoints bear the name of the fork's file: another critic would go on with another loss."""

    class Critic(part, getattr(script, NAMES[script.__name__])):
        def build(self, model_config):
            model_config.fork = Path(inspect.getfile(part)).stem
            super().build(model_config)

    return Critic


def run(part, description, flags=""):
    """Runs the script that the first word of the command line names, critic_fsdp without one, with
    a critic that has the methods of `part`. flags: of the critic; the command line's win."""
    words = sys.argv[1:]
    name = "critic_fsdp"
    if words and not words[0].startswith("-"):
        name = words.pop(0)
    if name not in (*NAMES, "ppo_loop"):
        sys.exit(f"{name}: no script has this name; there are {', '.join(NAMES)} and ppo_loop")
    if name == "ppo_loop":
        return ppo(flags.replace("--", "--critic."), part)

    script = import_module(name)
    setattr(script, NAMES[name], forked(script, part))
    speaks = common.RANK == 0  # one rank speaks for all
    words = [*flags.split(), *words]
    config = tyro.cli(script.Run, args=words, description=description, console_outputs=speaks)
    common.launch(lambda: script.main(config))


def ppo(flags="", part=None):
    """Runs ppo_loop.py, with a critic that has the methods of `part`, if any. flags: before those
    of the command line, which win."""
    words = sys.argv[1:]
    if words[:1] == ["ppo_loop"]:
        words = words[1:]
    sys.argv[1:] = [*flags.split(), *words]

    def start():
        if part:
            script = ppo_loop.critic_module(ppo_loop.parse(sys.argv[1:]).backend)
            setattr(script, NAMES[script.__name__], forked(script, part))
        ppo_loop.start()

    common.launch(start)
