"""The accelerators that plans know, by their data sheets; and what a case and its sampling are unless one says more."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from fppo.studies.plan.case import (
    BUILT_FOR_GPUS,
    COMMUNICATOR,
    CONTEXT,
    CUDA_PROCESS,
    FRAGMENTS,
    GIB,
    KNOWN,
    PROCESS,
    WORKSPACE,
    PlannedSampling,
    Role,
    hardware_of,
)
from fppo.studies.plan.host import process_bytes

# GiB; FLOPs per second of bfloat16 and of float32; bytes per second of memory, to the node, to others, to the host
SHEETS = {
    "a100-80": (79.2, 312e12, 19.5e12, 2039e9, 300e9, 25e9, 25e9),
    "h100": (79.1, 989e12, 67e12, 3.35e12, 450e9, 50e9, 50e9),
    "h200": (139.8, 989e12, 67e12, 4.8e12, 450e9, 50e9, 50e9),
    "b200": (178.3, 2250e12, 75e12, 7.7e12, 900e9, 50e9, 50e9),
}


@pytest.mark.parametrize("name", SHEETS)
def test_an_accelerator_is_as_its_data_sheet_has_it(name):
    memory, *rates = SHEETS[name]
    assert attrs.astuple(hardware_of(name)) == (name, memory * GIB, *rates, 8, True)


def test_those_and_no_others_are_known():
    assert set(KNOWN) == set(SHEETS)
    assert attrs.astuple(hardware_of("cpu"))[2:] == (1e11, 1e11, 15e9, 1e9, 0.12e9, 50e9, 2**20, False)
    numbers: dict[str, Any] = {"memory": 1e9, "flops": 3e13, "bandwidth": 2.0, "node_bandwidth": 3.0}
    own = attrs.astuple(hardware_of("custom", {**numbers, "network_bandwidth": 4.0}))
    assert own == ("custom", 1e9, 3e13, 2e12, 2.0, 3.0, 4.0, 50e9, 8, True)


def test_processes_take_what_was_measured_or_is_usual():
    mebibytes = [round(x / 2**20, 1) for x in (CONTEXT, WORKSPACE, COMMUNICATOR, PROCESS, BUILT_FOR_GPUS, CUDA_PROCESS)]
    assert mebibytes == [614.4, 96, 256, 450, 295, 2560]
    assert FRAGMENTS == 0.03


def test_a_process_without_a_gpu_is_larger_in_a_build_for_them(monkeypatch):
    for version, size in ((None, PROCESS), ("13.0", PROCESS + BUILT_FOR_GPUS)):
        monkeypatch.setattr("torch.version.cuda", version)
        assert process_bytes() == size


def test_a_role_and_a_rollout_are_plain_unless_one_says_more():
    role: dict[str, Any] = attrs.asdict(Role())
    assert str(role.pop("dtype")) == "torch.float32"
    assert set(role.values()) == {None}
    assert attrs.asdict(PlannedSampling()) == {
        "engine": "embedded",
        "sequences": None,
        "n": 1,
        "max_rows": 1024,
        "cache": None,
        "share": None,
        "dtype": None,
        "tensor": 1,
        "apart": False,
        "sleeps": False,
        "bucket": 2**28,
        "shared": False,
        "pool": None,
    }
