"""Kernels in triton's interpreter, or on a GPU. Which one is decided when triton is imported: a process of its own.

Run by `make check` as a second pytest; ESPALIER_KERNEL_DEVICE=cuda runs the same tests on the device.
"""

import os

import pytest

DEVICE = os.environ.setdefault("ESPALIER_KERNEL_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

    from treecore.testing.bf16_interpreter import repair_bf16

    repair_bf16()


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return DEVICE


def pytest_configure(config: pytest.Config) -> None:
    """The interpreter's own habit, which numpy will forbid one day; and what a GPU does without a word: x / tiny."""
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore:overflow encountered in divide:RuntimeWarning")
