"""Every ordinal ends once, slots bound what is alive, and a restore loses and repeats nothing."""

from collections.abc import Callable

import msgspec
import pytest

from opdkit.engine.ledger import Ledger, LedgerState
from opdkit.engine.testing_messages import make_dead, make_meta
from opdkit.protocols.ids import Ordinal, PolicyVersion

DECODER = msgspec.msgpack.Decoder(LedgerState)


def draw(ledger: Ledger, count: int, *, version: int = 0) -> list[Ordinal]:
    return [ledger.draw(policy_version=PolicyVersion(version)) for _ in range(count)]


def train(ledger: Ledger, ordinals: list[Ordinal], *, step: int) -> None:
    for ordinal in ordinals:
        ledger.queue(make_meta(ordinal, due_step=ledger.due_step(ordinal)))
    ledger.lease(ordinals)
    ledger.train(ordinals, step=step)


def restored(state: LedgerState) -> Ledger:
    state = DECODER.decode(msgspec.msgpack.encode(state))
    return Ledger(slots=8, max_policy_lag=1, resumed=state)


def test_a_slot_is_held_until_the_weights_are_published() -> None:
    ledger = Ledger(slots=2, max_policy_lag=0)
    ordinals = draw(ledger, 2)
    assert not ledger.can_draw()
    train(ledger, ordinals, step=0)
    assert not ledger.can_draw()
    ledger.publish(PolicyVersion(1))
    assert ledger.can_draw()
    ledger.check()


def test_a_full_ledger_refuses_to_draw() -> None:
    ledger = Ledger(slots=1, max_policy_lag=0)
    draw(ledger, 1)
    with pytest.raises(ValueError, match="all 1 slots are held"):
        draw(ledger, 1)


def test_a_death_frees_the_slot() -> None:
    ledger = Ledger(slots=1, max_policy_lag=0)
    draw(ledger, 1)
    ledger.bury(make_dead(0, num_generated_tokens=5))
    assert draw(ledger, 1) == [1]
    assert ledger.balance().num_dead_tokens == 5
    ledger.check()


def test_a_sample_is_due_max_policy_lag_after_the_version_it_was_drawn_at() -> None:
    ledger = Ledger(slots=4, max_policy_lag=2)
    draw(ledger, 1)
    draw(ledger, 2, version=3)
    assert [ledger.due_step(Ordinal(n)) for n in range(3)] == [2, 5, 5]
    assert ledger.alive_by_due() == {2: 1, 5: 2}


def test_leased_samples_are_not_offered_to_the_next_step_until_they_return() -> None:
    ledger = Ledger(slots=4, max_policy_lag=0)
    ordinals = draw(ledger, 2)
    ledger.queue(make_meta(0))
    ledger.lease(ordinals[:1])
    assert ledger.alive_by_due() == {0: 1}
    ledger.return_leases()
    assert ledger.alive_by_due() == {0: 2}
    ledger.lease(ordinals[:1])
    ledger.check()


def test_a_second_report_of_a_sample_changes_nothing() -> None:
    ledger = Ledger(slots=4, max_policy_lag=0)
    ordinals = draw(ledger, 1)
    train(ledger, ordinals, step=0)
    before = ledger.balance()
    ledger.queue(make_meta(0))
    assert ledger.balance() == before
    ledger.publish(PolicyVersion(1))
    ledger.queue(make_meta(0))
    assert ledger.balance() == before
    ledger.check()


OUT_OF_TURN: list[tuple[Callable[[Ledger], None], str]] = [
    (lambda ledger: ledger.queue(make_meta(9)), "ordinal 9 cannot be queued: it is not drawn"),
    (lambda ledger: ledger.lease([Ordinal(0)]), "ordinal 0 cannot be leased: it is rolling"),
    (lambda ledger: ledger.train([Ordinal(0)], step=0), "cannot be trained: it is rolling"),
    (lambda ledger: ledger.bury(make_dead(1)), "ordinal 1 cannot be buried: it is queued"),
    (lambda ledger: ledger.bury(make_dead(9)), "ordinal 9 cannot be buried: it is not held"),
]


@pytest.mark.parametrize(("deed", "message"), OUT_OF_TURN)
def test_a_deed_out_of_turn_is_refused_and_changes_nothing(
    deed: Callable[[Ledger], None], message: str
) -> None:
    ledger = Ledger(slots=4, max_policy_lag=0)
    draw(ledger, 2)
    ledger.queue(make_meta(1))
    before = ledger.balance()
    with pytest.raises(ValueError, match=message):
        deed(ledger)
    assert ledger.balance() == before


def test_leasing_is_all_or_nothing() -> None:
    ledger = Ledger(slots=4, max_policy_lag=0)
    ordinals = draw(ledger, 2)
    ledger.queue(make_meta(0))
    with pytest.raises(ValueError, match="ordinal 1"):
        ledger.lease(ordinals)
    ledger.lease([Ordinal(0)])


