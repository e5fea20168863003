"""Estimate what limits an item of the short scan: a timeline of one SM with assumed latencies, no GPU.

    python docs/lab/2026-11-28-item-chain-model.py

Processes: the partitions of a CTA, as `scan/short.py` had them before (`one warp`) and has them now. Memory:
a request takes its latency, and an SM's share of HBM or L2 one request after the other. All numbers are
assumptions or derived from earlier entries, none is measured here.
"""

import heapq
import itertools

# us: an atomic in L2; look-ups in L2, the second on a pool alone; the flag of a chunk
ATOMIC, LOOKUP, FLAG = 0.8, 0.7, 0.7
HBM, L2 = 1.2, 0.7  # us until the first byte
SHARE, FROM_L2 = 27.4, 60.0  # KB/us of an SM: 85 % of the copy rate / 132; from L2
READ = 80.0  # KB/us at which a TMA store reads shared memory
CHUNK, SCORES = 1.8, 0.6  # us: a consumer's chunk; P of a chunk
ISSUE = 0.2  # us: the TMA loads of a chunk
ORDERS = {  # (two warps, buffers, prefetch)
    "one warp": (False, 1, False),
    "scheduler warp": (True, 1, False),
    "two buffers": (True, 2, False),
    "prefetch": (True, 1, True),
}


class Timeline:
    def __init__(self, items, state_kb, chunk_kb, swap, is_pool, order):
        self.now, self.queue, self.counter, self.times = 0.0, [], itertools.count(), {}
        self.waiting, self.free = {}, {"HBM": 0.0, "L2": 0.0}
        self.items, self.state, self.chunk, self.swap, self.is_pool = items, state_kb, chunk_kb, swap, is_pool
        self.two_warps, self.buffers, self.prefetch = order

    def signal(self, name, time=None):
        time = self.now if time is None else time
        self.times[name] = time
        for process in self.waiting.pop(name, ()):
            heapq.heappush(self.queue, (max(time, self.now), next(self.counter), process))

    def move(self, kb, place):
        """Return when kb have arrived that are asked for now."""
        rate, latency = (SHARE, HBM) if place == "HBM" else (FROM_L2, L2)
        self.free[place] = max(self.free[place], self.now) + kb / rate
        return max(self.free[place], self.now + latency + kb / 80.0)

    def run(self, *processes):
        for process in processes:
            heapq.heappush(self.queue, (0.0, next(self.counter), process))
        while self.queue:
            self.now, _, process = heapq.heappop(self.queue)
            step = next(process, None)
            if isinstance(step, str) and step not in self.times:
                self.waiting.setdefault(step, []).append(process)
            elif step is not None:
                time = self.times[step] if isinstance(step, str) else self.now + step
                heapq.heappush(self.queue, (max(time, self.now), next(self.counter), process))
        return self.times

    def take(self, t):
        yield ATOMIC
        yield LOOKUP * (2 if self.is_pool else 1)
        self.signal(f"item {t}")

    def exchange(self, t):
        """Store the final state of item t - 1, and load the initial state of a later one."""
        yield f"swapped {t}"
        if t > 0:
            self.free["HBM"] = max(self.free["HBM"], self.now) + self.state / SHARE
            yield self.state / READ
        if t + self.buffers <= self.items:
            self.load_state(t + self.buffers)

    def load_state(self, t):
        past = t >= self.items
        fetched = self.times.get(f"fetched {t}")
        if past:
            self.signal(f"state {t}", self.now + L2)
        elif fetched is None:
            self.signal(f"state {t}", self.move(self.state, "HBM"))
        else:
            self.signal(f"state {t}", max(fetched, self.move(self.state, "L2")))

    def load_chunk(self, t):
        if t > 0:
            yield FLAG
        if t >= 2:
            yield f"chunk {t - 2}"
        yield ISSUE
        self.signal(f"loaded {t}", self.move(self.chunk, "HBM"))

    def producer(self):
        for t in range(self.items):
            if self.two_warps:
                yield f"item {t}"
            yield from self.load_chunk(t)
            if not self.two_warps:
                yield from self.take(t + 1)
                yield from self.exchange(t)
        if not self.two_warps:
            yield from self.exchange(self.items)

    def scheduler(self):
        self.signal("item 0")
        self.signal("item 1")
        for t in range(self.items + 1):
            if t < self.items:
                yield from self.take(t + 2)
                if self.prefetch and t + 2 < self.items:
                    self.signal(f"fetched {t + 2}", self.move(self.state, "HBM"))
            yield from self.exchange(t)

    def scores(self):
        for t in range(self.items):
            yield f"loaded {t}"
            yield SCORES
            self.signal(f"scores {t}")

    def consumer(self):
        for t in range(self.items + 1):
            yield f"state {t}"
            yield self.swap
            self.signal(f"swapped {t}")
            if t < self.items:
                yield f"loaded {t}"
                # k S before P, o after it
                yield CHUNK / 2
                yield f"scores {t}"
                yield CHUNK / 2
                self.signal(f"chunk {t}")

    def total(self):
        self.signal("item 0")
        for t in range(self.buffers):
            self.load_state(t)
        if self.prefetch and self.items > 1:
            self.signal("fetched 1", self.move(self.state, "HBM"))
        processes = [self.producer(), self.scores(), self.consumer()]
        if self.two_warps:
            processes.append(self.scheduler())
        times = self.run(*processes)
        return max(times[f"swapped {self.items}"] + self.state / READ, *self.free.values())


def main():
    cases = {  # KB of a state, KB of a chunk from HBM, us of a swap, pool
        "fp32": (64, 48, 1.2, False),
        "fp32, pool": (64, 48, 1.2, True),
        "bf16, pool": (32, 48, 0.9, True),
        "fp32, 17 tokens": (64, 17, 1.2, False),
        "bf16, 17 tokens, pool": (32, 17, 0.9, True),
        "fp32 in L2": (0.01, 48, 1.2, False),
    }
    print(f"{'us, of 4 items; an item of 60':32s}" + "".join(f"{name:>22s}" for name in ORDERS))
    for name, given in cases.items():
        cells = []
        for order in ORDERS.values():
            four, forty, hundred = (Timeline(n, *given, order).total() for n in (4, 40, 100))
            cells.append(f"{four:12.1f} {(hundred - forty) / 60:9.2f}")
        print(f"{name:32s}" + "".join(cells))


if __name__ == "__main__":
    main()
