"""What dead owners left in the shared-memory directory: find it, and remove what nobody needs any more."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from shmq.errors import (
    ForeignSegmentError,
    LayoutVersionError,
    SegmentError,
    SegmentMissingError,
    ShmqError,
    TruncatedSegmentError,
)
from shmq.layout import BOARD_MAGIC, DONE, MAGIC, RING_MAGIC, SET_ASIDE, SPILL_MAGIC, TOPIC_MAGIC
from shmq.reader import RingReader
from shmq.segment import MAKING, Segment, is_owned, names, size_of, unlink

PREFIX = "shmq:"
"""What the names of all rings and spill segments begin with."""

_HINT = "`shmq gc --discard` removes it nevertheless"


@dataclass(frozen=True, slots=True)
class Finding:
    """One segment that ``collect`` looked at: what became of it, and why. ``nbytes`` of shared memory."""

    name: str
    nbytes: int
    removed: bool
    reason: str


def collect(prefix: str = PREFIX, *, discard: bool = False) -> list[Finding]:
    """Remove the segments whose owners are dead and that hold no message that is still to be delivered.

    Only names that begin with ``prefix`` are looked at. What is alive is never touched. An orphaned ring with messages
    that are not done is kept for the next consumer of its queue, unless ``discard`` is true. Segments that are no rings
    of this version are left alone. Returns a finding for every segment that is not in use, removed or kept.
    """
    findings = []
    for name in names(MAKING + prefix):
        if not _alive(name):
            try:
                findings.append(_remove(name, "it was never finished, and its maker is dead"))
            except SegmentError as error:
                findings.append(Finding(name, size_of(name), False, f"left alone: {error}"))
    # The spill segments first: a ring is older than its own.
    spills = [name for name in names(prefix) if _is_spill(name)]
    rings = [name for name in names(prefix) if not _is_spill(name)]
    for name in rings:
        with contextlib.suppress(SegmentMissingError):
            findings += _collect_ring(name, discard)
    for name in spills:
        if name.rpartition(".")[0] not in rings:
            with contextlib.suppress(SegmentMissingError):
                findings.append(_collect_spill(name))
    return findings


def _collect_ring(name: str, discard: bool) -> list[Finding]:
    if _alive(name):
        return []
    try:
        segment = _attach(name)
    except SegmentMissingError:
        raise
    except (TruncatedSegmentError, LayoutVersionError) as error:
        if discard:
            return [_remove(name, f"discarded, although it may hold messages: {error}")]
        return [Finding(name, size_of(name), False, f"its owner is dead, but it can't be read: {error}; {_HINT}")]
    except SegmentError as error:
        return [Finding(name, size_of(name), False, f"left alone: {error}")]
    try:
        # Taken while we look: a consumer that starts now finds it owned, and comes back to it.
        if not segment.adopt():
            return []
        if segment.words[MAGIC] == BOARD_MAGIC:
            return [_remove(name, "its owner is dead")]
        if segment.words[MAGIC] == TOPIC_MAGIC:
            if segment.has_readers():
                segment.retire()
                if _lost_its_readers(name):
                    # The last one left while this process had the lock, and so could not remove it.
                    return _collect_ring(name, discard)
                return [Finding(name, size_of(name), False, "its publisher is dead, but it has readers yet")]
            return _remove_ring(name, "its publisher is dead, and all its readers are gone")
        try:
            records = RingReader(segment, epoch=0, peek=True).records()
            waiting = sum(record.state < DONE for record in records)
            aside = sum(record.state == SET_ASIDE for record in records)
            found = [f"{waiting} messages wait for the next consumer"] if waiting else []
            found += [f"{aside} messages were set aside for inspection"] if aside else []
        except ShmqError as error:
            found = [f"it is damaged: {error}"]
        if found and not discard:
            return [Finding(name, segment.size, False, f"its owner is dead, but {' and '.join(found)}; {_HINT}")]
        reason = "its owner is dead and all its messages are done"
        if found:
            reason = f"discarded, although {' and '.join(found)}"
        return _remove_ring(name, reason)
    finally:
        segment.retire()


def _lost_its_readers(name: str) -> bool:
    segment = Segment.attach(name, magic=TOPIC_MAGIC)
    try:
        return not segment.has_readers()
    finally:
        segment.retire()


def _attach(name: str) -> Segment:
    foreign = None
    for magic in (RING_MAGIC, TOPIC_MAGIC, BOARD_MAGIC):
        try:
            return Segment.attach(name, magic=magic)
        except ForeignSegmentError as error:
            foreign = foreign or error
    assert foreign is not None
    raise foreign


def _remove_ring(name: str, reason: str) -> list[Finding]:
    return [_remove(name, reason), *[_remove(spill, "its ring was removed") for spill in names(f"{name}.")]]


def _collect_spill(name: str) -> Finding:
    try:
        Segment.attach(name, magic=SPILL_MAGIC).close()
    except SegmentMissingError:
        raise
    except SegmentError as error:
        return Finding(name, size_of(name), False, f"left alone: {error}")
    return _remove(name, "its ring is gone")


def _is_spill(name: str) -> bool:
    return "." in name.rpartition(":")[2]


def _alive(name: str) -> bool:
    try:
        return is_owned(name)
    except SegmentMissingError:
        return True
    except SegmentError:
        # No segment at all: a directory, a link. Whoever tries to attach it says what it is.
        return False


def _remove(name: str, reason: str) -> Finding:
    nbytes = size_of(name)
    unlink(name)
    return Finding(name, nbytes, True, reason)
