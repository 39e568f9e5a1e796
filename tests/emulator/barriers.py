"""Barriers of threads and of bytes."""


class EmulationError(Exception):
    """A kernel did something that the machine does not allow; the message says which warp, and where."""


class MBarrier:
    """A barrier in shared memory, which counts arrivals and bytes."""

    def __init__(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def arrive(self, count=1):
        self.pending -= count
        if self.pending < 0:
            raise EmulationError(f"more than {self.count} arrivals in a phase of an mbarrier")
        self._complete()

    def expect(self, count):
        self.bytes += count

    def receive(self, count):
        self.bytes -= count
        self._complete()

    def _complete(self):
        if not self.pending and not self.bytes:
            self.pending = self.count
            self.phase += 1

    def passed(self, parity):
        return self.phase & 1 != parity


class Meeting:
    """A barrier that lets all pass when all have arrived: a named one, or a cluster's."""

    def __init__(self):
        self.arrived = self.generation = 0

    def arrive(self, count, expected):
        """Return the condition of a wait."""
        self.arrived += count
        if self.arrived > expected:
            raise EmulationError(f"{self.arrived} threads at a barrier for {expected}")
        generation = self.generation
        if self.arrived == expected:
            self.arrived = 0
            self.generation += 1
        return lambda: self.generation != generation
