import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for a hub
# models are so small that threads would only wait for each other
os.environ["OMP_NUM_THREADS"] = "1"
# tests compare what a CPU computes; of a GPU see test_device.py
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from helpers import AHEAD, scenarios  # noqa: E402  # imports torch

QUICK = ("test_house.py", "test_common.py", "test_exercises.py", "test_ppo_loop.py")
LAUNCHES = ("command_line", "heads_and_lora", "ranks", "readme", "starts", "stops", "vision")
LAUNCHES = tuple(f"test_{name}.py" for name in LAUNCHES)


def pytest_collection_modifyitems(items):
    """Marks whole files as quick. What starts ranks comes late, and what others do meanwhile comes
    last."""
    for item in items:
        if item.path.name in QUICK:
            item.add_marker("quick")
    items.sort(key=lambda item: 2 * (item.path.name in AHEAD) + (item.path.name in LAUNCHES))


def pytest_collection_finish(session):
    """Begins what takes several ranks, one script after another, if the session is about to ask for
    it."""
    # what is imported never goes: to look through it again and again takes a tenth of the time
    gc.freeze()
    asked, before = {item.path.name for item in session.items}, None
    for file, jobs in AHEAD.items() if not session.config.option.collectonly else ():
        for job in jobs if file in asked else ():
            before, _ = scenarios(*job, after=before)
