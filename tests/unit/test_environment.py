"""Variables that are read at every call."""

import os
from unittest import mock

from fusedmoe import environment

NAME = "FUSEDMOE_A_TEST"


def test_a_change_holds_at_once(monkeypatch):
    read = environment.reader(NAME)
    assert read() == ""
    monkeypatch.setenv(NAME, "sm90.*, straße")
    assert read() == os.environ[NAME] == "sm90.*, straße"
    monkeypatch.delenv(NAME)
    assert read() == ""
    with mock.patch.dict(os.environ, {NAME: "1"}, clear=True):
        assert read() == "1"
    assert read() == ""


def test_a_python_that_keeps_its_environment_elsewhere(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    read = environment.reader(NAME)
    assert read() == ""
    os.environ[NAME] = "1"
    assert read() == "1"
