"""What a run does: the plan, the presets, and the command line that repeats it. Nothing here has a side effect."""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

ACTIONS = {
    "kill": ("kill-producer", "kill-consumer"),
    "stop": ("stop-producer", "stop-consumer"),
    "restart": ("restart-producer", "restart-consumer"),
    "full": ("full-shm",),
    "slow": ("slow-consumer",),
    "hold": ("hold-views",),
    "fork": ("fork-producer", "fork-consumer"),
}
"""The kinds of chaos, and the actions of each."""

FAULTS = {
    "flip": "content",
    "drop": "lost",
    "double": "twice",
    "swap": "order",
    "reuse": "views",
    "free": "views",
    "withhold": "lost",
    "segment": "segments",
    "file": "files",
    "descriptor": "descriptors",
    "memory": "memory",
}
"""Each fault, and the check that has to find it."""

TOPIC_FAULTS = ("withhold",)
"""Faults that only the publisher of a topic can commit."""

TRANSFERS = ("copy", "loan", "mixed")
POLICIES = ("block", "skip", "drop")
SIZES_HELP = "4KiB | 1KiB-1MiB (uniform) | log:1KiB-16MiB (log-uniform) | vision"
MAX_WORKERS = 64
_UNITS = {"": 1, "b": 1, "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB}
_LARGEST = 4 * GIB


class PlanError(ValueError):
    """An option has a value that can't be meant. The message is one line, and says what can."""


def parse_bytes(text: str) -> int:
    """``"64KiB"``, ``"1.5 MiB"``, ``"4096"``: a number of bytes. Raises PlanError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise PlanError(f"{text!r} is no number of bytes; write it as 4096, 64KiB, 1.5MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def exact_bytes(nbytes: int) -> str:
    """A number of bytes so that ``parse_bytes`` makes the same number of it."""
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)


def bytes_text(nbytes: float) -> str:
    """A number of bytes as people read it, to four digits."""
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g}{name}"
    return f"{nbytes:.0f}"


class Sizes(msgspec.Struct, frozen=True):
    """How large payloads are: ``kind`` is fixed, uniform, log or vision; ``low`` and ``high`` in bytes."""

    kind: str
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """Read what ``--sizes`` takes. Raises PlanError."""
        if text == "vision":
            return cls("vision", 2 * KIB, 300 * MIB)
        kind, colon, rest = text.rpartition(":")
        low, dash, high = rest.partition("-")
        if kind not in ("", "log") or (colon and not dash):
            raise PlanError(f"--sizes takes {SIZES_HELP}; this one is {text!r}")
        first = parse_bytes(low)
        last = parse_bytes(high) if dash else first
        if not 1 <= first <= last <= _LARGEST:
            raise PlanError(
                f"--sizes goes from 1 byte to {bytes_text(_LARGEST)}, the smaller first; this one is {text!r}"
            )
        return cls(kind or ("uniform" if dash else "fixed"), first, last)

    def __str__(self) -> str:
        if self.kind == "vision":
            return "vision"
        span = exact_bytes(self.low) if self.kind == "fixed" else f"{exact_bytes(self.low)}-{exact_bytes(self.high)}"
        return f"log:{span}" if self.kind == "log" else span

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        """``count`` sizes, spread as the distribution says without the luck of the draw, in random order."""
        levels = (np.arange(count) + 0.5) / count
        sizes = self._vision(levels) if self.kind == "vision" else self._between(levels, self.low, self.high)
        generator.shuffle(sizes)
        return sizes

    def _between(self, levels: NDArray[np.float64], low: float, high: float) -> NDArray[np.int64]:
        if self.kind == "uniform":
            return np.rint(low + levels * (high - low)).astype(np.int64)
        return np.rint(low * (high / low) ** levels).astype(np.int64)

    def _vision(self, levels: NDArray[np.float64]) -> NDArray[np.int64]:
        """Of 1,000 requests: 620 text alone, 320 with a picture or a few, 55 with many or a clip, 5 with a video."""
        sizes = np.empty(len(levels), np.int64)
        start = 0.0
        for share, low, high in (
            (0.62, 2 * KIB, 16 * KIB),
            (0.32, 256 * KIB, 12 * MIB),
            (0.055, 12 * MIB, 96 * MIB),
            (0.005, 96 * MIB, 300 * MIB),
        ):
            part = (levels >= start) & (levels < start + share)
            sizes[part] = self._between((levels[part] - start) / share, low, high)
            start += share
        return sizes


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in seconds, sizes in bytes; ``duration`` and ``messages`` (of all producers) None: no end.

    ``hold`` is the shortest and the longest time that a message is held; ``held`` how many at once. ``chaos`` holds
    actions (see ``ACTIONS``), ``chaos_interval`` is the mean time between two, and ``kills`` ends the run after so
    many kills. ``fault`` makes the harness itself do wrong, to prove that it notices.

    With ``readers`` it is a run of a topic (see ``of_topic``): one publisher, in the place of the producer, and so many
    readers, in that of the consumers; ``policy`` is the publisher's.
    """

    preset: str = "standard"
    seed: int = 0
    duration: float | None = 60.0
    messages: int | None = None
    producers: int = 2
    consumers: int = 1
    readers: int = 0
    policy: str = "block"
    sizes: Sizes = Sizes("log", KIB, 16 * MIB)
    rate: float | None = None
    ring_size: int = 64 * MIB
    transfer: str = "mixed"
    asyncio: bool = False
    hold: tuple[float, float] = (0.0, 0.005)
    held: int = 32
    ttl: float | None = None
    max_deliveries: int | None = None
    checksums: bool = True
    chaos: tuple[str, ...] = ()
    chaos_interval: float = 0.5
    kills: int | None = None
    patience: float = 60.0
    fault: str | None = None

    def __post_init__(self) -> None:
        _positive("--duration", self.duration, "seconds")
        _positive("--messages", self.messages, "messages")
        _positive("--rate", self.rate, "messages a second")
        _positive("--ttl", self.ttl, "seconds")
        _positive("--chaos-interval", self.chaos_interval, "seconds")
        _positive("--kills", self.kills, "kills")
        _positive("--patience", self.patience, "seconds")
        _positive("--max-deliveries", self.max_deliveries, "deliveries")
        _positive("--held", self.held, "messages")
        if not 1 <= self.producers <= MAX_WORKERS:
            raise PlanError(f"--producers goes from 1 to {MAX_WORKERS}; this one is {self.producers}")
        if not 1 <= self.consumers <= self.producers:
            raise PlanError(
                f"--consumers goes from 1 to the number of producers, {self.producers}, for each consumer has a queue "
                f"of its own; this one is {self.consumers}"
            )
        self._check_topic()
        if not 64 * KIB <= self.ring_size <= 64 * GIB:
            raise PlanError(f"--ring goes from 64KiB to 64GiB; this one is {bytes_text(self.ring_size)}")
        if self.transfer not in TRANSFERS:
            raise PlanError(f"--transfer takes one of {', '.join(TRANSFERS)}; this one is {self.transfer!r}")
        if not 0 <= self.hold[0] <= self.hold[1] < math.inf:
            raise PlanError(
                f"--hold takes seconds, or the shortest and the longest as 0-0.005; this one is {self.hold}"
            )
        if self.kills is not None and not set(self.chaos) & set(ACTIONS["kill"]):
            raise PlanError("--kills counts kills, and there are none without --chaos kill")
        if self.fault is not None and self.fault not in FAULTS:
            raise PlanError(f"--fault takes one of {', '.join(FAULTS)}; this one is {self.fault!r}")
        if self.seed < 0:
            raise PlanError(f"--seed is a number from 0 on; this one is {self.seed}")

    def _check_topic(self) -> None:
        if not 0 <= self.readers <= MAX_WORKERS:
            raise PlanError(f"--readers goes from 1 to {MAX_WORKERS}; this one is {self.readers}")
        if self.policy not in POLICIES:
            raise PlanError(f"--policy takes one of {', '.join(POLICIES)}; this one is {self.policy!r}")
        if not self.readers:
            if self.policy != "block":
                raise PlanError("--policy is what a topic does about slow readers; say how many with --readers")
            if self.fault in TOPIC_FAULTS:
                raise PlanError(f"--fault {self.fault} is for a topic; give it --readers")
            return
        if (self.producers, self.consumers) != (1, 1):
            raise PlanError(
                "--readers makes it a topic, which has one publisher; leave --producers and --consumers away"
            )
        if self.max_deliveries is not None:
            raise PlanError("--max-deliveries is for queues: in a topic nothing is delivered again")
        if self.ttl is not None and self.policy != "block":
            raise PlanError(
                f"--ttl goes with --policy block alone: what expired can't be told from what {self.policy} took back"
            )

    def of_topic(self, readers: int) -> Plan:
        """The same for a topic with so many readers. Raises PlanError."""
        if readers < 1:
            raise PlanError(f"--readers goes from 1 to {MAX_WORKERS}; this one is {readers}")
        return msgspec.structs.replace(self, readers=readers, producers=1, consumers=1)

    @property
    def takers(self) -> int:
        """How many processes take messages: readers or consumers."""
        return self.readers or self.consumers

    def words(self, text: str) -> str:
        """A text about producers and consumers, in the words of a topic if it is one."""
        if not self.readers:
            return text
        return text.replace("producer", "publisher").replace("consumer", "reader")

    def command(self) -> str:
        """The command line that repeats this run."""
        words = ["shmq", "stress", self.preset, "--seed", str(self.seed)]
        usual = PRESETS[self.preset]
        if self.readers:
            words += ["--readers", str(self.readers)]
            usual = usual.of_topic(self.readers)
        if self.messages is not None or self.kills is not None:
            # As the command line has it: these are an end of their own.
            usual = msgspec.structs.replace(usual, duration=None)
        for name, option in _OPTIONS.items():
            value = getattr(self, name)
            if value != getattr(usual, name):
                words += [option, exact_bytes(value) if name == "ring_size" else _option_text(value)]
        if self.asyncio != usual.asyncio:
            words.append("--asyncio" if self.asyncio else "--blocking")
        if self.checksums != usual.checksums:
            words.append("--checksums" if self.checksums else "--no-checksums")
        if self.chaos != usual.chaos:
            words += ["--chaos", self.words(",".join(self.chaos)) or "none"]
        return shlex.join(words)


def parse_chaos(text: str) -> tuple[str, ...]:
    """``"kill,stop-consumer"``, ``"all"`` or ``"none"``: the actions named. Raises PlanError."""
    every = tuple(action for actions in ACTIONS.values() for action in actions)
    if text in ("all", "none"):
        return every if text == "all" else ()
    chosen: list[str] = []
    for name in text.split(","):
        # In a topic the publisher is the producer, and readers are the consumers.
        name = name.replace("publisher", "producer").replace("reader", "consumer")
        if name not in ACTIONS and name not in every:
            raise PlanError(f"--chaos takes all, none, or any of {', '.join(ACTIONS)}; it does not know {name!r}")
        chosen += ACTIONS.get(name, (name,))
    return tuple(dict.fromkeys(chosen))


def parse_hold(text: str) -> tuple[float, float]:
    """``"0.01"`` or ``"0-0.01"``: the shortest and the longest time to hold a message. Raises PlanError."""
    low, dash, high = text.partition("-")
    try:
        return float(low), float(high if dash else low)
    except ValueError:
        raise PlanError(f"--hold takes seconds, or a range as 0-0.005; this one is {text!r}") from None


def _positive(option: str, value: float | None, unit: str) -> None:
    if value is not None and not 0 < value < math.inf:
        raise PlanError(f"{option} is a number of {unit} above 0; this one is {value}")


def _option_text(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_option_text, value))
    return "none" if value is None else repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


_OPTIONS = {
    "duration": "--duration",
    "messages": "--messages",
    "producers": "--producers",
    "consumers": "--consumers",
    "policy": "--policy",
    "sizes": "--sizes",
    "rate": "--rate",
    "ring_size": "--ring",
    "transfer": "--transfer",
    "hold": "--hold",
    "held": "--held",
    "ttl": "--ttl",
    "max_deliveries": "--max-deliveries",
    "chaos_interval": "--chaos-interval",
    "kills": "--kills",
    "patience": "--patience",
    "fault": "--fault",
}

PRESETS = {
    "quick": Plan(preset="quick", duration=10.0, sizes=Sizes("log", KIB, 4 * MIB), ring_size=16 * MIB),
    "standard": Plan(),
    "soak": Plan(preset="soak", duration=None, sizes=Sizes("log", 256, 256 * KIB), hold=(0.0, 0.001)),
    "chaos": Plan(
        preset="chaos", sizes=Sizes("log", 256, 12 * MIB), ring_size=16 * MIB, chaos=parse_chaos("all"), held=64
    ),
}
