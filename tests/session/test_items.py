"""`Items` and `Table` behave like a list and a dict in every fork, and adding stays cheap."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.errors import DefinitionError
from handrail.session import Items, Table
from support.steps import steps_of

pytestmark = pytest.mark.once  # these data structures use nothing that differs between Python versions

EDGES = [0, 1, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 1055, 1056, 1057, 32**3, 32**3 + 1, 32**3 + 33]
sizes = st.one_of(st.sampled_from(EDGES), st.integers(0, 2100))


def appended(items: Items[int], more: Iterable[int]) -> Items[int]:
    for item in more:
        items = items.append(item)
    return items


class Key:
    """A key with a chosen hash, with which tests make keys collide partly or completely."""

    def __init__(self, name: int, code: int) -> None:
        self.name = name
        self.code = code

    def __hash__(self) -> int:
        return self.code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.name == self.name

    def __repr__(self) -> str:
        return f"Key({self.name}, {self.code:#x})"


class Row(NamedTuple):
    """An item of a table."""

    key: Any
    value: int


def row_key(row: Row) -> Any:
    return row.key


CODES = [0, 1, 32, 33, 1 << 5, 1 << 10, (1 << 60) + 1, -2, -33, -(1 << 60), 2**61 - 2]
keys = st.one_of(
    st.integers(-40, 40),
    st.text("ab", max_size=2),
    st.builds(lambda name: Key(name, CODES[name % len(CODES)]), st.integers(0, 40)),
    st.builds(lambda name: Key(name, 7), st.integers(0, 9)),
)
rows = st.builds(Row, keys, st.integers())


@pytest.mark.parametrize("size", EDGES)
def test_items_made_at_once_are_those_added_one_by_one(size: int):
    """Items made at once equal items added one by one, at every size boundary of the trie."""
    at_once, one_by_one = Items(range(size)), appended(Items(), range(size))
    assert at_once.all() == one_by_one.all() == tuple(range(size))
    assert at_once == one_by_one
    assert len(at_once) == len(one_by_one) == size


@given(sizes, st.integers(0, 70))
def test_items_are_a_list(size: int, more: int):
    """Items of any size, appended to or not, read like a list."""
    model = list(range(size + more))
    items = appended(Items(range(size)), range(size, size + more))
    assert list(items) == model
    assert items.all() == tuple(model)
    assert len(items) == len(model)
    assert items.latest() == (model[-1] if model else None)
    assert items.where(lambda item: item % 7 == 0) == tuple(item for item in model if item % 7 == 0)
    assert repr(Items(range(3))) == "Items([0, 1, 2])"


@given(st.lists(st.tuples(st.integers(0, 1_000_000), st.integers(0, 70)), max_size=25), sizes)
def test_forks_of_items_from_any_point_leave_each_other_alone(steps: list[tuple[int, int]], size: int):
    """Whichever version is appended to, every earlier version keeps its items."""
    versions = [(Items(range(size)), list(range(size)))]
    for number, (pick, count) in enumerate(steps):
        items, model = versions[pick % len(versions)]
        more = [number * 1000 + each for each in range(count)]
        versions.append((appended(items, more), model + more))
    for items, model in versions:
        assert list(items) == model
        assert len(items) == len(model)


def test_items_across_three_levels_grow_from_one_base():
    """Ten versions of one base that each grow past the third level of the trie are all correct."""
    base = Items(range(32**3 - 1))
    for sibling in range(10):
        grown = appended(base, [sibling] * 34)
        assert len(grown) == 32**3 + 33
        assert list(grown)[-35:] == [32**3 - 2, *[sibling] * 34]
    assert base == Items(range(32**3 - 1))


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_items_are_equal_when_their_items_are(one: list[int], other: list[int]):
    """`Items` are equal if their items are. They never equal a list, and can't be hashed."""
    assert (Items(one) == Items(other)) == (one == other)
    assert Items(one) != one
    assert Items(one) == appended(Items(), one)
    with pytest.raises(TypeError):
        hash(Items(one))


def test_items_have_no_keys():
    """`Items.get` raises an error that says how to give a slice a key."""
    with pytest.raises(DefinitionError, match=r"@kept\(key="):
        Items([1]).get(1)


def test_replacing_takes_other_items():
    """`replace` returns the given items in order, even if they are computed from the old ones."""
    items = Items(range(100))
    assert items.replace(item for item in items if item > 97) == Items([98, 99])
    assert len(items) == 100


