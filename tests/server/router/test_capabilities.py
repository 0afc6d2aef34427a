"""Workers with different features: the router skips those that cannot serve a request, and reports why none can."""

from __future__ import annotations

import pytest

from cache.records import WorkerLoad
from cache.types import GatewayId
from server.router.load_tracker import FifoLoadEstimate, WorkerLoadEstimate
from server.router.types import NoWorkerError
from tests.server.router.fleets import RATE, Fleets, chain, member

LIMITED = ("typical_p", "bad_words", "resume:grammar")


def fleet_of(**unsupported: tuple[str, ...]) -> Fleets:
    fleets = Fleets()
    for name, lacking in unsupported.items():
        fleets.index.register(member(name, unsupported=lacking))
    return fleets


async def test_a_request_goes_to_a_worker_that_can_serve_it() -> None:
    fleets = fleet_of(a=LIMITED, b=(), c=LIMITED)
    for _ in range(5):
        assert await fleets.worker(chain(3), required=("typical_p",)) == "b"
    assert {await fleets.worker(chain(3), required=("logprobs",)) for _ in range(12)} == {"a", "b", "c"}


async def test_a_held_prefix_does_not_outweigh_a_missing_feature() -> None:
    fleets = fleet_of(a=LIMITED, b=())
    hashes = chain(40)
    fleets.index.memory.publish(member("a").worker_id, hashes[:30])
    assert await fleets.worker(hashes) == "a"
    assert await fleets.worker(hashes, required=("bad_words",)) == "b"


async def test_the_error_names_every_feature_that_no_worker_has() -> None:
    fleets = fleet_of(a=LIMITED, b=("bad_words",))
    with pytest.raises(NoWorkerError, match=r"^bad_words: no worker of model 'm' can serve this") as caught:
        await fleets.place(chain(3), required=("bad_words", "logprobs"))
    assert caught.value.unsupported == ["bad_words"]


async def test_images_go_to_workers_that_take_them() -> None:
    fleets = Fleets()
    fleets.index.register(member("a"))
    fleets.index.register(member("b", media=("image", "of a newer version")))
    assert {await fleets.worker(chain(3), has_images=True) for _ in range(5)} == {"b"}
    blind = fleet_of(a=(), b=LIMITED)
    with pytest.raises(NoWorkerError, match=r"^images: no worker of model 'm' can serve this"):
        await blind.place(chain(3), has_images=True)


async def test_a_draining_worker_that_could_is_worth_waiting_for() -> None:
    fleets = fleet_of(a=LIMITED, b=())
    fleets.index.memory.publish(member("b").worker_id, load=WorkerLoad(draining=True))
    with pytest.raises(NoWorkerError) as caught:
        await fleets.place(chain(3), required=("bad_words",))
    assert not caught.value.unsupported


async def test_a_request_goes_where_the_context_holds_what_it_demands() -> None:
    fleets = Fleets()
    fleets.index.register(member("a", max_model_len=100))
    fleets.index.register(member("b", max_model_len=200))
    assert {await fleets.worker(chain(3), num_context_tokens=150) for _ in range(5)} == {"b"}
    with pytest.raises(NoWorkerError, match="context too short") as caught:
        await fleets.place(chain(3), num_context_tokens=201)
    assert caught.value.longest_context == 200
    fleets.index.memory.publish(member("b").worker_id, load=WorkerLoad(draining=True))
    with pytest.raises(NoWorkerError) as caught:
        await fleets.place(chain(3), num_context_tokens=150)
    assert caught.value.longest_context is None, "another time it would fit"


async def test_only_workers_with_the_adapter_get_its_requests() -> None:
    fleets = Fleets()
    fleets.index.register(member("a"))
    fleets.index.register(member("b", adapters=("pirate",)))
    assert {await fleets.worker(chain(3), lora="pirate") for _ in range(5)} == {"b"}
    with pytest.raises(NoWorkerError, match="without this adapter"):
        await fleets.place(chain(3), lora="lawyer")


async def test_each_worker_has_its_own_order_of_prefills() -> None:
    """A short prompt passes a long one where prefills share each step, and waits for it where they do not."""
    fleets = Fleets()
    load = WorkerLoad({GatewayId("other"): 9.0}, prefill_tokens_per_s=RATE)
    fleets.index.register(member("shared"), load=load)
    fleets.index.register(member("fifo", prefill_order="fifo"), load=load)
    assert await fleets.worker(chain(5)) == "shared"
    estimates = fleets.router.scorer._estimates
    assert type(estimates[member("shared").worker_id]) is WorkerLoadEstimate
    assert type(estimates[member("fifo").worker_id]) is FifoLoadEstimate


async def test_a_correction_counts_once() -> None:
    """In the hit rate, and in the accuracy of the index."""
    fleets = Fleets()
    fleets.index.register(member("a"))
    hashes = chain(40)
    fleets.index.memory.publish(member("a").worker_id, hashes[:25])
    placement = await fleets.place(hashes, num_prompt_tokens=800)
    fleets.router.started(placement, 400)
    worker_id = placement.worker.worker_id
    assert fleets.router.scorer.hit_rate(worker_id) == pytest.approx(0.5)
    fleets.router.first_token(placement)
    fleets.router.corrected(placement, 200)
    fleets.router.corrected(placement, 200)
    fleets.router.closed(placement)
    assert fleets.router.scorer.hit_rate(worker_id) == pytest.approx(0.25)
    assert placement.num_cached_tokens == 200


async def test_a_correction_before_the_start_is_none() -> None:
    fleets = Fleets()
    fleets.index.register(member("a"))
    placement = await fleets.place(chain(10))
    fleets.router.corrected(placement, 16)
    fleets.router.closed(placement)
    assert fleets.router.scorer.hit_rate(placement.worker.worker_id) is None


async def test_embeddings_and_text_go_to_the_workers_that_make_them() -> None:
    fleets = Fleets()
    fleets.index.register(member("a"))
    fleets.index.register(member("b", embedding_size=64))
    fleets.index.memory.publish(member("a").worker_id, chain(9))
    assert {await fleets.worker(chain(9), embeds=True) for _ in range(5)} == {"b"}
    assert {await fleets.worker(chain(9)) for _ in range(5)} == {"a"}


async def test_embedding_workers_do_not_hide_a_missing_feature() -> None:
    """The error names the feature that no text worker has."""
    fleets = fleet_of(a=LIMITED)
    fleets.index.register(member("b", embedding_size=64))
    with pytest.raises(NoWorkerError) as caught:
        await fleets.place(chain(3), required=("bad_words",))
    assert caught.value.unsupported == ["bad_words"]
    with pytest.raises(NoWorkerError, match="does not serve this task"):
        await fleet_of(a=()).place(chain(3), embeds=True)


async def test_a_slow_worker_is_passed_over_while_there_is_another() -> None:
    fleets = fleet_of(a=(), b=())
    hashes = chain(40)
    fleets.index.memory.publish(member("a").worker_id, hashes[:30], load=WorkerLoad(is_slow=True))
    assert {await fleets.worker(hashes) for _ in range(5)} == {"b"}, "although it holds the prefix"
    fleets.index.memory.publish(member("b").worker_id, load=WorkerLoad(draining=True))
    assert await fleets.worker(hashes) == "a", "rather than none"
