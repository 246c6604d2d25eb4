from opengyre.run.bench_proxy import run


def test_paths_are_built_and_every_call_at_a_rate_is_measured_with_its_parts():
    results = {each["case"]: each["value"] for each in run(executions=6, turns=4, calls={20.0: 5, 40.0: 4})}
    assert (results["20 calls/s: calls"], results["40 calls/s: calls"]) == (5, 4)
    for rate in ("20 calls/s", "40 calls/s"):
        assert 0 < results[f"{rate}: p50"] <= results[f"{rate}: p99"]
        parts = [results[f"{rate}: {name}, median"] for name in ("JSON", "matching", "rendering", "commit")]
        assert min(parts) > 0
    assert results["longest prompt of the first execution"] > 4 * 500
