"""What all tests share: no network, repeatable examples, and the default model loaded once."""

import os

# Before transformers is imported: nothing here may ask a hub for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

# The same examples on every run, and no failures for a slow machine's sake.
settings.register_profile("mtplx", derandomize=True, deadline=None)
settings.load_profile("mtplx")


@pytest.fixture(scope="session")
def default_model():
    """The built-in model in float32. Tests that use it are marked `model`."""
    import mtplx

    return mtplx.load("smollm2-135m", dtype="float32")


@pytest.fixture(autouse=True)
def random_heads_are_kept(monkeypatch):
    """They are as good as dead, and tests draft with them all the same."""
    monkeypatch.setattr("mtplx.drafters.record.ENOUGH", 10**9)
