"""The benchmarks run, and their result files say what was measured where."""

import json

import torch

from benchmarks import host, results


def test_host_times_are_of_work_that_was_done():
    report = host.measure(torch.device("cpu"), rounds=3)
    for times in report.passes.values():
        assert set(times) == set(host.VARIANTS)
        assert all(0 < t.least_us <= t.median_us for t in times.values())
    forward, both = report.passes["forward"], report.passes["forward + backward"]
    assert all(both[v].least_us > forward[v].least_us for v in host.VARIANTS)
    assert report.planning_ms > 0


def test_a_result_file_names_machine_versions_and_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMOE_COMMIT", "abc123")
    written = json.loads(results.write(tmp_path, "some", {"figure": 1.5}).read_text())
    assert written["figure"] == 1.5
    assert written["commit"] == "abc123"
    assert written["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in written["versions"]["torch"]
    assert written["machine"]
