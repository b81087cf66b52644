"""Slots: what is written past a length is scratch, and going back is setting a number."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mtplx.models.slots import KVSlots, SlotCache, Span

CPU = torch.device("cpu")


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_span_of_rows_with_lengths_of_their_own():
    span = Span.after([2, 0], 3, CPU)
    assert span.positions.tolist() == [[2, 3, 4], [0, 1, 2]]
    assert (span.end, span.start) == (5, None)
    assert span.mask.shape == (2, 1, 3, 5)
    # Every query sees itself and what lies before it in its own row.
    assert span.mask.sum(-1).tolist() == [[[3, 4, 5]], [[1, 2, 3]]]
    assert span.mask[1, 0, 1].tolist() == [True, True, False, False, False]


def test_a_span_of_equal_lengths_has_one_start():
    span = Span.after([4, 4], 2, CPU)
    assert (span.start, span.end) == (4, 6)
    assert span.positions.tolist() == [[4, 5], [4, 5]]


@pytest.mark.parametrize("lengths", [[1, 1, 1], [3, 0, 2]])
def test_update_writes_at_the_positions_and_reads_up_to_the_end(lengths):
    slots = KVSlots(capacity=8)
    keys, values = some(3, 2, 4, 5, seed=1), some(3, 2, 4, 6, seed=2)
    span = Span.after(lengths, 4, CPU)
    read_keys, read_values = slots.update(keys, values, span)
    assert read_keys.shape == (3, 2, span.end, 5)
    assert read_values.shape == (3, 2, span.end, 6)
    for row, length in enumerate(lengths):
        assert torch.equal(read_keys[row, :, length : length + 4], keys[row])
        assert torch.equal(read_values[row, :, length : length + 4], values[row])
        assert not read_keys[row, :, :length].any()
        assert not read_keys[row, :, length + 4 :].any()


def test_a_later_write_replaces_what_was_rejected():
    slots = KVSlots(capacity=6)
    first = some(2, 1, 4, 3, seed=1)
    slots.update(first, first, Span.after([0, 0], 4, CPU))
    # Row 0 keeps three of the four, row 1 one.
    second = some(2, 1, 2, 3, seed=2)
    keys, _ = slots.update(second, second, Span.after([3, 1], 2, CPU))
    assert torch.equal(keys[0], torch.cat([first[0, :, :3], second[0]], 1))
    assert torch.equal(keys[1, :, :3], torch.cat([first[1, :, :1], second[1]], 1))


def test_kept_rows_are_in_the_order_asked_for():
    cache = SlotCache(capacity=4)
    keys = some(3, 1, 2, 2)
    cache.span = Span.after([0, 0, 0], 2, CPU)
    for layer in (0, 1):
        cache.update(keys + layer, keys - layer, layer)
    cache.keep_rows(torch.tensor([2, 0]))
    for layer in (0, 1):
        assert torch.equal(cache.slots[layer].keys[:, :, :2], keys[[2, 0]] + layer)
        assert torch.equal(cache.slots[layer].values[:, :, :2], keys[[2, 0]] - layer)
    KVSlots(4).keep_rows(torch.tensor([0]))  # nothing to drop yet


def test_index_keys_lie_in_slots_whoever_asks_for_their_place():
    """By the cache's interface, or by that of one of its layers."""
    keys = some(2, 3, 4)
    caches = [SlotCache(capacity=8), SlotCache(capacity=8)]
    for cache in caches:
        cache.span = Span.after([2, 0], 3, CPU)
    read = caches[0].update_indexer(keys, 5)
    assert torch.equal(caches[1].layers[5].update_index(keys[:, None]), read[:, None])
    assert torch.equal(read[0, 2:], keys[0]) and torch.equal(read[1, :3], keys[1])
    # As transformers counts layers, there are none.
    assert len(caches[1]) == 0 and caches[1].layers == {}


def test_a_cache_is_gone_with_its_last_user():
    cache = SlotCache(capacity=4)
    seen = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert seen() is None
    finally:
        gc.enable()


def test_transformers_is_told_how_much_is_read():
    cache = SlotCache(capacity=9)
    assert (cache.get_seq_length(), cache.get_query_offset()) == (0, 0)
    cache.span = Span.after([3, 1], 2, CPU)
    assert cache.get_seq_length() == 5
    assert cache.get_query_offset() == 3
    assert cache.get_mask_sizes(2, 0) == (5, 0)


@settings(max_examples=50)
@given(st.data())
def test_attention_sees_the_committed_text_only(data):
    """Any history of writes and set-backs gives what an attention over the kept tokens gives."""
    batch, cycles = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    slots = KVSlots(capacity=4 * cycles)
    kept = [some(1, 0, 4) for _ in range(batch)]
    for cycle in range(cycles):
        width = data.draw(st.integers(1, 4))
        new = some(batch, 1, width, 4, seed=cycle)
        lengths = [row.shape[1] for row in kept]
        span = Span.after(lengths, width, CPU)
        keys, values = slots.update(new, 2 * new, span)
        attended = F.scaled_dot_product_attention(new, keys, values, attn_mask=span.mask)
        for b in range(batch):
            text = torch.cat([kept[b], new[b]], 1)
            mask = torch.ones(width, text.shape[1], dtype=torch.bool).tril(lengths[b])
            alone = F.scaled_dot_product_attention(new[b], text, 2 * text, attn_mask=mask)
            torch.testing.assert_close(attended[b], alone, rtol=1e-5, atol=1e-5)
            # Keep some of it: the rest is rejected.
            kept[b] = text[:, : lengths[b] + data.draw(st.integers(0, width))]
