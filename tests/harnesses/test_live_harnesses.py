"""Real harnesses, installed from their registries, through sandbox, shim and proxy; ``make harnesses``."""

import shutil

import msgspec
import pytest

from opengyre.testing.live_cases import CASES, PARKED
from opengyre.testing.live_harness import check

PARK_S = 660.0
"""Longer than the ten minutes for which vendors' clients wait by default."""

pytestmark = pytest.mark.harness


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_harness_finishes_its_task_with_every_call_restored_delivered_and_told_apart(case, record_property):
    result = await check(case)
    record_property("live", msgspec.json.encode(result).decode())
    assert result.problems(case) == [], result.log
    shutil.rmtree(result.folder)


@pytest.mark.parametrize("case", PARKED, ids=lambda case: case.name)
async def test_a_harness_waits_eleven_minutes_for_an_answer(case, record_property):
    result = await check(case, park_s=PARK_S)
    record_property("parked", msgspec.json.encode(result).decode())
    assert result.problems(case) == [], result.log
    assert result.wall_s > PARK_S
    shutil.rmtree(result.folder)
