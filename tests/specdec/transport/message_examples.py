"""Every message there is."""

from __future__ import annotations

from specdec.core.description import TargetDescription
from specdec.core.distributions import TokenDistribution
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput, RequestStats, TokenLogprobs
from specdec.core.plan import AdmittedSequence, TargetResult, TargetStep, TargetWork, WorkResult
from specdec.core.request import Request, Resumption
from specdec.core.sampling_params import SamplingParams
from specdec.transport import messages as m
from specdec.transport.status import ChoiceStatus, DraftLinkStatus, TargetGroupStatus

ID = RequestId("cmpl-1-0")
BIG = (1 << 64) - 1
PARAMS = SamplingParams(
    temperature=0.7,
    top_k=4,
    repetition_penalty=1.2,
    logit_bias=((5, -1.5),),
    bad_words=((1, 2), (3,)),
    allowed_token_ids=(1, 5),
    stop=("\n\n",),
    stop_token_ids=(7,),
    seed=3,
)
OUTPUT = RequestOutput(
    request_id=ID,
    epoch=Epoch(2),
    first_index=3,
    token_ids=(5, 6),
    text="\u00e9x",
    logprobs=(TokenLogprobs(5, -0.5, ((5, -0.5), (9, -2.0))), TokenLogprobs(6, -0.25, ())),
    finish_reason="stop",
    stop_reason="\n\n",
    stats=RequestStats(arrival_s=1.5),
)
EXAMPLES: list[m.Message] = [
    m.Hello(7, (Resumption(name="cmpl-1-0", proof=b"mine", window_s=60.0),)),
    m.Welcome(
        7,
        TargetDescription(
            model_id="demo",
            revision="r",
            dtype="float32",
            vocab_size=11,
            max_model_len=64,
            eos_token_ids=(2,),
            num_blocks=8,
            block_size=16,
            device="cpu of some kind, 2 threads",
        ),
    ),
    m.Fenced(1, 2),
    m.Fatal("out of memory"),
    m.StepPart(1, 2, 0, 3, b"\x00\xff"),
    m.RunStep(
        1,
        2,
        TargetStep(
            3,
            (TargetWork(ID, (1, 2), 5, 2, 0, (3, 4), (-1, 0)),),
            (AdmittedSequence(ID, BIG, PARAMS, 2, (3, 4, 5)),),
            (ID,),
        ),
    ),
    m.StepDone(
        1,
        2,
        TargetResult(
            3, (WorkResult((4, 5)), WorkResult((), None, "non-finite logits", "non_finite_logits")), 0.1, 0.2
        ),
        {"worker_messages_dropped": 2},
    ),
    m.ProposeRequest(4, (m.ProposeEntry(ID, 1, 9, BIG, 4, 0, (1, 2), m.DraftOpening(PARAMS, BIG, 2)),)),
    m.ProposeReply(4, (m.ProposeAnswer(ID, 1, 9, BIG, (3, 4), "target"),), 0.25),
    m.ProposeRequest(5, (m.ProposeEntry(ID, 1, 9, BIG, 4, 9, (), None, (3, 4), (1, 0, 3)),)),
    m.ProposeReply(
        5,
        (
            m.ProposeAnswer(
                *(ID, 1, 9, BIG, (), "draft"),
                branches=(
                    m.DraftBranch(12, BIG, (3, 4)),
                    m.DraftBranch(10, 0, (5,), (TokenDistribution(bytes(8), bytes(8)),)),
                ),
            ),
        ),
    ),
    m.ProposeReply(6, (m.ProposeAnswer(ID, 1, 9, BIG, (), is_full=True, lacks_memory=True),)),
    m.Release(((ID, 3),)),
    m.Release(((ID, 3),), have_ended=True),
    m.SubmitRequest(Request(request_id=ID, prompt_token_ids=(1, 2, 3), params=PARAMS, seed=BIG), 1),
    m.Admitted(ID, Epoch(1), False, True, (1, 3), 2),
    m.Refused(ID, Epoch(1), "capacity", "full", None, 2.5),
    m.OutputFrame((OUTPUT,)),
    m.Abort(ID, Epoch(1)),
    m.Ping(1),
    m.Pong(1, ((ID, Epoch(1)),), 2, 3, True, False, True, 1088),
    m.MetricsQuery(1),
    m.StatusQuery(1),
    m.Recall(3, ("cmpl-1-0", "cmpl-1-1"), b"\x00\xffproof"),
    m.Recalled(3, (("cmpl-1-0", (5, 6)), ("cmpl-1-0", ())), True),
    m.StatusReply(1, None),
    m.StatusReply(
        2,
        TargetGroupStatus(
            id="coordinator-1",
            num_running=3,
            choice=ChoiceStatus(
                mode="draft_ahead",
                is_speculating=True,
                reason="gain",
                explanation="it gains",
                mean_num_draft_tokens=2.5,
                num_requests_by_k={2: 1, 3: 1},
                expected_tokens_per_s=90.0,
                expected_tokens_per_s_by_mode={"plain": 50.0, "draft_ahead": 90.0},
                expected_draft_s=0.01,
                expected_verify_s=0.02,
                expected_round_s=0.02,
                expected_acceptance=(0.8, 0.7),
                pool_worth=1.8,
                bounded_by="slo",
            ),
            draft_workers=(
                DraftLinkStatus(worker="draft-1", num_requests=3, is_waited_for=True, utilization=0.25),
            ),
        ),
    ),
    m.MetricsReply(1, {"x": 1.5}),
    m.DoorReport(
        {'http_requests_total{status="200"}': 3.0}, {"http_requests_in_progress": 1.0}, {"rounds": 2.0}
    ),
    m.DoorTotals({"rounds": 12.0}, {"coordinators": 2.0}),
    m.LaneOffer("drafthouse-0", bytes(32)),
    m.LaneMoved("drafthouse-0"),
    m.SendHidden(
        incarnation=3,
        coordinator="coordinator-1",
        receiver="draft-1-tensors",
        endpoint="tcp://10.0.0.3:41123",
        public_key="ab" * 32,
        wishes=(m.HiddenWish(RequestId("r1"), 2, 40, 1234567, 17),),
    ),
    m.HiddenStates("coordinator-1", (3, 17, 30), (m.HiddenRun(RequestId("r1"), 2, 40, 1234567, 17, 22),)),
]
