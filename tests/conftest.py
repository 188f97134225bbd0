import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for a hub
os.environ["OMP_NUM_THREADS"] = "1"  # models are so small that threads would only wait for each other
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests compare what a CPU computes; of a GPU see test_device.py

QUICK = ("test_budget.py", "test_common.py", "test_edges.py", "test_exercises.py", "test_ppo_loop.py")


def pytest_collection_modifyitems(items):
    """Marks whole files as quick, and asks last for what other processes do meanwhile."""
    from helpers import AHEAD

    for item in items:
        if item.path.name in QUICK:
            item.add_marker("quick")
    items.sort(key=lambda item: item.path.name in AHEAD)


def pytest_collection_finish(session):
    """Begins what takes several ranks, one script after another, if the session is about to ask for it."""
    from helpers import AHEAD, scenarios

    gc.freeze()  # what is imported never goes: to look through it again and again takes a tenth of the time
    asked, before = {item.path.name for item in session.items}, None
    for file, jobs in AHEAD.items() if not session.config.option.collectonly else ():
        for job in jobs if file in asked else ():
            before, _ = scenarios(*job, after=before)
