"""Options that all tests know."""


def pytest_addoption(parser):
    parser.addoption("--results", metavar="DIR", default=None, help="write the outcome of the GPU tests there, as JSON")
