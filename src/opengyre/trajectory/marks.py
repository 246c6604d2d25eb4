"""What a harness itself says of a request, as data: which header, path or body field marks agents and roles."""

import re
from collections.abc import Mapping, Sequence

import msgspec


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What a harness says of one request; None where it says nothing.

    >>> Mark(agent="a1", is_sub_agent=True).is_compaction is None
    True
    """

    agent: str = ""
    is_sub_agent: bool | None = None
    is_compaction: bool | None = None
    is_auxiliary: bool | None = None


class MarkRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a mark stands, and which text means yes.

    >>> MarkRule(header="X-Kind", pattern="^compact").holds("/", {"x-kind": "compaction"}, {})
    True
    >>> MarkRule(body="metadata.kind").text("/", {}, {"metadata": {"kind": "title"}})
    'title'
    """

    header: str = ""
    """Name of a header, any case."""
    body: str = ""
    """Dotted path of a text in the body; a text on the way that holds JSON is entered."""
    path: str = ""
    """Regular expression over the URL path; its first group is the text."""
    pattern: str = ""
    """Regular expression that the text must contain; empty: any text. Its first group, if any, replaces the text."""

    def text(self, path: str, headers: Mapping[str, str], body: object) -> str | None:
        """Return the text that the rule finds, None if it finds none."""
        found: str | None = None
        if self.header:
            wanted = self.header.lower()
            found = next((value for name, value in headers.items() if name.lower() == wanted), None)
        elif self.body:
            found = _entered(body, self.body.split("."))
        elif self.path:
            matched = re.search(self.path, path)
            found = (matched.group(1) if matched.groups() else matched.group(0)) if matched else None
        if found is None or not self.pattern:
            return found
        fits = re.search(self.pattern, found)
        return None if fits is None else (fits.group(1) if fits.groups() else found)

    def holds(self, path: str, headers: Mapping[str, str], body: object) -> bool:
        """Return whether the rule finds its text."""
        return self.text(path, headers, body) is not None


class RoleMarks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a harness marks its requests: the part of a harness file that tells roles apart.

    Example: ``RoleMarks(agent=(MarkRule(header="x-agent"),), sub_agent=(MarkRule(header="x-parent"),))``. A harness
    that marks sub-agents makes every request without such a mark the main agent's; set ``sub_agent_is_complete=False``
    where it forgets some.
    """

    agent: tuple[MarkRule, ...] = ()
    """The first that finds a text names the agent."""
    sub_agent: tuple[MarkRule, ...] = ()
    compaction: tuple[MarkRule, ...] = ()
    auxiliary: tuple[MarkRule, ...] = ()
    sub_agent_is_complete: bool = True

    def read(self, path: str, headers: Mapping[str, str], body: object) -> Mark:
        """Return the mark of a request.

        >>> marks = RoleMarks(agent=(MarkRule(header="x-agent"),), sub_agent=(MarkRule(header="x-parent"),))
        >>> marks.read("/v1", {"X-Agent": "b", "X-Parent": "a"}, {})
        Mark(agent='b', is_sub_agent=True, is_compaction=None, is_auxiliary=None)
        """
        names = (rule.text(path, headers, body) for rule in self.agent)
        is_sub = any(rule.holds(path, headers, body) for rule in self.sub_agent)
        says_no = bool(self.sub_agent) and self.sub_agent_is_complete
        return Mark(
            agent=next((name for name in names if name), ""),
            is_sub_agent=True if is_sub else (False if says_no else None),
            is_compaction=any(rule.holds(path, headers, body) for rule in self.compaction) or None,
            is_auxiliary=any(rule.holds(path, headers, body) for rule in self.auxiliary) or None,
        )


def _entered(value: object, keys: Sequence[str]) -> str | None:
    """Return the text at a dotted path of a decoded body."""
    for key in keys:
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except msgspec.DecodeError:
                return None
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value if isinstance(value, str) else None
