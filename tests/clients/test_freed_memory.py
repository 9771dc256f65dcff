import os
import subprocess
import sys

import pytest

_STEPS = """
import resource, sys
import torch
from protofed.system import keep_freed_memory

if "keep" in sys.argv:
    keep_freed_memory()

def step():
    activations = [torch.ones(4, 2**20) for _ in range(4)]

for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


# Left to itself, the C library adapts to what it happens to see first.
_GIVES_BACK = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}


def _faults(*arguments: str) -> int:
    """How often the system had to hand out a page in forty steps of 64 MiB each."""
    command = [sys.executable, "-c", _STEPS, *arguments]
    done = subprocess.run(command, env=os.environ | _GIVES_BACK, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told what to keep")
def test_a_step_uses_the_memory_of_the_step_before() -> None:
    # The heap may still grow once in a while.
    assert 4 * _faults("keep") < _faults()
