import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for a hub
