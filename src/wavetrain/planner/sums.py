"""Whether one choice from each of many menus can keep all sums within their limits: plain, exact, nothing but integers.

This is what a proof by a core is checked with, so it shares nothing with the search that made the proof. Sums are
dropped where their prices are more than is allowed, where even the least of all that is to come is too much, or
where another sum is no more in anything.
"""

from __future__ import annotations

from operator import add, le

Menu = list[tuple[int, tuple[int, ...]]]  # price above the least, and amounts, of every choice; the cheapest first
Sums = dict[tuple[int, ...], int]  # amounts so far, with their price


def any_within(menus: list[tuple[int, Menu]], limits: list[int], slack: int) -> bool:
    """Whether so many choices of each menu keep every amount within its limit, and the prices within the slack.

    Prices are sums of the amounts at fixed rates, none of them negative: what is no more in them costs no more.
    """
    rest = list(limits)  # what the least of all other menus leaves
    for count, menu in menus:
        rest = [most - count * least for most, least in zip(rest, _leasts(menu), strict=True)]
    sums: Sums = {(0,) * len(limits): 0}
    # Many copies first, as they mostly add the same to several memories, then those with little to choose between.
    for count, menu in sorted(menus, key=lambda item: (-item[0], len(item[1]))):
        rest = [most + count * least for most, least in zip(rest, _leasts(menu), strict=True)]
        sums = _unbettered(_sums_with(sums, count, menu, rest, slack))
    return bool(sums)


def _leasts(menu: Menu) -> list[int]:
    return [min(column) for column in zip(*(amounts for _, amounts in menu), strict=True)]


def _sums_with(sums: Sums, count: int, menu: Menu, most: list[int], slack: int) -> Sums:
    """All sums with that many choices of the menu added, the same one more than once if need be."""
    (_, first), *others = menu
    waiting = {0: sums}  # by how many were added
    for index, (excess, amounts) in reversed(list(enumerate(others))):
        least = _leasts(menu[: index + 1])  # of the choices that are still to come
        grown: dict[int, Sums] = {}
        for added, known in waiting.items():
            for more in range(count - added + 1 if excess * (count - added) <= slack else slack // excess + 1):
                step = [more * amount for amount in amounts]
                top = [each - (count - added - more) * low for each, low in zip(most, least, strict=True)]
                into = grown.setdefault(added + more, {})
                for values, price in known.items():
                    after = tuple(map(add, values, step))
                    if price + more * excess <= slack and all(map(le, after, top)):
                        into[after] = price + more * excess
        waiting = {added: _unbettered(known) for added, known in grown.items()}
    found: Sums = {}
    for added, known in waiting.items():
        step = [(count - added) * amount for amount in first]
        found |= {tuple(map(add, values, step)): price for values, price in known.items()}
    return {values: price for values, price in found.items() if all(map(le, values, most))}


def _unbettered(sums: Sums) -> Sums:
    """Without sums that another is no more than in anything, as far as only two numbers differ; else all are kept."""
    columns = list(zip(*sums, strict=True))
    if len(columns) < 2 or any(column != columns[-1] for column in columns[1:]):
        return sums
    kept: Sums = {}
    least = None
    for values in sorted(sums):
        if least is None or values[-1] < least:
            least = values[-1]
            kept[values] = sums[values]
    return kept
