"""Variables that are read at every call."""

import os
from unittest import mock

import pytest

from fusedmoe.base import environment

NAME, OTHER = "FUSEDMOE_A_TEST", "FUSEDMOE_ANOTHER"


def test_a_change_is_noticed_at_once(monkeypatch):
    read = environment.reader(NAME, OTHER)
    seen = [read()]
    assert read() == seen[0]
    for name, text in [(NAME, "sm90.*, straße"), (OTHER, "sm90.*, straße"), (NAME, "1"), (NAME, "")]:
        monkeypatch.setenv(name, text)
        assert read() not in seen
        seen.append(read())
        assert read() == seen[-1]
    monkeypatch.delenv(NAME)
    monkeypatch.delenv(OTHER)
    assert read() == seen[0]
    with mock.patch.dict(os.environ, {NAME: "1", OTHER: "sm90.*, straße"}, clear=True):
        assert read() == seen[3]
    assert read() == seen[0]


def test_a_python_that_keeps_its_environment_elsewhere(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    read = environment.reader(NAME)
    before = read()
    os.environ[NAME] = "1"
    assert read() != before


@pytest.mark.parametrize(
    ("name", "text", "read", "unset", "is_set"),
    [
        ("FUSEDMOE_DISABLE", "sm90.*", environment.disabled_by_environment, "", "sm90.*"),
        ("FUSEDMOE_DEBUG", "1", environment.debugging, False, True),
    ],
)
def test_what_is_read(monkeypatch, name, text, read, unset, is_set):
    monkeypatch.delenv(name, raising=False)
    assert read() == unset
    before = environment.environment_state()
    monkeypatch.setenv(name, text)
    assert read() == is_set
    assert environment.environment_state() != before


@pytest.mark.parametrize(("text", "expected"), [("1", True), (" True ", True), ("", False), ("off", False)])
def test_debugging_is_switched_by_the_usual_words(monkeypatch, caplog, text, expected):
    monkeypatch.setenv("FUSEDMOE_DEBUG", text)
    assert environment.debugging() is expected
    assert caplog.records == []


def test_debugging_by_another_word_is_off_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setenv("FUSEDMOE_DEBUG", "2")
    assert not environment.debugging()
    assert not environment.debugging()
    assert [r.getMessage() for r in caplog.records] == ["FUSEDMOE_DEBUG=2: expected 1 or 0; treated as 0"]