def test_training_past_the_due_step_is_our_own_bug() -> None:
    ledger = Ledger(slots=4, max_policy_lag=1)
    ordinals = draw(ledger, 1)
    with pytest.raises(AssertionError, match="trained at step 2, due by 1"):
        train(ledger, ordinals, step=2)


def test_versions_are_published_in_order() -> None:
    ledger = Ledger(slots=1, max_policy_lag=0)
    ledger.publish(PolicyVersion(2))
    with pytest.raises(ValueError, match="policy_version 1 is below the published 2"):
        ledger.publish(PolicyVersion(1))


def test_both_accounts_balance_at_every_stage() -> None:
    ledger = Ledger(slots=8, max_policy_lag=0)
    draw(ledger, 4)
    ledger.queue(make_meta(0, segments=[(9, 6)], num_wasted_tokens=3))
    ledger.bury(make_dead(1, num_generated_tokens=4))
    train(ledger, [Ordinal(2)], step=0)
    balance = ledger.balance(num_rolling_tokens=10, num_generated_tokens=6 + 3 + 4 + 2 + 10)
    assert (balance.num_missing, balance.num_missing_tokens) == (0, 0)
    assert (balance.num_alive, balance.num_trained, balance.num_dead) == (2, 1, 1)
    assert balance.num_trained_tokens == 2
    assert balance.num_in_flight_tokens == 6 + 10
    assert balance.num_dead_tokens == 3 + 4  # the failed attempt's too


def test_tokens_that_the_workers_sampled_and_no_sample_holds_are_missing() -> None:
    ledger = Ledger(slots=8, max_policy_lag=0)
    draw(ledger, 1)
    ledger.queue(make_meta(0, segments=[(9, 6)]))
    assert ledger.balance(num_generated_tokens=7).num_missing_tokens == 1


def test_a_restore_draws_again_what_had_not_ended_lowest_first_and_then_goes_on() -> None:
    ledger = Ledger(slots=8, max_policy_lag=1)
    draw(ledger, 6)
    train(ledger, [Ordinal(0), Ordinal(3)], step=0)
    ledger.publish(PolicyVersion(1))
    ledger.bury(make_dead(4))
    ledger.queue(make_meta(2))
    state = ledger.snapshot(policy_version=PolicyVersion(1))
    assert (state.frontier, state.ended_beyond, state.next_ordinal) == (1, (3, 4), 6)
    again = restored(state)
    assert draw(again, 5, version=1) == [1, 2, 5, 6, 7]
    again.check()
    assert again.balance().num_drawn == 3 + 5


def test_a_step_that_the_checkpoint_does_not_hold_is_trained_again() -> None:
    ledger = Ledger(slots=8, max_policy_lag=1)
    draw(ledger, 4)
    train(ledger, [Ordinal(0), Ordinal(1)], step=0)
    train(ledger, [Ordinal(2)], step=1)
    state = ledger.snapshot(policy_version=PolicyVersion(1))
    assert (state.num_trained, state.num_trained_tokens) == (2, 4)
    again = restored(state)
    assert draw(again, 3, version=1) == [2, 3, 4]
    again.check()


def test_a_snapshot_before_anything_drawn_again_has_ended_forgets_nothing() -> None:
    ledger = Ledger(slots=8, max_policy_lag=1)
    draw(ledger, 5)
    train(ledger, [Ordinal(1)], step=0)
    first = ledger.snapshot(policy_version=PolicyVersion(1))
    second = restored(first)
    draw(second, 2, version=1)
    assert second.snapshot(policy_version=PolicyVersion(1)) == first


def test_the_token_account_goes_on_over_a_restore() -> None:
    ledger = Ledger(slots=8, max_policy_lag=1)
    draw(ledger, 2)
    train(ledger, [Ordinal(0)], step=0)
    again = restored(ledger.snapshot(policy_version=PolicyVersion(1)))
    draw(again, 1, version=1)
    again.queue(make_meta(1, segments=[(9, 5)]))
    balance = again.balance(num_generated_tokens=5)  # the new workers count from 0
    assert balance.num_generated_tokens == 2 + 5
    assert balance.num_missing_tokens == 0


def test_a_snapshot_of_weights_older_than_the_published_is_refused() -> None:
    ledger = Ledger(slots=8, max_policy_lag=1)
    ledger.publish(PolicyVersion(3))
    with pytest.raises(ValueError, match="policy_version 2 is below the published 3"):
        ledger.snapshot(policy_version=PolicyVersion(2))


def test_a_state_whose_counts_do_not_add_up_is_refused() -> None:
    state = Ledger(slots=8, max_policy_lag=1).snapshot(policy_version=PolicyVersion(0))
    raw = msgspec.to_builtins(state) | {"frontier": 3}
    with pytest.raises(msgspec.ValidationError, match="lists 3 ended ordinals, but counts 0"):
        msgspec.convert(raw, LedgerState)
