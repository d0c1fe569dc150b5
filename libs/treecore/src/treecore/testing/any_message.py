"""Any message of the wire, for property tests. Knows the types; must not know what they mean."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from treecore.expand import Expansion
from treecore.messages import (
    Announcement,
    BlockUsage,
    DraftedItem,
    DraftItem,
    DraftReply,
    DraftRequest,
    Hello,
    Logprobs,
    RefusedItem,
    RequestId,
    VerifiedItem,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
    WorkerId,
)
from treecore.noise import Seed
from treecore.params import Grammar, SamplingParams
from treecore.sparse import DraftLaws, Masses, Supports
from treecore.streams import (
    Admission,
    AdmissionReply,
    Delta,
    Deltas,
    GatewayId,
    ManagerAnnouncement,
    ModelCard,
    OpenStream,
    OpenStreams,
    StreamsReply,
    Verdict,
)

texts = st.text(max_size=12)
request_ids = texts.map(RequestId)
worker_ids = texts.map(WorkerId)
counts = st.integers(0, 2**40)
tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6).map(lambda ids: np.array(ids, np.int32))
floats = st.floats(0, 1e9, allow_nan=False)
params = st.builds(
    SamplingParams,
    st.floats(0, 2),
    st.integers(0, 2**31),
    st.floats(1e-6, 1),
    st.integers(0, 2**64 - 1).map(Seed),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 2),
    presence_penalty=st.floats(-2, 2),
    bias_ids=st.just((1, 2)),
    biases=st.tuples(st.floats(-100, 100), st.floats(-100, 100)),
    end_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    num_logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(["regex", "json_schema"]), texts),
    rule=st.sampled_from(["coupled", "naive", "multi_step", "multi_step_iid"]),
)
float_arrays = st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(
    lambda values: np.array(values, np.float32)
)
supports = st.builds(Supports, tokens, tokens, tokens)
laws = st.builds(DraftLaws, supports, float_arrays)
expansions = st.lists(st.integers(1, 9), max_size=4).map(lambda widths: Expansion(tuple(widths)))
blocks = st.builds(BlockUsage, counts, counts, counts, counts, counts)


def tuples(item: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Up to three of an item."""
    return st.lists(item, max_size=3).map(tuple)


draft_items = st.builds(DraftItem, request_ids, counts, counts, tokens, st.none() | params, expansions)
verify_items = st.builds(
    VerifyItem,
    request_ids,
    counts,
    counts,
    tokens,
    st.none() | params,
    tokens,
    tokens,
    st.booleans(),
    st.none() | supports,
)
refused = tuples(st.builds(RefusedItem, request_ids, counts, counts, texts))
step_messages = st.one_of(
    st.builds(DraftRequest, texts, counts, tuples(request_ids), tuples(draft_items)),
    st.builds(
        DraftReply,
        worker_ids,
        tuples(
            st.builds(
                DraftedItem,
                request_ids,
                counts,
                tokens,
                tokens,
                st.none() | laws,
            )
        ),
        refused,
        floats,
        floats,
        blocks,
    ),
    st.builds(VerifyRequest, texts, tuples(request_ids), tuples(verify_items)),
    st.builds(
        VerifyReply,
        worker_ids,
        tuples(
            st.builds(
                VerifiedItem,
                request_ids,
                counts,
                tokens,
                counts,
                st.none() | st.builds(Masses, float_arrays, float_arrays),
                st.none() | st.builds(Logprobs, float_arrays, tokens, float_arrays),
            )
        ),
        refused,
        floats,
        floats,
        blocks,
    ),
    st.builds(
        Announcement,
        worker_ids,
        st.sampled_from(["ssm", "verifier"]),
        texts,
        st.integers(1000, 2**31 - 1),
        st.integers(1, 2**31 - 1),
        tuples(st.integers(0, 999)),
        st.builds(BlockUsage, counts, counts, counts, counts, st.integers(1, 64)),
        st.booleans(),
    ),
    st.builds(Hello, texts),
)

logprobs = st.builds(Logprobs, float_arrays, tokens, float_arrays)
gateway_ids = texts.map(GatewayId)
verdicts = st.builds(Verdict, texts, texts, st.none() | texts, st.none() | texts, counts)
int_tuples = tuples(st.integers(0, 2**31 - 1))
admissions = st.builds(
    Admission,
    gateway_ids,
    request_ids,
    counts,
    tokens,
    tokens,
    params,
    counts,
    st.booleans(),
    st.none() | expansions,
    st.booleans(),
    st.none() | st.booleans(),
    st.none() | tuples(texts),
    texts,
)
deltas = st.builds(
    Delta,
    request_ids,
    counts,
    counts,
    int_tuples,
    st.sampled_from([None, "stop", "length"]),
    counts,
    counts,
    counts,
    st.none() | logprobs,
    st.none() | verdicts,
)
sizes = st.integers(1, 2**31 - 1)
cards = st.builds(ModelCard, texts, sizes, sizes, int_tuples, sizes, st.booleans())
stream_messages = st.one_of(
    admissions,
    st.builds(AdmissionReply, st.none() | verdicts),
    st.builds(Deltas, tuples(deltas)),
    st.builds(OpenStreams, gateway_ids, counts, tuples(st.builds(OpenStream, request_ids, counts))),
    st.builds(StreamsReply, tuples(st.integers(-1, 2**40))),
    st.builds(
        ManagerAnnouncement,
        worker_ids,
        st.booleans(),
        st.booleans(),
        counts,
        counts,
        cards,
    ),
)
every_message = step_messages | stream_messages
