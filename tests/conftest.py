import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for a hub
os.environ["OMP_NUM_THREADS"] = "1"  # models are so small that threads would only wait for each other


def pytest_collection_finish(session):
    """Begins what takes several ranks, one script after another, if the session is about to ask for it."""
    from helpers import AHEAD, scenarios

    asked, before = {item.path.name for item in session.items}, None
    for file, script in AHEAD.items() if not session.config.option.collectonly else ():
        if file in asked:
            before, _ = scenarios(script, before)
