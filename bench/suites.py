"""The figures: what is compared, and what the goal is. What exactly is timed, ``bench.measure`` says.

throughput
    Arrays of 1 to 64 MiB in a dict, streamed from one process to another. *fmq*: ``put`` copies in, the receiver looks
    at one byte of each page of the view. *limit*: one numpy copy of the same source into a shared mapping of the same
    size that was touched before, in one process, with no reader. *marching limit*: the same through 256 MiB. *bare
    handover*: one copy, a reader on another core, both spinning on a counter: what a reader costs, without a queue.
    *segments*: a new segment for each message, its name over ZeroMQ, copied out to bytes and unlinked.
loans
    Ping-pong: the seconds from before the ``put`` of an array from ``empty`` until the receiver has the view. The
    answer comes through a second queue, when the view was given back; it is not timed. Of the payload only the first
    and the last eight bytes are written.
small
    1 KiB of bytes through fmq and through PUSH/PULL of pyzmq; a request dict of 1 KiB through fmq, awaiting and
    blocking, and pickled through PUSH/PULL of zmq.asyncio. The request is nearly all text, or it has 120 tokens.
metrics
    1 KiB of bytes, and the request of text, with ``metrics=QueueMetrics()`` on both sides and without: streamed from
    one process to another, and both sides in one thread, which tells most with the least noise.
idle
    The CPU time of a consumer that waits in ``get`` and of a connected producer that does nothing, as a share of one
    core. Both processes, all threads.
topics
    Arrays of 64 MiB in a dict, from one process to 1, 2, 4 and 8, each of which looks at one byte of each page.
    *topic*: one record for all. *a queue each*: a copy for each reader. *zmq + pickle*: pickled once, pushed to each
    over ipc.
remote
    Arrays of 1 to 16 MiB in a dict, streamed over tcp on the loopback, without a copy in Python on either side. *fmq*:
    ``RemoteProducer.put``, acknowledged. *zmq*: the arrays alone through PUSH/PULL of pyzmq. 64 MiB under way, of both.
http
    Clients in a closed loop against the HTTP server with one worker and one engine, whose handler looks at one byte of
    each page: 1 KiB of JSON over 16 connections, 14.5 MB of pixels over 4. *fmq*: as it is. *pickle*: the same server,
    with each request pickled through PUSH/PULL over ipc in place of this transport. Three busy processes.
memory
    The resident memory of both sides after each hundredth of the messages. The growth counts from 20 % of them on;
    before, the ring's pages are touched for the first time, which counts as resident memory, too.
deaths
    Two producers and a consumer under load, killed at random and replaced; what the journals of ``bench.deaths`` say
    was lost, doubled, out of order, damaged or left over. And the time from before the start of a new process, which
    has everything to import, until it has been handed the message that a killed consumer held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from bench.deaths import first_redelivery_ms, storm
from bench.harness import stress_rate
from bench.http import KINDS, LINKS, free_port, lap, p99_ms, servers
from bench.loads import Arrays, ArraySet, Blobs, MakeLoad, Requests
from bench.measure import Course, Lap, Place, Side, Spread, Team, new_place, quiet, ratios, take_turns
from bench.ours import (
    AsyncFmqReceiver,
    AsyncFmqSender,
    AsyncIdleReceiver,
    EachReceiver,
    EachSender,
    FmqLoop,
    FmqReceiver,
    FmqSender,
    IdleReceiver,
    IdleSender,
    LoanReceiver,
    LoanSender,
    RemoteReceiver,
    RemoteSender,
    TopicReceiver,
    TopicSender,
)
from bench.peers import (
    AsyncPickleReceiver,
    AsyncPickleSender,
    BareReceiver,
    BareSender,
    Copier,
    FanReceiver,
    FanSender,
    SegmentReceiver,
    SegmentSender,
    TcpReceiver,
    TcpSender,
    ZmqReceiver,
    ZmqSender,
)

KIB = 1024
MIB = 1024 * KIB
GB = 1e9

LARGE_RING = 256 * MIB
SMALL_RING = 64 * MIB
REMOTE_WINDOW = 64 * MIB
MEMORY_RING = 4 * MIB
RESTARTS = 20
READERS = (1, 2, 4, 8)
SLICES = 100
SETTLED = 20
"""Slices after which memory has to be flat."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. Sizes in bytes, times in seconds; ``deadline`` bounds each lap.

    ``patience``: how many times longer a contest may take until the machine was quiet for long enough.
    """

    rounds: int = 9
    seconds: float = 0.5
    sizes: tuple[int, ...] = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    loan: int = 64 * MIB
    idle_seconds: float = 5.0
    messages: int = 10_000_000
    kills: int = 1000
    deadline: float = 60.0
    patience: float = 2.5

    @classmethod
    def quick(cls) -> Plan:
        """A look in a minute; wide spreads."""
        return cls(rounds=3, seconds=0.2, messages=300_000, kills=100, patience=1.0)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure, and its goal: ``at_least`` or ``at_most`` so much, or neither if it only informs."""

    name: str
    value: Spread
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the median reaches the goal; None if there is none."""
        if self.at_least is not None:
            return self.value.median >= self.at_least
        return None if self.at_most is None else self.value.median <= self.at_most


@dataclass(slots=True)
class Result:
    """What a suite found: the figures, everything that they were formed from, and how far to trust them.

    ``turns`` count; ``disturbed`` are left out; in ``noisy`` of those that count others used the machine, too.
    """

    figures: list[Figure] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    disturbed: int = 0
    noisy: int = 0
    seconds: float = 0.0

    def add_laps(self, courses: dict[str, Course], key: str | None = None) -> None:
        """Keep the laps of a contest. CPU time is that of the receiver and the sender, or of the only child."""
        turns = [list(turn) for turn in zip(*(course.laps for course in courses.values()), strict=True)]
        self.turns += len(turns)
        self.noisy += len(turns) - len(quiet(turns))
        self.disturbed += len(next(iter(courses.values())).disturbed)
        laps = {name: _laps(course) for name, course in courses.items()}
        self.data.update({key: laps} if key else laps)


# -- contestants ------------------------------------------------------------------------------------------------------

Sides = Callable[[Place], Sequence[Callable[[], Side]]]


def _fmq(load: MakeLoad, ring_size: int, metrics: bool = False) -> Sides:
    return lambda place: [
        partial(FmqReceiver, place, load, metrics),
        partial(FmqSender, place, load, ring_size, metrics),
    ]


def _fmq_loop(load: MakeLoad, ring_size: int, metrics: bool) -> Sides:
    return lambda place: [partial(FmqLoop, place, load, ring_size, metrics)]


def _fmq_async(load: MakeLoad, ring_size: int) -> Sides:
    return lambda place: [partial(AsyncFmqReceiver, place, load), partial(AsyncFmqSender, place, load, ring_size)]


def _zmq(load: MakeLoad) -> Sides:
    return lambda place: [partial(ZmqReceiver, place, load), partial(ZmqSender, place, load)]


def _zmq_pickle(load: MakeLoad) -> Sides:
    return lambda place: [partial(AsyncPickleReceiver, place, load), partial(AsyncPickleSender, place, load)]


def _remote(load: MakeLoad, port: int, ahead: int) -> Sides:
    return lambda place: [partial(RemoteReceiver, load, port), partial(RemoteSender, load, port, ahead)]


def _tcp(load: MakeLoad, port: int, ahead: int) -> Sides:
    return lambda place: [partial(TcpReceiver, load, port, ahead), partial(TcpSender, load, port, ahead)]


def _segments(load: MakeLoad) -> Sides:
    return lambda place: [partial(SegmentReceiver, place, load), partial(SegmentSender, place, load)]


def _limit(load: MakeLoad, room: int) -> Sides:
    return lambda place: [partial(Copier, load, room)]


def _bare(load: MakeLoad, nbytes: int) -> Sides:
    return lambda place: [partial(BareReceiver, place, load, nbytes), partial(BareSender, place, load)]


def _loans(nbytes: int) -> Sides:
    return lambda place: [partial(LoanReceiver, place), partial(LoanSender, place, nbytes, LARGE_RING)]


def _topic(load: MakeLoad, readers: int) -> Sides:
    return lambda place: [
        *[partial(TopicReceiver, place, load)] * readers,
        partial(TopicSender, place, load, LARGE_RING, readers),
    ]


def _each(load: MakeLoad, readers: int) -> Sides:
    return lambda place: [
        *[partial(EachReceiver, place, load, number) for number in range(readers)],
        partial(EachSender, place, load, LARGE_RING, readers),
    ]


def _fan(load: MakeLoad, readers: int) -> Sides:
    return lambda place: [
        *[partial(FanReceiver, place, load, number) for number in range(readers)],
        partial(FanSender, place, load, readers),
    ]


def _contest(plan: Plan, contestants: dict[str, Sides], warmup: int) -> dict[str, Course]:
    with ExitStack() as stack:
        teams = []
        for name, sides in contestants.items():
            place = stack.enter_context(new_place())
            teams.append(stack.enter_context(Team(name, sides(place), deadline=plan.deadline)))
        courses = take_turns(teams, rounds=plan.rounds, seconds=plan.seconds, warmup=warmup, patience=plan.patience)
    return {course.team.name: course for course in courses}


def _laps(course: Course) -> dict[str, Any]:
    def rows(laps: list[Lap]) -> list[dict[str, Any]]:
        return [
            {
                "messages_a_second": lap.rate,
                "cpu_us_a_message": [cpu / lap.count * 1e6 for cpu in lap.cpu],
                "cores_busy_with_others": lap.others,
            }
            for lap in laps
        ]

    return {"messages_a_lap": course.count, "laps": rows(course.laps), "disturbed_laps": rows(course.disturbed)}


# -- the suites -------------------------------------------------------------------------------------------------------


def throughput(plan: Plan) -> Result:
    """Large arrays, against the limit of one copy and against one segment a message."""
    result = Result()
    for nbytes in plan.sizes:
        load = partial(Arrays, nbytes)
        contestants = {
            "fmq": _fmq(load, LARGE_RING),
            "limit": _limit(load, nbytes),
            "marching limit": _limit(load, LARGE_RING),
            "bare handover": _bare(load, nbytes),
            "segments": _segments(load),
        }
        size = f"{nbytes / MIB:g} MiB"
        courses = _contest(plan, contestants, warmup=max(4, 32 * MIB // nbytes))
        for name, course in courses.items():
            speed = Spread.of([rate * nbytes / GB for rate in course.rates])
            result.figures.append(Figure(f"{size}, {name}", speed, "GB/s"))
        rates = {name: course.rates for name, course in courses.items()}
        result.figures += [
            Figure(f"{size}, fmq / limit", ratios(rates["fmq"], rates["limit"]), "x", at_least=0.9),
            Figure(f"{size}, fmq / marching limit", ratios(rates["fmq"], rates["marching limit"]), "x"),
            Figure(f"{size}, fmq / segments", ratios(rates["fmq"], rates["segments"]), "x", at_least=8.0),
            Figure(f"{size}, limit / segments", ratios(rates["limit"], rates["segments"]), "x"),
        ]
        result.add_laps(courses, size)
    return result


def loans(plan: Plan) -> Result:
    """The time from put to view, of a large loan and of a small one."""
    large, small = f"{plan.loan / MIB:g} MiB", "1 KiB"
    courses = _contest(plan, {large: _loans(plan.loan), small: _loans(KIB)}, warmup=100)
    times = {name: [Spread.of(lap.samples).median * 1e6 for lap in course.laps] for name, course in courses.items()}
    result = Result()
    result.add_laps(courses)
    for name, values in times.items():
        result.data[name]["median_us_put_to_view"] = values
        result.figures.append(Figure(f"{name}, put to view", Spread.of(values), "us"))
    ratio = ratios(times[large], times[small])
    result.figures.append(Figure(f"{large} / {small}", ratio, "x", at_most=2.0))
    return result


def small(plan: Plan) -> Result:
    """Small messages against ZeroMQ alone."""
    result = Result()
    blobs = partial(Blobs, KIB, KIB)
    groups: dict[str, dict[str, Sides]] = {
        "1 KiB bytes": {"fmq": _fmq(blobs, SMALL_RING), "zmq": _zmq(blobs)},
    }
    for kind, load in {"text": partial(Requests, 0), "tokens": partial(Requests, 120)}.items():
        groups[f"1 KiB request ({kind})"] = {
            "fmq async": _fmq_async(load, SMALL_RING),
            "fmq": _fmq(load, SMALL_RING),
            "zmq.asyncio + pickle": _zmq_pickle(load),
        }
    for group, contestants in groups.items():
        courses = _contest(plan, contestants, warmup=2000)
        *ours, peer = courses
        for name, course in courses.items():
            result.figures.append(Figure(f"{group}, {name}", Spread.of(course.rates), "messages/s"))
        for name in ours:
            ratio = ratios(courses[name].rates, courses[peer].rates)
            goal = 1.0 if peer == "zmq" else 5.0
            result.figures.append(Figure(f"{group}, {name} / {peer}", ratio, "x", at_least=goal))
        result.add_laps(courses, group)
    return result


def metrics(plan: Plan) -> Result:
    """What counting for Prometheus costs, on both sides."""
    result = Result()
    loads: dict[str, MakeLoad] = {"1 KiB bytes": partial(Blobs, KIB, KIB), "1 KiB request": partial(Requests, 0)}
    for load_name, load in loads.items():
        for way, sides in {"streamed": _fmq, "one thread": _fmq_loop}.items():
            group = f"{load_name}, {way}"
            off, on = sides(load, SMALL_RING, False), sides(load, SMALL_RING, True)
            courses = _contest(plan, {"metrics off": off, "metrics on": on}, warmup=2000)
            for name, course in courses.items():
                result.figures.append(Figure(f"{group}, {name}", Spread.of(course.rates), "messages/s"))
            ratio = ratios(courses["metrics on"].rates, courses["metrics off"].rates)
            result.figures.append(Figure(f"{group}, on / off", ratio, "x", at_least=0.95))
            result.add_laps(courses, group)
    return result


def idle(plan: Plan) -> Result:
    """CPU time while nothing happens."""
    result = Result()
    load = partial(Blobs, KIB, KIB)
    receivers: dict[str, Callable[[Place, MakeLoad, float], Side]] = {
        "blocking": IdleReceiver,
        "awaiting": AsyncIdleReceiver,
    }
    for name, receiver in receivers.items():
        with new_place() as place:
            sides: list[Callable[[], Side]] = [
                partial(receiver, place, load, plan.idle_seconds),
                partial(IdleSender, place, load, SMALL_RING, plan.idle_seconds),
            ]
            with Team(f"idle, {name}", sides, deadline=plan.idle_seconds + plan.deadline) as team:
                team.run(1000)
                lap = team.run(1)
        share = 100 * sum(lap.cpu) / plan.idle_seconds
        result.figures.append(Figure(f"consumer ({name}) and producer", Spread.of([share]), "%", at_most=1.0))
        result.data[name] = {
            "others": lap.others,
            "seconds": plan.idle_seconds,
            "cpu_consumer": lap.cpu[0],
            "cpu_producer": lap.cpu[1],
        }
    return result


def topics(plan: Plan) -> Result:
    """One large message to several readers."""
    result = Result()
    load = partial(Arrays, plan.loan)
    for readers in READERS:
        contestants = {
            "topic": _topic(load, readers),
            "a queue each": _each(load, readers),
            "zmq + pickle": _fan(load, readers),
        }
        key = f"{readers} reader{'s' if readers > 1 else ''}"
        courses = _contest(plan, contestants, warmup=4)
        for name, course in courses.items():
            speed = Spread.of([rate * plan.loan * readers / GB for rate in course.rates])
            result.figures.append(Figure(f"{key}, {name}", speed, "GB/s seen"))
        for name in ("a queue each", "zmq + pickle"):
            ratio = ratios(courses["topic"].rates, courses[name].rates)
            result.figures.append(Figure(f"{key}, topic / {name}", ratio, "x"))
        result.add_laps(courses, key)
    return result


def remote(plan: Plan) -> Result:
    """Large arrays over tcp, against ZeroMQ alone."""
    result = Result()
    for nbytes in (nbytes for nbytes in plan.sizes if nbytes <= REMOTE_WINDOW // 4):
        ahead = REMOTE_WINDOW // nbytes
        # More than can be under way, for an array that is sent must not change.
        load = partial(ArraySet, nbytes, ahead + 4)
        contestants = {"fmq": _remote(load, free_port(), ahead), "zmq": _tcp(load, free_port(), ahead)}
        size = f"{nbytes / MIB:g} MiB"
        courses = _contest(plan, contestants, warmup=max(4, 32 * MIB // nbytes))
        for name, course in courses.items():
            speed = Spread.of([rate * nbytes / GB for rate in course.rates])
            result.figures.append(Figure(f"{size}, {name}", speed, "GB/s"))
        ratio = ratios(courses["fmq"].rates, courses["zmq"].rates)
        result.figures.append(Figure(f"{size}, fmq / zmq", ratio, "x"))
        result.add_laps(courses, size)
    return result


def http(plan: Plan) -> Result:
    """Requests through the HTTP server, over two links."""
    result = Result()
    with servers() as ports:
        for name, (kind, connections) in KINDS.items():
            rates: dict[str, list[float]] = {link: [] for link in LINKS}
            tails: dict[str, list[float]] = {link: [] for link in LINKS}
            for number in range(plan.rounds + 1):
                for link in LINKS:
                    rate, latencies = lap(ports[link], kind, connections, 4 * plan.seconds)
                    # The first round warms up.
                    if number:
                        rates[link].append(rate)
                        tails[link].append(p99_ms(latencies))
            for link in LINKS:
                result.figures.append(Figure(f"{name}, {link}", Spread.of(rates[link]), "requests/s"))
                result.figures.append(Figure(f"{name}, {link}, p99", Spread.of(tails[link]), "ms"))
            for what, values in (("requests/s", rates), ("p99", tails)):
                ratio = ratios(values["fmq"], values["pickle"])
                result.figures.append(Figure(f"{name}, {what}, fmq / pickle", ratio, "x"))
            result.data[name] = {"rates": rates, "p99_ms": tails}
    return result


def memory(plan: Plan) -> Result:
    """Resident memory over many messages of 64 bytes to 1 KiB."""
    load = partial(Blobs, 64, KIB)
    samples: list[list[dict[str, int]]] = []
    with new_place() as place:
        sides = _fmq(load, MEMORY_RING)(place)
        with Team("memory", sides, deadline=plan.deadline) as team:
            for _ in range(SLICES):
                team.run(max(1, plan.messages // SLICES))
                samples.append([_resident(pid) for pid in team.pids])
    result = Result(data={"messages": plan.messages, "kib_consumer_producer": samples})
    for index, side in enumerate(("consumer", "producer")):
        growth = float(samples[-1][index]["VmRSS"] - samples[SETTLED - 1][index]["VmRSS"])
        name = f"growth of the {side}, {plan.messages:,} messages"
        result.figures.append(Figure(name, Spread.of([growth]), "KiB", at_most=1024.0))
    return result


def deaths(plan: Plan) -> Result:
    """What is lost when processes are killed, and how soon it goes on."""
    with new_place() as place:
        books, killed = storm(place, plan.kills)
    with new_place() as place:
        restarts = first_redelivery_ms(place, RESTARTS)
    result = Result(data={"books": asdict(books), "killed": dict(killed), "restarts_ms": restarts})
    counts = asdict(books)
    for name in ("put", "delivered", "redelivered"):
        result.figures.append(Figure(f"{name}, {plan.kills:,} kills", Spread.of([counts.pop(name)]), "messages"))
    for name, count in counts.items():
        result.figures.append(Figure(name.replace("_", " "), Spread.of([count]), at_most=0))
    result.figures.append(Figure("restart to first redelivered message", Spread.of(restarts), "ms", at_most=200))
    return result


def harness(plan: Plan) -> Result:
    """The stress test beside the queue alone."""
    result = Result()
    for nbytes in plan.sizes:
        load = _fmq(partial(Arrays, nbytes), LARGE_RING)
        rates: dict[str, list[float]] = {"queue alone": [], "checksums off": [], "checksums on": []}
        with new_place() as place, Team("queue", load(place), deadline=plan.deadline) as team:
            lap = team.run(max(4, 512 * MIB // nbytes))
            for _ in range(plan.rounds):
                lap = team.run(max(4, round(lap.rate * plan.seconds)))
                rates["queue alone"].append(lap.rate * nbytes)
                for name, checksums in (("checksums off", False), ("checksums on", True)):
                    rates[name].append(stress_rate(nbytes, LARGE_RING, 4 * plan.seconds, checksums=checksums))
        size = f"{nbytes / MIB:g} MiB"
        for name, values in rates.items():
            result.figures.append(Figure(f"{size}, {name}", Spread.of([value / GB for value in values]), "GB/s"))
        for name in ("checksums off", "checksums on"):
            ratio = ratios(rates[name], rates["queue alone"])
            result.figures.append(Figure(f"{size}, {name} / queue alone", ratio, "x", at_least=0.9))
        result.data[size] = rates
    return result


def _resident(pid: int) -> dict[str, int]:
    """Resident memory of a process in KiB: all of it, and its parts."""
    found = {}
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            key, _, value = line.partition(":")
            if key in {"VmRSS", "RssAnon", "RssFile", "RssShmem"}:
                found[key] = int(value.split()[0])
    return found


def measure(suite: str, plan: Plan) -> Result:
    """Run the suite of this name. Raises RunFailedError."""
    begun = time.monotonic()
    result = SUITES[suite](plan)
    result.seconds = time.monotonic() - begun
    return result


SUITES: dict[str, Callable[[Plan], Result]] = {
    "throughput": throughput,
    "loans": loans,
    "small": small,
    "topics": topics,
    "metrics": metrics,
    "remote": remote,
    "http": http,
    "idle": idle,
    "memory": memory,
    "deaths": deaths,
    "harness": harness,
}