@given(st.lists(rows, max_size=120))
def test_a_table_is_a_dict(added: list[Row]):
    """`get` finds the newest item of each key, and items are in the order of first insertion, whatever the keys' hashes."""
    table: Table[Row] = Table(row_key)
    model: dict[Any, Row] = {}
    for row in added:
        table = table.append(row)
        model[row.key] = row
    assert list(table) == list(model.values())
    assert table.all() == tuple(model.values())
    assert len(table) == len(model)
    assert table.latest() == (list(model.values())[-1] if model else None)
    assert all(table.get(key) is row for key, row in model.items())
    assert table.get("never") is None
    assert table.get(Key(-1, 7)) is None
    assert table.where(lambda row: row.value > 0) == tuple(r for r in model.values() if r.value > 0)
    assert table == Table(row_key).replace(model.values())


@given(st.lists(st.tuples(st.integers(0, 1_000_000), st.lists(rows, max_size=12)), max_size=25))
def test_forks_of_a_table_from_any_point_leave_each_other_alone(steps: list[tuple[int, list[Row]]]):
    """Whichever version is appended to, every earlier version keeps its items."""
    empty: Table[Row] = Table(row_key)
    versions: list[tuple[Table[Row], dict[Any, Row]]] = [(empty, {})]
    for pick, added in steps:
        table, model = versions[pick % len(versions)]
        for row in added:
            table, model = table.append(row), {**model, row.key: row}
        versions.append((table, model))
    for table, model in versions:
        assert list(table) == list(model.values())
        assert len(table) == len(model)


def test_a_large_table_finds_every_key():
    """A table of ten thousand keys, each added twice, has each key's second item, in order of first insertion."""
    table: Table[Row] = Table(row_key)
    for turn in range(2):
        for number in range(10_000):
            table = table.append(Row(f"k{number}", turn))
    assert len(table) == 10_000
    assert [row.key for row in table] == [f"k{number}" for number in range(10_000)]
    assert all(table.get(f"k{number}") == Row(f"k{number}", 1) for number in range(10_000))


def test_tables_are_equal_when_their_items_are():
    """Tables are equal if their items and order are equal, and never equal to `Items`."""
    one = Table(row_key).replace([Row(1, 1), Row(2, 2)])
    assert one == Table(row_key).replace([Row(1, 0), Row(2, 2), Row(1, 1)])
    assert one != Table(row_key).replace([Row(2, 2), Row(1, 1)])
    assert one != Items([Row(1, 1), Row(2, 2)])
    assert repr(Table(row_key).append(Row(1, 2))) == "Table([Row(key=1, value=2)])"


def fresh(new: Any, old: Any) -> int:
    """Count the tuples in the new tree that the old one does not have in the same place."""
    if new is old or not isinstance(new, tuple):
        return 0
    olds = old if isinstance(old, tuple) else ()
    pairs = [(child, olds[place] if place < len(olds) else None) for place, child in enumerate(new)]
    return 1 + sum(fresh(child, before) for child, before in pairs)


def made(grown: Items[Any], base: Items[Any]) -> int:
    """Count the tuples that were created between two versions."""
    return fresh(grown._full, base._full) + fresh(grown._tail, base._tail)


@pytest.mark.parametrize("size", [10, 1_000_000, 1_000_031, 32**3, 32**4 - 1])
def test_adding_makes_a_handful_of_nodes_however_many_items_there_are(size: int):
    """Adding one item creates at most ten tuples, however many items there are, unless the trie grows a level."""
    base = Items(range(size))
    for step in range(40):
        grown = base.append(step)
        root_moved = grown._full[1] != base._full[1]
        assert root_moved or made(grown, base) <= 10
        base = grown


def test_a_hundred_siblings_share_their_base():
    """Each of a hundred versions that add to the same million items creates at most ten tuples."""
    base = Items(range(1_000_000))
    siblings = [base.append(number) for number in range(100)]
    assert all(made(sibling, base) <= 10 for sibling in siblings)
    assert [sibling.latest() for sibling in siblings] == list(range(100))


def test_adding_to_a_table_makes_a_handful_of_nodes():
    """Adding to a table of 20,000 keys allocates fewer than 12 objects more than adding to a table of ten."""

    def allocated(size: int) -> float:
        table = Table(row_key).replace(Row(number, 0) for number in range(size))
        gc.collect()
        before = gc.get_count()[0]
        grown = [table.append(Row(-number - 1, 0)) for number in range(50)]
        made = gc.get_count()[0] - before
        assert len(grown) == 50
        return made / 50

    gc.disable()
    try:
        assert allocated(20_000) < allocated(10) + 12
    finally:
        gc.enable()


def test_adding_to_a_million_takes_the_steps_of_adding_to_ten():
    """Adding 32 items to a million takes at most twice as many function calls as adding them to ten."""

    def steps(base: Items[int]) -> int:
        return steps_of(lambda: appended(base, range(32)))

    assert steps(Items(range(1_000_000))) <= 2 * steps(Items(range(10)))
