"""What differs between the two generation endpoints: how to read a request and how a choice looks.

Must not know HTTP, the manager, or how choices are generated.
"""

from typing import Any, Protocol

from request_manager.gateway.admission import EncodedPrompt
from request_manager.gateway.choice import ChoiceDelta
from request_manager.gateway.schema import R
from request_manager.gateway.text import TextCodec
from request_manager.gateway.transcript import Transcript

Json = dict[str, Any]


class Dialect(Protocol[R]):
    """One endpoint of the OpenAI API. prompt_param: the field that holds the prompt. operation: as traces name it."""

    id_prefix: str
    operation: str
    prompt_param: str
    whole_object: str
    chunk_object: str

    @property
    def request(self) -> type[R]:
        """The model of its requests."""

    def num_prompts(self, fields: R) -> int:
        """How many prompts the request has."""

    def encode(self, fields: R, text: TextCodec) -> list[EncodedPrompt]:
        """The prompts' token ids, and their text if it is to be echoed.

        May take seconds for a long prompt, so it is called in a thread.
        """

    def whole(self, idx: int, transcript: Transcript) -> Json:
        """The entry in `choices` of a finished choice."""

    def chunks(self, idx: int, delta: ChoiceDelta, *, is_first: bool) -> list[Json]:
        """The entries in `choices`, one a chunk, that stream a delta; none if there is nothing to tell."""
