"""What is asked of counts, and the one rule by which calls are admitted to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cap:
    """A number that a count must not exceed.

    Attributes:
        name: The limit that it belongs to.
        limit: Most calls, a whole number; a negative one refuses every call.
        enforced: Whether it refuses calls; if not, it is only looked at.
    """

    name: str
    limit: int
    enforced: bool = True


@dataclass(frozen=True, slots=True)
class Slot:
    """One count, with the caps on it.

    Attributes:
        key: Where a store keeps the count; `None` for one that the caller keeps.
        used: The caller's count, in calls; of a key, where it starts if nothing is kept under it.
        expires_at: When the key's window ends, in seconds since the Unix epoch; `None` for one
            that lasts until it is reset.
        caps: The caps on it.
        mirrored: Whether the caller keeps a key's count, too, and brings it back as `used`: a
            store that is full may drop it.
    """

    key: str | None = None
    used: int = 0
    expires_at: float | None = None
    caps: tuple[Cap, ...] = ()
    mirrored: bool = False


@dataclass(frozen=True, slots=True)
class Settlement:
    """A correction of counts, made once however often it is sent.

    Attributes:
        id: Names the correction.
        amounts: What is added to the counts under keys, in calls; negative to take back.
        attempt: An attempt to reserve whose fate is unknown: what it charged is undone, and it is
            refused if it arrives later.
        reservation: What was to be reserved: if another attempt was granted it, the amounts are
            counted already.
        starts: The caller's counts, by key: where a key begins if nothing is kept under it.
    """

    id: str
    amounts: Mapping[str, int] = field(default_factory=dict)
    attempt: str | None = None
    reservation: str = ""
    starts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reservation:
    """A batch of charges that is admitted, call by call, in one atomic step.

    Attributes:
        id: Names the reservation: one that was granted before is not charged again.
        attempt: Names this attempt to make it.
        slots: The counts.
        charges: For each call, in order, what it adds to which of the slots, by their index.
        stops: The limits whose refusals stop the batch, and after how many refused calls. What is
            stopped charges nothing.
        settlements: Corrections that are made first.
    """

    id: str
    attempt: str
    slots: tuple[Slot, ...]
    charges: tuple[Mapping[int, int], ...]
    stops: Mapping[str, int] = field(default_factory=dict)
    settlements: tuple[Settlement, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether a store keeps one of the counts."""
        return any(slot.key is not None for slot in self.slots)


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a reservation.

    Attributes:
        used: The count of each slot before the batch, in calls.
        admitted: For each charge, whether no enforced cap refuses it.
        stopped: Whether refusals stopped the batch: nothing of it is charged.
        known: Whether the reservation was granted before, and is not charged again.
    """

    used: tuple[int, ...]
    admitted: tuple[bool, ...]
    stopped: bool = False
    known: bool = False

    def charged(self, reservation: Reservation) -> tuple[int, ...]:
        """What the batch adds to each slot, in calls.

        Args:
            reservation: The one that was answered.
        """
        amounts = [0] * len(reservation.slots)
        if not self.stopped:
            for charge, admitted in zip(reservation.charges, self.admitted, strict=True):
                if admitted:
                    for index, amount in charge.items():
                        amounts[index] += amount
        return tuple(amounts)


def admit(reservation: Reservation, used: Sequence[int]) -> Grant:
    """Admit each call against all caps on the slots that it charges.

    Calls are judged in order, each on what the ones before it left. A refused call is charged
    nowhere. If refusals stop the batch, nothing of it is charged.

    Args:
        reservation: What is asked.
        used: The count of each slot before the batch, in calls.
    """
    counts = list(used)
    refusals = dict.fromkeys(reservation.stops, 0)
    admitted = []
    for charge in reservation.charges:
        refusing = {
            cap.name
            for index, amount in charge.items()
            for cap in reservation.slots[index].caps
            if cap.enforced and counts[index] + amount > cap.limit
        }
        for name in refusing & refusals.keys():
            refusals[name] += 1
        if not refusing:
            for index, amount in charge.items():
                counts[index] += amount
        admitted.append(not refusing)
    stopped = any(refusals[name] >= after for name, after in reservation.stops.items())
    return Grant(tuple(used), tuple(admitted), stopped)
