"""A request's memory: one row, one slot, pages; and the states in which a peer may write it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.protocol.bind import IndexLists
from sglang_pd.protocol.errors import PlanError
from sglang_pd.protocol.idx import I64, Idx
from sglang_pd.protocol.kinds import Prompt, first_page, list_count
from sglang_pd.protocol.spaces import AnySpace, Page, RecurrentSlot, RequestRow, SwaTok


class LeaseState(Enum):
    """What may happen to the memory now."""

    HELD = "held"
    """The local engine alone writes it."""
    ARMED = "armed"
    """A peer may write it at any moment; nobody here clears, grows, or frees it."""
    QUARANTINED = "quarantined"
    """Its request is over, but a peer may still write or read it."""
    FREED = "freed"
    """Back with the allocator."""


NOBODY_KNOWS: Final = 2**62
"""A token position behind all others."""


@dataclass(slots=True)
class Holding:
    """Indices of one list space that a lease holds. The allocator changes them; what of them is written, the lease's
    own lists say.

    indices: int64. first: position, in pages from the start of the request, of indices[0] (0 for rows and slots).
    shared: how many of the first indices belong to another lease's prefix. written_from: of a sliding window, the token
    position from which on its rows are the request's: computed here in one piece, or brought by a hand-over, which
    writes a window from its first row, not from its first page.
    """

    indices: I64
    first: int = 0
    shared: int = 0
    written_from: int = 0

    def exposed(self, window_tokens: int, prompt: Prompt) -> None:
        """Lists for a hand-over of that prompt were given to a peer: of what lies before its window nothing is known
        from now on, however it ends. It never says that more is there than before: rows come in pieces, with gaps.
        """
        start = max(0, prompt.tokens - window_tokens)
        if start >= prompt.prefix_tokens:  # else the rows before the prefix's end were there, and are as they were
            self.written_from = max(self.written_from, start)

    @property
    def stop(self) -> int:
        """Position behind the last index."""
        return self.first + len(self.indices)


@dataclass(frozen=True, slots=True)
class Tables:
    """What a rank needs to find a request's state: typed indices, the same on every rank of the instance.

    pages: pages of positions 0, p, 2p, ... swa_pages: pages of the sliding window, the first one for positions from
    swa_first_page * p. None where the model has no such component. tokens: positions that the pages hold.
    """

    generation: int
    tokens: int
    pages: Idx[Page] | None = None
    swa_pages: Idx[Page] | None = None
    swa_first_page: int = 0
    row: Idx[RequestRow] | None = None
    slot: Idx[RecurrentSlot] | None = None


class Lender(Protocol):
    """What a lease asks of the allocator that made it."""

    def extend(self, lease: Lease, tokens: int, window_stop: int) -> None:
        """Hold pages for `tokens` positions, and those of a window that ends at `window_stop`: all or nothing."""

    def trim(self, lease: Lease, stop: int) -> None:
        """Give back window pages that lie wholly before the window of `stop`."""

    def require_alone(self, lease: Lease) -> None:
        """Raise `LeaseError` where anything but the lease's own prefix is held by another lease too."""

    def finish(self, lease: Lease, withheld: str, now_s: float) -> None:
        """Take everything back; withheld: the reason why none of it may be used yet."""


