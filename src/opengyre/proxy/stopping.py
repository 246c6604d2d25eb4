"""Stop sequences: an answer ends with the token that completes the first of the client's texts."""

from collections.abc import Callable, Sequence

import msgspec

from opengyre.core.chat import Message
from opengyre.core.protocols import Generation
from opengyre.core.types import Finish, Int32Array, VersionRun


def stopped(
    generation: Generation, stops: Sequence[str], parse: Callable[[Int32Array], Message]
) -> tuple[Message, Generation, str]:
    """Return the message and the tokens of an answer up to the first stop text, and that text (empty if none came).

    Choice: the texts are looked for in the visible text only. The tokens are kept up to the one that completes the
    text, the message ends before it. What is kept was drawn from the policy itself, so it can be trained.
    """
    whole = parse(generation.output)
    if _first_stop(whole.content, stops) is None:
        return whole, generation, ""
    low, high = 0, len(generation.output)
    while high - low > 1:
        middle = (low + high) // 2
        if _first_stop(parse(generation.output[:middle]).content, stops) is None:
            low = middle
        else:
            high = middle
    message = parse(generation.output[:high])
    found = _first_stop(message.content, stops)
    if found is None:
        return whole, generation, ""
    place, text = found
    cut = msgspec.structs.replace(
        generation,
        output=generation.output[:high],
        behaviour_logprobs=generation.behaviour_logprobs[:high],
        versions=cut_versions(generation.versions, high),
        finish=Finish.STOP,
    )
    return msgspec.structs.replace(message, content=message.content[:place], tool_calls=()), cut, text


def _first_stop(content: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return place and text of the stop text that comes first."""
    places = [(content.find(text), text) for text in stops if text]
    return min((found for found in places if found[0] >= 0), default=None)


def cut_versions(versions: Sequence[VersionRun], count: int) -> tuple[VersionRun, ...]:
    """Return the runs of the first ``count`` tokens.

    >>> cut_versions([VersionRun(1, 3), VersionRun(2, 4)], 5)
    (VersionRun(version=1, count=3, mixed=False), VersionRun(version=2, count=2, mixed=False))
    """
    kept = []
    for run in versions:
        if count > 0:
            kept.append(msgspec.structs.replace(run, count=min(run.count, count)))
        count -= run.count
    return tuple(kept)
