"""Schedules that are not ours, for tests: the textbook's 1F1B, and any legal table at random."""

import random

from spmdlab.pipeline.schedule import Cell, Schedule, Work


def alternating(stages: int, microbatches: int) -> Schedule:
    """1F1B as drawn in papers: one forward or one backward a tick, each as soon as it can be."""
    orders = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, microbatches)
        order = [("F", i) for i in range(warm_up)]
        for i in range(microbatches):
            if warm_up + i < microbatches:
                order.append(("F", warm_up + i))
            order.append(("B", i))
        orders.append(order)
    rows: list[list[Cell]] = [[] for _ in range(stages)]
    done: dict[tuple[str, int, int], int] = {}
    tick = 0
    while any(orders):
        now = []
        for stage, order in enumerate(orders):
            cell = Cell()
            if order:
                letter, i = order[0]
                needs = ("F", stage - 1, i) if letter == "F" else ("B", stage + 1, i)
                if needs[1] in (-1, stages) or done.get(needs, tick) < tick:
                    order.pop(0)
                    now.append((letter, stage, i))
                    cell = Cell(forward=Work(i)) if letter == "F" else Cell(backward=Work(i))
            rows[stage].append(cell)
        done.update(dict.fromkeys(now, tick))
        tick += 1
    return Schedule(tuple(map(tuple, rows)), "alternating")


def anything_legal(stages: int, microbatches: int, repeats: int, seed: int) -> Schedule:
    """A table in which each stage picks at random among what could run, or idles."""
    draw = random.Random(seed)
    last = stages * repeats - 1
    done: dict[tuple[str, int, int], int] = {}
    rows: list[list[Cell]] = [[] for _ in range(stages)]
    tick = 0
    while len(done) < 2 * microbatches * (last + 1):
        column = []
        before = dict(done)
        for stage in range(stages):
            mine = [(i, q) for q in range(stage, last + 1, stages) for i in range(microbatches)]
            can = [
                (i, q)
                for i, q in mine
                if ("F", i, q) not in done and (q == 0 or ("F", i, q - 1) in before)
            ]
            forward = draw.choice(can) if can and draw.random() < 0.7 else None
            if forward:
                done["F", *forward] = tick
            can = [
                (i, q)
                for i, q in mine
                if ("B", i, q) not in done
                and (("F", i, q) in done if q == last else ("B", i, q + 1) in before)
            ]
            backward = draw.choice(can) if can and draw.random() < 0.7 else None
            if backward:
                done["B", *backward] = tick
            column.append(Cell(*(w and Work(w[0], w[1] // stages) for w in (forward, backward))))
        if any(cell != Cell() for cell in column):
            for row, cell in zip(rows, column, strict=True):
                row.append(cell)
            tick += 1
    return Schedule(tuple(map(tuple, rows)), "random")
