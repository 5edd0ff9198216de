"""Cases about steps that have become slower than they were."""

from __future__ import annotations

from tests.monitoring.rules.cases_pace import forged, twice
from tests.monitoring.rules.cases_progress import GPT
from tests.monitoring.rules.model import Case, Firing, Training, merged


def regression() -> tuple[Case, ...]:
    alert = "ZeroTrainStepTimeRegression"
    young = Training().train(40, 1.0).train(80, 1.5)
    fast = Training(interval_s=60).train(60, 1.0)
    slow = Training(attempt=2, begin=66, interval_s=60).train(120, 1.3)
    lasting = Training(interval_s=300).train(12, 1.0).train(300, 1.25)
    grown = Training(ranks=2, interval_s=60).train(60, 1.0)
    resized = Training(ranks=1, attempt=2, begin=66, interval_s=60).train(60, 2.0)
    return (
        Case(
            alert=alert,
            name="a job of twenty minutes, too young for a baseline of yesterday",
            series=young.series(),
            fires=(Firing(labels=GPT, from_s=2040),),
        ),
        Case(
            alert=alert,
            name="a pod of somebody else that contradicts itself stops no rule of this job",
            series=merged(young.series(), forged()),
            fires=(Firing(labels=GPT, from_s=2040),),
        ),
        Case(
            alert=alert,
            name="the same for steps of four minutes",
            interval_s=60,
            series=merged(
                Training(interval_s=60).train(120, 240.0).train(180, 360.0).series(), forged(count=301)
            ),
            fires=(Firing(labels=GPT, from_s=9780),),
        ),
        Case(
            alert=alert,
            name="pods that are scraped twice",
            series=merged(young.series(), twice(young.series())),
            fires=(Firing(labels=GPT, from_s=2040),),
        ),
        Case(
            alert=alert,
            name="a restart onto a slower node: the pods are new, the job is not",
            interval_s=60,
            series=merged(fast.series(), slow.series()),
            fires=(Firing(labels=GPT, from_s=4620),),
        ),
        Case(
            alert=alert,
            name="a lasting slowdown is one for the rest of the day",
            interval_s=300,
            series=lasting.series(),
            fires=(Firing(labels=GPT, from_s=4500, until_s=90300),),
        ),
        Case(
            alert=alert,
            name="eight percent is noise",
            series=Training().train(40, 1.0).train(80, 1.08).series(),
            quiet_at_s=(1800, 2700, 3600),
        ),
        Case(
            alert=alert,
            name="half as many ranks have another pace",
            interval_s=60,
            series=merged(grown.series(), resized.series()),
            quiet_at_s=(4800, 6000, 7200),
        ),
        Case(
            alert=alert,
            name="four lucky steps are no baseline",
            interval_s=60,
            series=merged(
                Training(interval_s=60).train(1, 15.0).hang(4).series(),
                Training(attempt=2, begin=20, interval_s=60).train(80, 30.0).series(),
            ),
            quiet_at_s=(1800, 2700, 3600, 4800),
        ),
        Case(
            alert=alert,
            name="steps of four minutes that take six, seen within the hour",
            interval_s=60,
            series=Training(interval_s=60).train(120, 240.0).train(180, 360.0).series(),
            fires=(Firing(labels=GPT, from_s=9780),),
        ),
        Case(
            alert=alert,
            name="steps of four minutes that take six are news for a day",
            interval_s=300,
            series=Training(interval_s=300).train(60, 240.0).train(330, 360.0).series(),
            fires=(Firing(labels=GPT, from_s=20700, until_s=109800),),
        ),
        Case(
            alert=alert,
            name="eight percent of four minutes is noise",
            interval_s=60,
            series=Training(interval_s=60).train(120, 240.0).train(180, 259.0).series(),
            quiet_at_s=(7200, 10800, 17000),
        ),
        Case(
            alert=alert,
            name="half as many ranks have another pace, of four minutes as well",
            interval_s=60,
            series=merged(
                Training(ranks=2, interval_s=60).train(120, 240.0).series(),
                Training(ranks=1, attempt=2, begin=126, interval_s=60).train(150, 480.0).series(),
            ),
            quiet_at_s=(9000, 12600, 16000),
        ),
        Case(
            alert=alert,
            name="steps of twenty-five minutes have no baseline: two hours hold too few",
            interval_s=60,
            series=Training(interval_s=60).train(240, 1500.0).train(240, 1750.0).series(),
            quiet_at_s=(14400, 21600, 28000),
        ),
        Case(
            alert=alert,
            name="steps of twenty minutes have one",
            interval_s=60,
            series=Training(interval_s=60).train(240, 1210.0).train(240, 1400.0).series(),
            fires=(Firing(labels=GPT, from_s=19800),),
        ),
        Case(
            alert=alert,
            name="twenty minutes that become thirty are told of as long as they are thirty",
            interval_s=60,
            series=Training(interval_s=60).train(240, 1200.0).train(480, 1800.0).series(),
            fires=(Firing(labels=GPT, from_s=16980),),
            quiet_at_s=(18000, 21600, 28800, 43200),
        ),
        Case(
            alert=alert,
            name="whole steps, of which two hours hold one at last, until they are short again",
            interval_s=60,
            series=Training(interval_s=60).steps(12, 1200.0).steps(5, 6000.0).steps(10, 1200.0).series(),
            fires=(Firing(labels=GPT, from_s=21000, until_s=51540),),
            quiet_at_s=(14400, 25200, 32400, 39600),
        ),
        Case(
            alert=alert,
            name="four slow steps after a restart are its start",
            interval_s=60,
            series=merged(
                Training(interval_s=60).train(120, 240.0).series(),
                Training(attempt=2, begin=126, interval_s=60).steps(4, 360.0).hang(60).series(),
            ),
            quiet_at_s=(9000, 9600, 10800, 12000),
        ),
        Case(
            alert=alert,
            name="five are its pace",
            interval_s=60,
            series=merged(
                Training(interval_s=60).train(120, 240.0).series(),
                Training(attempt=2, begin=126, interval_s=60).steps(5, 360.0).hang(60).series(),
            ),
            fires=(Firing(labels=GPT, from_s=9960),),
        ),
        Case(
            alert=alert,
            name="steps of two minutes have a baseline",
            interval_s=60,
            series=Training(interval_s=60).train(40, 120.0).train(60, 150.0).series(),
            fires=(Firing(labels=GPT, from_s=3420),),
        ),
    )


CASES = regression()
