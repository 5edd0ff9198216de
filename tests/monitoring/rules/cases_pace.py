"""Cases about the pace of a job: throughput, goodput, stragglers, collectives, updates, data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.monitoring.rules.cases_progress import GPT, job
from tests.monitoring.rules.model import Case, Firing, Training, Value, flat, merged, ramp, series


def forged(world_sizes: tuple[str, ...] = ("2", "4"), count: int = 121) -> dict[str, list[Value]]:
    """Series of a pod in another namespace whose rank 0 exports several world sizes."""
    rank = {"namespace": "other", "job_name": "odd", "pod": "odd-1-0", "rank": "0"}
    exported = {
        series("zerotrain_rank_info", **rank, world_size=size, UUID="GPU-0", gpu_uuid=f"GPU-{number}"): flat(
            1, count
        )
        for number, size in enumerate(world_sizes)
    }
    counters = ("step_duration_seconds_sum", "step_duration_seconds_count", "tokens_total")
    return exported | {series(f"zerotrain_{name}", **rank): ramp(0, 60, count) for name in counters}


def twice(known: Mapping[str, Sequence[Value]]) -> dict[str, list[Value]]:
    """Return the same series as a second scrape of the same pods adds them."""
    return {name.replace("{", '{job="again",', 1): list(values) for name, values in known.items()}


def throughput() -> tuple[Case, ...]:
    alert = "ZeroTrainThroughputLow"
    work = Training(interval_s=60)
    half: list[Value] = [*ramp(0, 6000, 60), *ramp(360_000, 3000, 60), *ramp(540_000, 6000, 60)]
    little: list[Value] = [*ramp(0, 6000, 60), *ramp(360_000, 4800, 60)]
    even: list[Value] = ramp(0, 6000, 120)
    long: list[Value] = [*ramp(0, 30_000, 12), *ramp(360_000, 18_000, 300)]
    return (
        Case(
            alert=alert,
            name="half of the tokens for an hour",
            interval_s=60,
            series=merged(work.train(179, 1.0).series(), work.of_ranks("zerotrain_tokens_total", half)),
            fires=(Firing(labels=GPT, from_s=5040, until_s=7560),),
        ),
        Case(
            alert=alert,
            name="half of the tokens, beside a pod of somebody else that contradicts itself",
            interval_s=60,
            series=merged(work.series(), work.of_ranks("zerotrain_tokens_total", half), forged(count=180)),
            fires=(Firing(labels=GPT, from_s=5040, until_s=7560),),
        ),
        Case(
            alert=alert,
            name="a second scrape of the same pods that begins and ends is no change of pace",
            interval_s=60,
            series=merged(
                Training(interval_s=60).train(119, 1.0).series(),
                work.of_ranks("zerotrain_tokens_total", even),
                twice(work.of_ranks("zerotrain_tokens_total", [*even[:60], *flat(None, 60)])),
            ),
            quiet_at_s=(4500, 5400, 6300, 7080),
        ),
        Case(
            alert=alert,
            name="a fifth less",
            interval_s=60,
            series=merged(
                Training(interval_s=60).train(119, 1.0).series(),
                work.of_ranks("zerotrain_tokens_total", little),
            ),
            quiet_at_s=(4500, 5400, 7080),
        ),
        Case(
            alert=alert,
            name="a day later the slow pace is the pace",
            interval_s=300,
            series=merged(
                Training(interval_s=300).train(311, 1.0).series(),
                work.of_ranks("zerotrain_tokens_total", long),
            ),
            fires=(Firing(labels=GPT, from_s=5100, until_s=90000),),
        ),
        Case(
            alert=alert,
            name="half as many ranks make half as many tokens",
            interval_s=60,
            series=merged(
                Training(ranks=2, interval_s=60).train(60, 1.0).series(),
                Training(ranks=2).of_ranks("zerotrain_tokens_total", ramp(0, 6000, 61)),
                Training(ranks=1, attempt=2, begin=61, interval_s=60).train(60, 1.0).series(),
                Training(ranks=1, attempt=2, begin=61).of_ranks("zerotrain_tokens_total", ramp(0, 6000, 61)),
            ),
            quiet_at_s=(4500, 5400, 7080),
        ),
    )


def goodput() -> tuple[Case, ...]:
    alert = "ZeroTrainGoodputBudgetBurn"
    rank = Training(ranks=1)

    def work(*stretches: tuple[int, float]) -> list[Value]:
        values: list[Value] = [0.0]
        for intervals, share in stretches:
            for _ in range(intervals):
                values.append((values[-1] or 0.0) + 60 * share)
        return values

    def story(name: str, values: list[Value], *fires: Firing, quiet_at_s: tuple[int, ...] = ()) -> Case:
        return Case(
            alert=alert,
            name=name,
            interval_s=60,
            series=rank.of_rank(0, "zerotrain_productive_seconds_total", values),
            fires=fires,
            quiet_at_s=quiet_at_s,
        )

    down = tuple(
        Case(
            alert=alert,
            name=f"{phase} without any worker is lost time, suspended is not",
            interval_s=60,
            series=merged(
                job("zerotrain_job_phase", [*flat(0, 200), *flat(1, 60)], phase=phase),
                job("zerotrain_job_phase", [*flat(1, 200), *flat(0, 60)], phase="Suspended"),
            ),
            fires=(Firing(labels=GPT, severity="critical", from_s=13800),),
        )
        for phase in ("Starting", "Restarting", "Yielding")
    )
    lost = rank.of_rank(0, "zerotrain_productive_seconds_total", work((60, 1.0), (150, 0.4), (60, 1.0)))
    return (
        Case(
            alert=alert,
            name="60 % lost, scraped twice",
            interval_s=60,
            series=merged(lost, twice(lost)),
            fires=(
                Firing(labels=GPT, severity="critical", from_s=6720, until_s=12780),
                Firing(labels=GPT, severity="warning", from_s=11100, until_s=13920),
            ),
        ),
        story(
            "60 % lost from the second hour on, then nothing",
            work((60, 1.0), (150, 0.4), (60, 1.0)),
            Firing(labels=GPT, severity="critical", from_s=6720, until_s=12780),
            Firing(labels=GPT, severity="warning", from_s=11100, until_s=13920),
        ),
        story(
            "30 % lost all day",
            work((400, 0.7)),
            Firing(labels=GPT, severity="warning", from_s=14400),
        ),
        story(
            "two thirds lost, then less than half: no page for what gets better",
            work((60, 1.0), (60, 0.3), (60, 0.53)),
            Firing(labels=GPT, severity="critical", from_s=6300, until_s=7620),
        ),
        story("15 % lost all day", work((420, 0.85)), quiet_at_s=(3600, 7200, 21600, 25000)),
        story(
            "a quarter of an hour of starting",
            work((15, 0.0), (300, 0.97)),
            quiet_at_s=(600, 900, 1800, 3600, 7200),
        ),
        *down,
        *(
            Case(
                alert=alert,
                name=f"a running job {which} is unknown, not lost",
                interval_s=60,
                series=merged(job("zerotrain_job_phase", flat(1, 420), phase="Running"), known),
                quiet_at_s=(1800, 3600, 7200, 21600, 25000),
            )
            for which, known in (
                ("that nobody scrapes", {}),
                ("whose program reports nothing", rank.of_rank(0, "zerotrain_rank_up", flat(1, 420))),
            )
        ),
    )


def straggler() -> tuple[Case, ...]:
    alert = "ZeroTrainStraggler"

    def ranks(own: list[list[Value]]) -> dict[str, list[Value]]:
        team = Training(ranks=4).train(len(own[0]) - 1, 1.0)
        parts = [team.of_rank(rank, "zerotrain_step_own_seconds_total", own[rank]) for rank in range(4)]
        return merged(team.series(), *parts)  # type: ignore[return-value]

    even: list[Value] = ramp(0, 15, 121)
    late: list[Value] = [*ramp(0, 15, 40), *ramp(600, 27, 40), *ramp(1680, 15, 41)]
    somewhat: list[Value] = [*ramp(0, 15, 40), *ramp(600, 21, 81)]
    idle: list[Value] = ramp(0, 1, 121)
    idle_some: list[Value] = ramp(0, 3, 121)
    idle_late: list[Value] = ramp(0, 3, 121)
    return (
        Case(
            alert=alert,
            name="one rank works longer for twenty minutes",
            series=ranks([even, even, late, even]),
            fires=(Firing(labels={**GPT, "rank": "2"}, from_s=2160, until_s=2640),),
        ),
        Case(
            alert=alert,
            name="40 % more",
            series=ranks([even, even, somewhat, even]),
            quiet_at_s=(1800, 2700, 3570),
        ),
        Case(
            alert=alert,
            name="the middle of uneven ranks: 1.43 times as long",
            series=ranks([ramp(0, own, 121) for own in (9.0, 10.0, 20.0, 21.5)]),
            quiet_at_s=(1800, 2700, 3570),
        ),
        Case(
            alert=alert,
            name="the middle of uneven ranks: 1.57 times as long",
            series=ranks([ramp(0, own, 121) for own in (9.0, 10.0, 20.0, 23.5)]),
            fires=(Firing(labels={**GPT, "rank": "3"}, from_s=630),),
        ),
        Case(
            alert=alert,
            name="twice as long, and 9.4 % of the step",
            series=ranks([idle_some, idle_some, ramp(0, 5.82, 121), idle_some]),
            quiet_at_s=(1800, 2700, 3570),
        ),
        Case(
            alert=alert,
            name="twice as long, and 10.6 % of the step",
            series=ranks([idle_some, idle_some, ramp(0, 6.18, 121), idle_some]),
            fires=(Firing(labels={**GPT, "rank": "2"}, from_s=630),),
        ),
        Case(
            alert=alert,
            name="three times of what is nothing to the step",
            series=ranks([idle, idle, idle_late, idle]),
            quiet_at_s=(1800, 2700, 3570),
        ),
        Case(
            alert=alert,
            name="the operator found it",
            series=job("zerotrain_job_straggler_ratio", [*flat(None, 10), *flat(1.6, 40)], rank="1"),
            fires=(Firing(labels={**GPT, "rank": "1"}, from_s=900),),
        ),
    )


def collectives() -> tuple[Case, ...]:
    found: list[Case] = []
    team = Training(ranks=2)
    for alert, op, other in (
        ("ZeroTrainAllGatherP99", "all_gather", "reduce_scatter"),
        ("ZeroTrainReduceScatterP99", "reduce_scatter", "all_gather"),
    ):

        def buckets(slow: float, op: str = op) -> dict[str, list[Value]]:
            """Return histogram buckets of 100 operations per interval on each rank; for 20 minutes `slow` of
            them take 2 s.
            """
            count = 120

            def total(fast: bool) -> list[Value]:
                values: list[Value] = [0.0]
                for index in range(1, count):
                    missing = slow if fast and 40 <= index < 80 else 0.0
                    values.append((values[-1] or 0.0) + 100 - missing)
                return values

            name = "zerotrain_collective_duration_seconds_bucket"
            return merged(  # type: ignore[return-value]
                team.of_ranks(name, total(True), op=op, le="0.5"),
                team.of_ranks(name, total(True), op=op, le="1.0"),
                team.of_ranks(name, total(False), op=op, le="5.0"),
                team.of_ranks(name, total(False), op=op, le="+Inf"),
            )

        found += (
            Case(
                alert=alert,
                name=f"2 % of {op} take two seconds, on all ranks: one alert",
                series=buckets(2.0),
                fires=(Firing(labels=GPT, from_s=1920, until_s=2520),),
            ),
            Case(
                alert=alert,
                name="half a percent may",
                series=buckets(0.5),
                quiet_at_s=(1500, 1800, 2100, 2400),
            ),
            Case(
                alert=alert,
                name=f"slow {other} is another alert",
                series=buckets(2.0, other),
                quiet_at_s=(1500, 1800, 2100, 2400),
            ),
        )
    return tuple(found)


def shares() -> tuple[Case, ...]:
    def per_step(metric: str, share: float, *, of_all: bool) -> dict[str, list[Value]]:
        team = Training(ranks=2).train(160, 1.0)
        values: list[Value] = [0.0]
        for index in range(160):
            values.append((values[-1] or 0.0) + 30 * (share if 40 <= index < 110 else 0.05))
        calm: list[Value] = ramp(0, 1.5, 161)
        return merged(  # type: ignore[return-value]
            team.series(),
            team.of_rank(0, metric, values),
            team.of_rank(1, metric, values if of_all else calm),
        )

    optimizer, data = "zerotrain_optimizer_exposed_seconds_total", "zerotrain_data_wait_seconds_total"
    still = Training(ranks=1).hang(120)
    return (
        Case(
            alert="ZeroTrainOptimizerShareHigh",
            name="70 % of the step for half an hour",
            series=per_step(optimizer, 0.7, of_all=True),
            fires=(Firing(labels=GPT, from_s=2730, until_s=3570),),
        ),
        Case(
            alert="ZeroTrainOptimizerShareHigh",
            name="45 %",
            series=per_step(optimizer, 0.45, of_all=True),
            quiet_at_s=(2100, 2700, 3300),
        ),
        Case(
            alert="ZeroTrainDataStarved",
            name="one rank waits for 30 % of its steps, and all others for it",
            series=per_step(data, 0.3, of_all=False),
            fires=(Firing(labels=GPT, from_s=2160, until_s=3540),),
        ),
        Case(
            alert="ZeroTrainDataStarved",
            name="18 %",
            series=per_step(data, 0.18, of_all=True),
            quiet_at_s=(2100, 2700, 3300),
        ),
        *(
            Case(
                alert=alert,
                name="no steps, no share",
                series=merged(still.series(), still.of_rank(0, metric, ramp(0, 1, 121))),
                quiet_at_s=(1800, 2700, 3600),
            )
            for alert, metric in (("ZeroTrainOptimizerShareHigh", optimizer), ("ZeroTrainDataStarved", data))
        ),
    )


CASES = (*throughput(), *goodput(), *straggler(), *collectives(), *shares())
