"""500 executions through one proxy: every call in the ledger exactly once, and no memory left behind."""

import asyncio
import gc
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec
import pytest

from opengyre.core.chat import Message
from opengyre.ledger.ledger import Ledger
from opengyre.model.text_chat import ByteRenderer
from opengyre.proxy.server import Proxy
from opengyre.proxy.session import SessionSpec
from opengyre.run.replay import ScriptedEngine
from opengyre.testing.soak_client import LONGEST_DELAY_S, SoakResult, wave

WAVES, AT_A_TIME, CALLS = 20, 25, 30


class SlowEngine(ScriptedEngine):
    """Says something after a while."""

    async def generate(self, request):
        self.reply = Message(role="assistant", content=f"said {request.call_id}")
        generation = await super().generate(request)
        await asyncio.sleep(random.Random(request.seed).uniform(0, LONGEST_DELAY_S))
        return generation


def resident_mb():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.slow
async def test_500_executions_leave_every_call_in_the_ledger_once_and_no_memory_behind(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    ledger, engine = Ledger.open(folder), SlowEngine(ByteRenderer())
    proxy = Proxy(engine=engine, store=ledger, renderer=engine.renderer, clock=time.monotonic)
    await proxy.start()
    loop, resident, totals = (
        asyncio.get_running_loop(),
        [],
        dict.fromkeys(("calls", *SoakResult.__struct_fields__[1:]), 0),
    )
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            for number in range(WAVES):
                names = [f"s{number * AT_A_TIME + each}" for each in range(AT_A_TIME)]
                for name in names:
                    who = SessionSpec(
                        execution_id=name, group_id=0, slot=0, attempt=0, run_seed=0, context_tokens=1 << 24
                    )
                    await proxy.open_execution(who, folder / name)
                sockets = {name: str(folder / name) for name in names}
                known = msgspec.json.decode(
                    await loop.run_in_executor(pool, wave, sockets, CALLS, number), type=SoakResult
                )
                for name in names:
                    await proxy.close_execution(name)
                    calls = await ledger.calls(name)
                    assert {call.call_id for call in calls} == set(known.answers[name])
                    assert [call.seq for call in calls] == list(range(len(calls)))
                    totals["calls"] += len(calls)
                for field in SoakResult.__struct_fields__[1:]:
                    totals[field] += getattr(known, field)
                resident.append(resident_mb())
    finally:
        await proxy.stop()
        ledger.close()
    print(f"\n{WAVES * AT_A_TIME} executions, {totals}")  # noqa: T201 - the table of `make soak`
    print("resident MB after each wave:", " ".join(f"{each:.0f}" for each in resident))  # noqa: T201
    assert min(totals.values()) > 100
    again = Ledger.open(folder)
    try:
        stored = [len(await again.calls(f"s{each}")) for each in range(WAVES * AT_A_TIME)]
        assert sum(stored) == totals["calls"]
    finally:
        again.close()
    third = len(resident) // 3
    assert max(resident[-third:]) < max(resident[:third]) + 8, resident
