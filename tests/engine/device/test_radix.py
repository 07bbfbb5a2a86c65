"""Tests of the tree against a plain dictionary of each page's contents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_jax.engine.device.radix import PAGE, Insertion, Node, PageTree, num_shared

# Sequences with shared prefixes that end within a page, at its end, or after several pages.
PIECES = [(1,) * 5, (2,) * 3, (1,) * PAGE, (2,) * (PAGE - 5), (3,) * (2 * PAGE + 1), (4,)]
sequences = st.lists(st.sampled_from(PIECES), max_size=6).map(lambda parts: sum(parts, ()))
indices = st.integers(0, 9)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), sequences),
        st.tuples(st.just("match"), sequences),
        st.tuples(st.just("pin"), sequences),
        st.tuples(st.just("unpin"), indices),
        st.tuples(st.just("reset"), st.just(())),
    ),
    max_size=40,
)


class Checked:
    """Tree with a record of its pages' contents and of pinned nodes."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.tree = PageTree(num_pages, 0)
        self.written: dict[int, tuple[int, ...]] = {}  # by page: all ids up to its last one
        self.pinned: list[tuple[Node, tuple[int, ...], int]] = []  # (node, ids, version)
        self.inserted: list[tuple[int, ...]] = []  # under the current version

    def insert(self, ids: tuple[int, ...]) -> None:
        new = self.tree.insert(ids, self.tree.version)
        for block, page in enumerate(new.pages, new.first):
            self.written[page] = ids[: (block + 1) * PAGE]
        self.inserted.append(ids)
        end = (new.first + len(new.pages)) * PAGE
        assert self.match(ids) >= min(end, len(ids))

    def match(self, ids: tuple[int, ...]) -> int:
        match = self.tree.match(ids)
        assert len(match.pages) == -(-match.length // PAGE)
        for block, page in enumerate(match.pages):
            part = ids[: min((block + 1) * PAGE, match.length)]
            assert self.written[page][: len(part)] == part
            assert len(self.written[page]) <= (block + 1) * PAGE
        longest = max((num_shared(ids, other) for other in self.inserted), default=0)
        if self.tree.num_evicted == 0 and self.tree.num_used < self.num_pages:
            assert match.length == longest
        assert match.length <= longest
        return match.length

    def pin(self, ids: tuple[int, ...]) -> None:
        match = self.tree.match(ids)
        self.tree.pin(match.node)
        self.pinned.append((match.node, ids[: match.length], self.tree.version))

    def unpin(self, index: int) -> None:
        if self.pinned:
            node, _, _ = self.pinned.pop(index % len(self.pinned))
            self.tree.unpin(node)

    def reset(self, _: tuple[()]) -> None:
        self.tree.reset(self.tree.version + 1)
        self.written, self.inserted = {}, []

    def check(self) -> None:
        owned, nodes = [], list(self.tree._roots.values())
        while nodes:
            node = nodes.pop()
            for tokens, child in node.children.items():
                assert child.parent is node and child.tokens == tokens and 0 < len(tokens) <= PAGE
                others = [other for other in node.children if other is not tokens]
                assert not any(other[: len(tokens)] == tokens for other in others)
            assert not node.children or node.page < 0 or len(node.tokens) == PAGE
            owned += [child.page for child in node.children.values()]
            nodes += node.children.values()
        assert len(owned) == len(set(owned)) == self.tree.num_used
        assert sorted(owned + self.tree._free) == list(range(self.num_pages))
        for _, ids, version in self.pinned:
            if version == self.tree.version:
                assert self.match(ids) == len(ids)


@given(num_pages=st.integers(0, 12), steps=operations)
def test_no_page_is_lost_shared_or_taken_while_pinned(num_pages, steps):
    checked = Checked(num_pages)
    for name, argument in steps:
        getattr(checked, name)(argument)
        checked.check()
    while checked.pinned:
        checked.unpin(0)
    room = tuple(range(100, 100 + num_pages * PAGE))
    assert checked.tree.insert(room, checked.tree.version).first == 0
    checked.written = {}
    assert checked.tree.num_used == num_pages  # no page leaked: the new sequence has all
    assert checked.tree.match(room).length == len(room)


def tokens(start: int, length: int) -> tuple[int, ...]:
    return tuple(range(start, start + length))


def test_siblings_share_and_the_last_page_fills_up():
    tree = PageTree(8, 0)
    prompt = tokens(0, PAGE + 5)
    assert tree.insert(prompt, 0) == Insertion(0, (0, 1))
    assert tree.match(prompt).length == len(prompt)
    assert tree.match(prompt[: PAGE + 2]).length == PAGE + 2
    assert tree.insert(prompt[: PAGE + 2], 0).pages == ()
    # One response continues in the prompt's last page, the other gets a new page.
    assert tree.insert((*prompt, *tokens(50, PAGE)), 0) == Insertion(1, (1, 2))
    assert tree.insert((*prompt, *tokens(90, 3)), 0) == Insertion(1, (3,))
    assert tree.num_used == 4
    match = tree.match((*prompt, 90, 91, 7))
    assert (match.length, match.pages) == (len(prompt) + 2, (0, 3))


def test_the_leaf_unused_for_longest_goes_first_and_a_parent_after_its_children():
    tree = PageTree(3, 0)
    tree.insert(tokens(0, 2 * PAGE), 0)
    tree.insert(tokens(50, PAGE), 0)
    tree.match(tokens(0, 2 * PAGE))
    assert tree.insert(tokens(80, PAGE), 0).pages == (2,)
    assert tree.match(tokens(50, PAGE)).length == 0
    assert tree.insert(tokens(90, PAGE), 0).pages == (1,)
    assert tree.match(tokens(0, 2 * PAGE)).length == PAGE
    assert tree.num_evicted == 2


def test_a_sequence_longer_than_the_pool_keeps_its_beginning():
    tree = PageTree(3, 0)
    assert len(tree.insert(tokens(0, 5 * PAGE), 0).pages) == 3
    assert tree.match(tokens(0, 5 * PAGE)).length == 3 * PAGE
    assert PageTree(0, 0).insert(tokens(0, PAGE), 0).pages == ()


def test_pins_hold_a_path_and_survive_a_reset():
    tree = PageTree(2, 0)
    tree.insert(tokens(0, 2 * PAGE), 0)
    node = tree.match(tokens(0, 2 * PAGE)).node
    tree.pin(node)
    assert tree.insert(tokens(50, PAGE), 0).pages == ()
    tree.reset(1)
    assert tree.num_used == 0 and tree.match(tokens(0, PAGE)).length == 0
    tree.insert(tokens(50, 2 * PAGE), 1)
    tree.unpin(node)
    assert len(tree.insert(tokens(90, 2 * PAGE), 1).pages) == 2
    with pytest.raises(AssertionError):  # its pin was taken off above
        tree.unpin(node)


def test_only_the_trees_own_version_gets_in():
    tree = PageTree(4, 0)
    tree.reset(3)
    assert tree.insert(tokens(0, PAGE), 0).pages == ()
    assert tree.insert(tokens(0, PAGE), 3).pages == (0,)
    assert tree.version == 3


def test_what_one_adapter_computed_no_other_finds():
    tree = PageTree(3, 0)
    assert tree.insert(tokens(0, PAGE), 0, adapter=0).pages == (0,)
    assert tree.match(tokens(0, PAGE), 1).length == tree.match(tokens(0, PAGE)).length == 0
    assert tree.insert(tokens(0, PAGE), 0, adapter=1).pages == (1,)
    assert tree.match(tokens(0, PAGE), 0).pages == (0,)
    assert tree.match(tokens(0, PAGE), 1).pages == (1,)
    # All adapters share the pages: the least recently used one is evicted.
    assert tree.insert(tokens(50, 2 * PAGE), 0, adapter=1).pages == (2, 0)
    assert tree.match(tokens(0, PAGE), 0).length == 0
    tree.reset(1)
    assert tree.match(tokens(0, PAGE), 1).length == tree.num_used == 0
