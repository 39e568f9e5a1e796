"""What all tests share."""

import os

# small tensors: a pool of threads costs more than it brings, and far more where other processes want the cores too
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--results", metavar="DIR", default=None, help="write the outcome of the GPU tests there, as JSON")
