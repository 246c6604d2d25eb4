"""What of a workspace goes into its scoring."""

from gyre_shim.grading import copy_workspace


def test_what_could_steer_a_grader_is_not_copied(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    for name in (
        "amber.py",
        "deep/er.py",
        "conftest.py",
        "deep/pyproject.toml",
        "evil.pth",
        "evil.egg-info/entry_points.txt",
        "deep/evil-1.0.dist-info/entry_points.txt",
        "__pycache__/amber.cpython-311.pyc",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x")
    (source / "link.py").symlink_to("/etc/passwd")
    (source / "linked").symlink_to("/etc")
    copied, refused = copy_workspace(str(source), str(target))
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()) == [
        "amber.py",
        "deep/er.py",
    ]
    assert copied == 2
    assert sorted(refused) == ["conftest.py", "deep/pyproject.toml", "evil.pth", "link.py"]
