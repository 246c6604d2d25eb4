import io
import re
from html.parser import HTMLParser

import msgspec
import pytest
from rich.console import Console

from opengyre.core.events import Mode
from opengyre.report.figures import RunData
from opengyre.report.page import page
from opengyre.report.progress import CellView, LiveStatus, ProgressDisplay
from opengyre.report.results import summarise
from opengyre.report.tables import show_results
from opengyre.report.trace import lanes, trace_events

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Collects tags that are opened and not closed, and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in {"src", "href"} and value and ":" in value]

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    return checker


@pytest.mark.parametrize("steps", [0, 1, 24])
def test_the_page_is_well_formed_and_fetches_nothing(made_up_run, steps):
    data = made_up_run(steps) if steps else RunData(name="empty", records=[])
    checker = checked(page(data, summarise(data)))
    assert checker.fetched == []
    assert "script" not in checker.seen


def test_what_a_model_wrote_is_escaped(made_up_run):
    data = made_up_run(24)
    text = page(data, summarise(data), trees='"><script>x</script>')
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script>" not in text


def test_the_name_of_a_run_is_escaped():
    data = RunData(name="<b>&run", records=[])
    assert "<h1>&lt;b&gt;&amp;run</h1>" in page(data, summarise(data))


def test_the_page_shows_pass_rates_with_their_paired_interval(made_up_run):
    data = made_up_run(24)
    results = summarise(data)
    text = page(data, results)
    change = results.gains[0].change
    assert f"{change.difference * 100:+.1f} points [{change.low * 100:+.1f}, {change.high * 100:+.1f}]" in text


def test_a_run_of_24_steps_stays_a_small_page(made_up_run):
    data = made_up_run(24)
    assert len(page(data, summarise(data))) < 400_000


def test_the_tables_name_every_cell_and_evaluation(made_up_run):
    written = io.StringIO()
    results = summarise(made_up_run(24))
    show_results(results, Console(file=written, width=160))
    text = written.getvalue()
    assert "1280 executions" in text
    assert len(re.findall(r"\b(sampled|greedy)\b +0\.\d{3}", text)) == 4


def test_the_trace_has_every_execution_in_a_lane_of_its_own_time(made_up_run):
    data = made_up_run(4)
    events = msgspec.json.decode(msgspec.json.encode(trace_events(data.records)))
    executions = [event for event in events if event["ph"] == "X" and event["pid"] == 3]
    assert len(executions) == summarise(data).executions
    ends: dict[int, float] = {}
    for event in sorted(executions, key=lambda one: one["ts"]):
        assert event["ts"] >= ends.get(event["tid"], 0.0) - 1.0
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_lanes_are_as_few_as_executions_live_at_once(made_up_run):
    assert lanes([]) == []
    placed = lanes(record for record in made_up_run(1).records if type(record).__name__ == "ExecutionRecord")
    assert 1 <= max(lane for _, lane in placed) + 1 <= len(placed)


def moment(step: int, now_s: float, waits_for: str = "") -> LiveStatus:
    cells = (CellView(cell_id=0, mode=Mode.ROLLOUT, running=3), CellView(cell_id=1, mode=Mode.TRAINING))
    return LiveStatus(
        now_s=now_s, started_s=0.0, step=step, steps=4, version=step, waterlevel=9, cells=cells, waits_for=waits_for
    )


def test_without_a_terminal_there_is_a_line_a_step_a_stall_and_a_line_every_half_minute():
    written = io.StringIO()
    with ProgressDisplay(Console(file=written, width=200)) as display:
        for status in (moment(0, 0.0), moment(0, 5.0), moment(0, 31.0), moment(1, 32.0), moment(1, 40.0, "group 3")):
            display.show(status)
    lines = written.getvalue().splitlines()
    assert [line.split("  ")[0:2] for line in lines] == [
        ["0:00", "step 0/4"],
        ["0:31", "step 0/4"],
        ["0:32", "step 1/4"],
        ["0:40", "step 1/4"],
    ]
    assert lines[-1].endswith("waits for group 3")


def test_on_a_terminal_the_panel_shows_every_cell():
    written = io.StringIO()
    console = Console(file=written, width=100, force_terminal=True)
    with ProgressDisplay(console) as display:
        display.show(moment(2, 60.0))
    assert "cell 1" in written.getvalue()
