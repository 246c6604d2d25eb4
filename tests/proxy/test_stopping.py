import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.chat import Message
from opengyre.core.protocols import Generation
from opengyre.core.types import Finish, VersionRun
from opengyre.proxy.stopping import stopped


def parse(output):
    """Take each token for the letter of its number."""
    return Message(role="assistant", content="".join(map(chr, output.tolist())))


def generated(text):
    output = np.array([ord(letter) for letter in text], np.int32)
    versions = (VersionRun(1, len(text) // 2), VersionRun(2, len(text) - len(text) // 2))
    return Generation(
        output=output, behaviour_logprobs=np.zeros(len(text), np.float32), versions=versions, finish=Finish.LENGTH
    )


@given(st.text("abc", max_size=20), st.lists(st.text("abc", max_size=3), max_size=3))
def test_an_answer_is_kept_up_to_the_token_that_completes_a_stop_text(text, stops):
    message, kept, stop = stopped(generated(text), stops, parse)
    ends = [text.find(each) + len(each) for each in stops if each and each in text]
    expected = text[: min(ends)] if ends else text
    assert parse(kept.output).content == expected
    assert message.content + stop == expected
    assert len(kept.behaviour_logprobs) == sum(run.count for run in kept.versions) == len(expected)
    assert kept.finish is (Finish.STOP if ends else Finish.LENGTH)


def test_the_stop_text_that_is_complete_first_ends_the_answer():
    message, kept, stop = stopped(generated("xabcx"), ("abcx", "b"), parse)
    assert (message.content, stop, parse(kept.output).content) == ("xa", "b", "xab")
