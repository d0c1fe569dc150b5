"""What travels between gateways and managers says the same at both ends."""

from dataclasses import replace

from hypothesis import given

from request_manager.relay.wire import DeltaPlace, admission_of, error_of, from_wire, generation_of, to_wire, verdict_of
from treecore.codec import encode
from treecore.streams import Admission, Delta
from treecore.testing import any_message


@given(any_message.admissions)
def test_a_request_is_the_same_at_the_other_end(admission: Admission) -> None:
    """All that its tokens depend on, and who may draft how, but for its name."""
    if admission.is_dynamic:
        admission = replace(admission, expansion=None)
    if admission.ssms is not None:
        admission = replace(admission, ssms=tuple(sorted(set(admission.ssms))))
    again = admission_of(
        replace(generation_of(admission), request_id=admission.request_id),
        admission.gateway_id,
        admission.number,
        admission.output.tolist(),
    )
    assert encode(replace(again, trace=admission.trace)) == encode(admission)


@given(any_message.deltas)
def test_a_delta_or_error_is_the_same_at_the_other_end(delta: Delta) -> None:
    """Tokens, counts and log-probabilities; of an error, what a client is told."""
    if delta.error is None and delta.logprobs is None:
        place = DeltaPlace(delta.request_id, delta.number, delta.start)
        assert to_wire(place, from_wire(delta, 0)) == delta
        assert from_wire(delta, 5).steps == delta.steps + 5
    if delta.error is not None:
        error = error_of(delta.error)
        assert str(error) == delta.error.message
        assert type(error_of(verdict_of(error))) is type(error)
