from opengyre.cli import main
from opengyre.run.bench import BENCHES, available


def test_an_unknown_measurement_is_one_line_that_names_the_known_ones(capsys):
    assert main(["bench", "speed"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(name in error for name in BENCHES)


def test_the_measurements_of_this_version_are_known():
    assert set(available()) <= set(BENCHES)
