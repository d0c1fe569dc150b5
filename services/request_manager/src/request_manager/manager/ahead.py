"""Whether drafting while the LLM verifies pays: what it brings, against how far it slows the LLM down.

Where SSMs have cores or devices of their own it costs nothing; where they share the LLM's, each row takes it longer.
Must not know drafts, requests or links. Mutable: one owner.
"""

from treecore.costs import Typical

_LEAST_GAIN = 0.03  # tokens a request and step, wherever the drafts may come from
_LEAST_MS = 1e-3  # less is nothing
_NEW = 0.05  # weight of the latest step
_PAUSE_EVERY = 32  # steps after which the LLM runs alone for once, to see how fast it is then
_PROBE_EVERY = 16  # steps after which drafts that did not pay are tried again ...
_RAREST_PROBE = 64  # ... and less often the longer they do not


class DraftingAhead:
    """Remembers what drafts made ahead brought and cost lately."""

    def __init__(self) -> None:
        self._gain = 1.0  # their tokens, a request and step
        self._late_ms = 0.0  # a step's wait for what was not there in time
        self._pace = {beside: Typical(1.0) for beside in (True, False)}  # time over what it should be
        self._num_steps = 0
        self._probe_every = _PROBE_EVERY

    def pays(self, num_requests: int, verify_ms: float, plain_rate: float) -> bool:
        """Whether to draft ahead in this step; asked once a step.

        verify_ms: of its forward. plain_rate: tokens per ms of steps without any draft.
        """
        self._num_steps += 1
        if self._is_worth_it(num_requests, verify_ms, plain_rate):
            self._probe_every = _PROBE_EVERY
            return self._num_steps % _PAUSE_EVERY != 0
        if self._num_steps < self._probe_every:
            return False
        self._num_steps, self._probe_every = 0, min(_RAREST_PROBE, 2 * self._probe_every)
        return True

    def learn_step(self, took_ms: float, expected_ms: float, *, beside_drafts: bool) -> None:
        """A verification took so long, while SSMs were drafting or not."""
        self._pace[beside_drafts].observe(max(took_ms, _LEAST_MS) / max(expected_ms, _LEAST_MS))

    def learn_gain(self, num_requests: int, num_gained: int, late_ms: float) -> None:
        """So many requests had drafts made ahead, for which the step waited; so many of their nodes became tokens."""
        self._gain += _NEW * (num_gained / num_requests - self._gain)
        self._late_ms += _NEW * (late_ms - self._late_ms)

    def _is_worth_it(self, num_requests: int, verify_ms: float, plain_rate: float) -> bool:
        slowdown = max(0.0, self._pace[True].value / self._pace[False].value - 1.0)
        lost = plain_rate * (slowdown * verify_ms + self._late_ms)
        return self._gain * num_requests > max(_LEAST_GAIN * num_requests, lost)