class Lease:
    """Memory of one request; made by `Allocator.lease`. Not thread-safe: the control thread owns it.

    A lease starts HELD. `arm` before a peer may write, `disarm` once every byte is in, or fenced. `pin` while a peer's
    transfer reads; then only quarantine, never release, ends the lease.
    """

    def __init__(self, lender: Lender, generation: int) -> None:
        self._lender = lender
        self.generation = generation
        """Positive, rising, never re-used by this allocator: names this use of the memory."""
        self.state = LeaseState.HELD
        self.tokens = 0
        """Token positions the lease has pages for."""
        self.prefix_tokens = 0
        """Leading tokens whose pages are shared with another lease and never written by this one."""
        self._pins = 0
        self._whole_pins = 0
        self._exposed = False
        """Lists were given since it was armed."""
        self._least_listed: int | None = None
        """The shortest prefix for which lists were given while it was not."""
        self.holdings: dict[AnySpace, Holding] = {}
        """What is held in each list space; changed by the allocator alone."""
        self._tables: Tables | None = None

    # --- states ---

    def _require(self, what: str, *states: LeaseState) -> None:
        if self.state not in states:
            raise LeaseError(
                f"a lease cannot {what} now",
                where=f"generation {self.generation}",
                expected=" or ".join(s.value for s in states),
                actual=self.state.value,
                hint="Memory armed for receive belongs to the peer until its fence." if self.is_armed else "",
            )

    @property
    def is_armed(self) -> bool:
        """True while a peer may write this memory."""
        return self.state is LeaseState.ARMED

    @property
    def pins(self) -> int:
        """Transfers that may read this memory now."""
        return self._pins

    def arm(self) -> None:
        """A peer may write from now on."""
        self._require("be armed", LeaseState.HELD)
        if self._pins:
            raise LeaseError("a lease that is being read cannot be armed", where=f"generation {self.generation}")
        if self._least_listed is not None:
            self._require_prefix(self._least_listed)
        self._lender.require_alone(self)
        self.state, self._exposed = LeaseState.ARMED, False

    def disarm(self) -> None:
        """No peer will write any more (all bytes are in, or every writer is fenced): the engine owns it again."""
        self._require("be disarmed", LeaseState.ARMED)
        self.state = LeaseState.HELD
        for _, holding in self._windows() if not self._exposed else ():
            holding.written_from = NOBODY_KNOWS  # what came, if anything, no list tells

    def pin(self, *, whole: bool = False) -> None:
        """A transfer reads this memory. whole: also what is only valid after the prompt's last chunk."""
        self._require("be pinned", LeaseState.HELD)
        self._pins += 1
        self._whole_pins += whole

    def unpin(self, *, whole: bool = False) -> None:
        """That transfer is quiesced. whole: as it was pinned. Raises `LeaseError` where no such pin is left."""
        held = self._whole_pins if whole else self._pins - self._whole_pins  # each kind pays for itself alone
        if held < 1:
            raise LeaseError(
                "a lease was unpinned more often than pinned", where=f"generation {self.generation}",
                expected=f"a pin with whole={whole}", actual=f"{self._pins} pins, {self._whole_pins} of them whole",
                hint="Unpin with the `whole` that the pin had.",
            )  # fmt: skip
        self._pins -= 1
        self._whole_pins -= whole

    def _require_not_read_whole(self, what: str) -> None:
        if self._whole_pins:
            raise LeaseError(
                f"a lease that is being read as a whole cannot {what}", where=f"generation {self.generation}"
            )

    def release(self) -> None:
        """Give everything back. Raises `LeaseError` while a peer may write or read it: quarantine it then."""
        self._require("be released", LeaseState.HELD)
        if self._pins:
            raise LeaseError(
                "a lease that is being read cannot be released", where=f"generation {self.generation}",
                actual=f"{self._pins} transfers", hint="Unpin when they are quiesced, or quarantine the lease.",
            )  # fmt: skip
        self._lender.finish(self, withheld="", now_s=0.0)
        self.state = LeaseState.FREED

    def quarantine(self, reason: str, now_s: float) -> None:
        """End the request, but withhold its memory until `Allocator.fenced(generation)`. Shared pages go back now."""
        self._require("be quarantined", LeaseState.HELD, LeaseState.ARMED)
        self._lender.finish(self, withheld=reason or "unnamed", now_s=now_s)
        self.state = LeaseState.QUARANTINED

    # --- size ---

    def advance(self, stop: int) -> None:
        """Hold pages for every position below `stop`, the sliding window before `stop` included, beside what is held.

        Raises `RoomError` (`pool_exhausted`), the lease unchanged; `LeaseError` while armed, or read as a whole.
        """
        self._require("grow", LeaseState.HELD)
        self._require_not_read_whole("grow")
        self._lender.extend(self, max(stop, self.tokens), stop)

    def settle(self, stop: int) -> None:
        """Give back sliding-window pages that lie wholly before the window of `stop`."""
        self._require("settle", LeaseState.HELD)
        self._require_not_read_whole("shrink")
        self._lender.trim(self, stop)

    # --- what others see ---

    def lists(self, prompt: Prompt, *, windows: bool = True) -> IndexLists:
        """The index lists that a room needs of this side, one a list space.

        A source passes a prompt with prefix 0 and lists the whole prompt; a destination lists what lies behind its
        prefix. windows: False leaves sliding windows out, whose pages at the prompt's end prefill does not hold yet.
        Raises `PlanError`: `count_mismatch` where the lease holds too little, `prefix_unaligned` where it lacks rows of
        the prefix that are read; `LeaseError` once it is over, or where a peer would write what is shared.
        """
        self._require("be listed", LeaseState.HELD, LeaseState.ARMED)
        if self.is_armed:
            self._require_prefix(prompt.prefix_tokens)
        if prompt.prefix_tokens:
            self._require_window(prompt)
        result: dict[AnySpace, Idx[Any]] = {}
        for space, holding in self.holdings.items():
            if not windows and isinstance(space, Page) and isinstance(space.of, SwaTok):
                continue
            first, count = first_page(space, prompt), list_count(space, prompt)
            if count and (first < holding.first or first + count > holding.stop):
                raise PlanError(
                    "the lease does not hold the pages of the prompt",
                    code="count_mismatch",
                    where=f"generation {self.generation}, {space}",
                    expected=f"pages {first} to {first + count}",
                    actual=f"{holding.first} to {holding.stop}",
                )
            start = first - holding.first if count else 0
            result[space] = space.ingest(holding.indices[start : start + count], consumer="lease")
        self._note_listed(prompt)
        return result

    def _windows(self) -> list[tuple[SwaTok, Holding]]:
        """What is held of sliding windows."""
        return [
            (space.of, holding)
            for space, holding in self.holdings.items()
            if isinstance(space, Page) and isinstance(space.of, SwaTok)
        ]

    def _note_listed(self, prompt: Prompt) -> None:
        if not self.is_armed:  # a source's, or of a destination that is armed later
            least = self._least_listed
            self._least_listed = prompt.prefix_tokens if least is None else min(least, prompt.prefix_tokens)
            return
        self._exposed = True
        for window, holding in self._windows():
            holding.exposed(window.window_tokens, prompt)

    def _require_prefix(self, prefix_tokens: int) -> None:
        if prefix_tokens < self.prefix_tokens:
            raise LeaseError(
                "a peer would write pages that another lease shares", where=f"generation {self.generation}",
                expected=f"lists of a prefix of at least {self.prefix_tokens} tokens", actual=prefix_tokens,
            )  # fmt: skip

    def _require_window(self, prompt: Prompt) -> None:
        """Refuse a prefix of which the lease lacks rows that its sliding window reads."""
        for window, holding in self._windows():
            read_from = max(0, prompt.tokens - window.window_tokens)
            held_from = max(holding.written_from, holding.first * window.page_len)
            if read_from < prompt.prefix_tokens and read_from < held_from:
                raise PlanError(
                    "the lease lacks rows of the prefix that are read",
                    code="prefix_unaligned",
                    where=f"generation {self.generation}, {window}",
                    expected=f"rows from position {read_from} on, for a prompt of {prompt.tokens} tokens",
                    actual="none that are known" if held_from >= NOBODY_KNOWS else f"rows from position {held_from} on",
                    hint="Lease with window_stop at the prompt's end, or share less.",
                )

    def changed(self) -> None:
        """The allocator changed the holdings: tables handed out before are of the past."""
        self._tables = None

    def tables(self) -> Tables:
        """The indices for the engines of all ranks, as of now. Raises `LeaseError` for a lease that is over: its
        indices are, or will be, another's."""
        self._require("give tables", LeaseState.HELD, LeaseState.ARMED)
        if self._tables is None:
            fields: dict[str, Any] = {"generation": self.generation, "tokens": self.tokens}
            for space, holding in self.holdings.items():
                idx = space.ingest(holding.indices, consumer="lease")
                if isinstance(space, RequestRow):
                    fields["row"] = idx
                elif isinstance(space, RecurrentSlot):
                    fields["slot"] = idx
                elif isinstance(space, Page) and isinstance(space.of, SwaTok):
                    fields["swa_pages"], fields["swa_first_page"] = idx, holding.first
                else:
                    fields["pages"] = idx
            self._tables = Tables(**fields)
        return self._tables
