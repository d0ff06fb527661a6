"""Run a function over a stream of items in threads, without holding the whole stream in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def thread_map(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], *, ahead: int
) -> Iterator[Result]:
    """`pool.map`, results in the items' order, that takes items only as results are used.

    Args:
        pool: Of threads.
        function: What to run.
        items: Its arguments.
        ahead: Most items that are taken and whose results have not been used.
    """
    source = iter(items)
    begun = deque(pool.submit(function, item) for item in islice(source, ahead))
    while begun:
        yield begun.popleft().result()
        begun.extend(pool.submit(function, item) for item in islice(source, 1))
