"""A timer of the benchmarks whose times are known."""

from fusedmoe.commands.timing import CallTime


class CountingTimer:
    """The n-th variant takes n ms; ``grows``: n ms more with each measurement. Each variant is called once."""

    def __init__(self, grows=False):
        self.turn, self.grows = 1, grows

    def measure(self, variants):
        for call in variants.values():
            call()
        turn, self.turn = self.turn, self.turn + self.grows
        times = {name: n * turn for n, name in enumerate(variants, start=1)}
        return {name: CallTime(ms, ms, 10.0, 20.0, (ms - 0.5, ms + 0.5)) for name, ms in times.items()}
