import pytest

from opengyre.proxy.redaction import host_names, redacted_call


def line(**more):
    return {"headers": {}, "request": {}, "response": None, "n": 1, **more}


def test_ids_outside_of_what_the_model_reads_are_taken_out():
    request = {
        "metadata": {"user_id": '{"device_id":"d","session_id":"s"}', "n": 1},
        "client_metadata": {"x-codex-installation-id": "77", "turn": '{"installation_id":"77","turn":"1"}'},
        "safety_identifier": "me",
        "user": {"name": "kept"},
    }
    assert redacted_call(line(request=request), {})["request"] == {
        "metadata": {"user_id": "redacted", "n": 1},
        "client_metadata": {
            "x-codex-installation-id": "redacted",
            "turn": '{"installation_id":"redacted","turn":"1"}',
        },
        "safety_identifier": "redacted",
        "user": {"name": "kept"},
    }


@pytest.mark.parametrize("part", ["messages", "input", "tools", "system"])
def test_what_the_model_reads_keeps_its_words(part):
    request = {"user": "ann", part: [{"content": '{"user_id": "42"}', "input": {"user": "bob"}}]}
    kept = redacted_call(line(request=request), {})["request"]
    assert kept == {**request, "user": "redacted"}
    assert list(kept) == list(request)


def test_the_names_of_the_host_are_taken_out_everywhere():
    names = {"/Users/ann": "/home-of-user"}
    whole = line(
        headers={"x-workspace": "/Users/ann/x"},
        request={"messages": [{"content": "in /Users/ann/x and /Users/ann"}], "cwd": "/Users/ann"},
        response={"choices": [{"text": "/Users/ann/y"}]},
    )
    assert "ann" not in str(redacted_call(whole, names))


@pytest.mark.parametrize(
    ("home", "names"),
    [("/Users/ann", {"/Users/ann": "/home-of-user"}), ("/root", {"/root/": "/home-of-user/"}), ("/", {})],
)
def test_the_home_folder_is_the_name_of_a_host(home, names, monkeypatch):
    monkeypatch.setenv("HOME", home)
    assert host_names() == names
