"""The clock of stages."""

from types import SimpleNamespace

import pytest
import torch

from fppo.pipeline.timing import now


def test_the_clock_waits_for_its_own_stream_alone(monkeypatch):
    """While another thread records a graph, waiting for the whole device is an error, and ends the recording."""
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: pytest.fail("waits for the whole device"))
    assert now() <= now()
    assert len(waited) == 2
