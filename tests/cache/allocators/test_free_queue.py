"""The free queue equals a plain list, in the same order, for any sequence of operations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.allocators.free_queue import FreeQueue


@given(st.data(), st.integers(2, 12))
def test_queue_equals_a_list(data: st.DataObject, num_blocks: int) -> None:
    queue, model = FreeQueue(num_blocks), list(range(1, num_blocks))
    taken: list[int] = []
    for _ in range(data.draw(st.integers(0, 30))):
        match data.draw(st.sampled_from(["pop", "remove", "chain", "extend"])):
            case "pop":
                count = data.draw(st.integers(0, len(model)))
                assert queue.pop_first(count) == model[:count]
                taken += model[:count]
                del model[:count]
            case "remove":
                chosen = data.draw(st.permutations(model))[: data.draw(st.integers(0, len(model)))]
                queue.remove(chosen)
                taken += chosen
                model = [block_id for block_id in model if block_id not in chosen]
            case "chain":  # a run of the queue, tail first as a chain is released
                start = data.draw(st.integers(0, len(model)))
                stop = data.draw(st.integers(start, len(model)))
                run = model[start:stop][::-1]
                queue.remove(run)
                taken += run
                del model[start:stop]
            case "extend":
                count = data.draw(st.integers(0, len(taken)))
                queue.extend(taken[:count])
                model += taken[:count]
                del taken[:count]
        queue.check_integrity()
        assert list(queue) == model
