"""What papers claim for the families of `benchmarks.drafter_families`, and what is different here."""

from __future__ import annotations

from dataclasses import dataclass

ARXIV = "https://arxiv.org/abs/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A paper, and the families here that do what it describes."""

    families: tuple[str, ...]
    paper: str
    link: str
    says: str
    """Its largest claims, most of them at batch 1 and temperature 0 on one GPU."""
    differs: str
    """What is different here whatever is measured."""

    @property
    def source(self) -> str:
        """The paper in Markdown."""
        return f"{self.paper}, [{self.link.removeprefix(ARXIV).removeprefix('https://github.com/')}]({self.link})"


CLAIMS: tuple[Claim, ...] = (
    Claim(
        families=("draft_model", "draft_model_dynamic"),
        paper="Leviathan et al.",
        link=f"{ARXIV}2211.17192",
        says="2x to 3x (T5-XXL)",
        differs="the draft is a sixth of the demo target, a ninetieth of the inflated one",
    ),
    Claim(
        families=("draft_model_static",),
        paper="Sequoia, Chen et al.",
        link=f"{ARXIV}2402.12374",
        says="up to 4.04x (Llama 2 7B, A100)",
        differs="a fixed shape of twelve nodes, not one found for the hardware: rows cost time on cores",
    ),
    Claim(
        families=("ngram",),
        paper="prompt lookup, Saxena",
        link="https://github.com/apoorvumang/prompt-lookup-decoding",
        says="2x to 4x where answers repeat the prompt",
        differs="two of the three classes of text are chosen not to repeat",
    ),
    Claim(
        families=("suffix", "suffix_tree"),
        paper="SuffixDecoding, Oliaro et al.",
        link=f"{ARXIV}2411.04975",
        says="up to 5.3x on agents' work, in which requests repeat each other",
        differs="what other requests wrote is not looked at: prompts are decoded several times",
    ),
    Claim(
        families=("retrieval", "retrieval_tree"),
        paper="REST, He et al.",
        link=f"{ARXIV}2311.08252",
        says="1.62x to 2.36x (7B and 13B)",
        differs="the corpus is what the target was trained on, some megabytes",
    ),
    Claim(
        families=("lookahead",),
        paper="Lookahead decoding, Fu et al.",
        link=f"{ARXIV}2402.02057",
        says="up to 1.8x (MT-bench)",
        differs="the window is fourteen more rows in each pass, which cores compute one after the other",
    ),
    Claim(
        families=("self_streaming", "self_snapkv", "self_tree"),
        paper="MagicDec, Chen et al.",
        link=f"{ARXIV}2408.11049",
        says="up to 2.51x (Llama 3.1 8B), batches of 32 to 256, long contexts",
        differs="contexts are short: drafting with the whole target saves no reading of K/V",
    ),
    Claim(
        families=("layerskip", "layerskip_tree"),
        paper="LayerSkip, Elhoushi et al.",
        link=f"{ARXIV}2404.16710",
        says="up to 2.16x (summaries), 1.82x (code)",
        differs="four of eight layers draft: half of the cost of a pass for each token",
    ),
    Claim(
        families=("quantized", "quantized_tree"),
        paper="QSpec, Zhao et al.",
        link=f"{ARXIV}2410.11305",
        says="up to 1.64x, against a target with quantized weights",
        differs="measured against the target in bf16; weights of the draft pass in 4 bits, activations not",
    ),
    Claim(
        families=("medusa", "medusa_tree"),
        paper="Medusa, Cai et al.",
        link=f"{ARXIV}2401.10774",
        says="Medusa-1 more than 2.2x, Medusa-2 2.3x to 3.6x; trees",
        differs="Medusa-1 with two heads instead of four or five, trained for minutes",
    ),
    Claim(
        families=("hydra", "hydra_tree", "hydra_plus"),
        paper="Hydra, Ankner et al.",
        link=f"{ARXIV}2402.05109",
        says="Hydra++ up to 2.70x, 1.31x of Medusa; trees",
        differs="two heads instead of four, trained for minutes (Hydra++: four, on a GPU)",
    ),
    Claim(
        families=("parallel_heads", "parallel_heads_tree"),
        paper="Gloeckle et al.",
        link=f"{ARXIV}2404.19737",
        says="up to 3x (trained from the start with four heads)",
        differs="two heads, added to a finished target that does not move",
    ),
    Claim(
        families=("eagle",),
        paper="EAGLE, Li et al.",
        link=f"{ARXIV}2401.15077",
        says="2.7x to 3.5x (Llama 2 70B chat); 1.6x of Medusa (13B); static trees",
        differs="a chain; one layer trained on 11 million tokens",
    ),
    Claim(
        families=("eagle_tree",),
        paper="EAGLE-2, Li et al.",
        link=f"{ARXIV}2406.16858",
        says="3.05x to 4.26x, 1.4x of EAGLE (13B); dynamic trees",
        differs="sixteen nodes at most instead of about sixty: each is a row to compute",
    ),
    Claim(
        families=("eagle3", "eagle3_tree", "eagle31"),
        paper="EAGLE-3, Li et al.",
        link=f"{ARXIV}2503.01840",
        says="up to 6.5x, about 1.4x of EAGLE-2; 1.38x throughput at batch 64 in SGLang; dynamic trees",
        differs="its gain comes with much data; here it has 11 million tokens, and half of the vocabulary",
    ),
    Claim(
        families=("mtp", "mtp_tree"),
        paper="DeepSeek-V3",
        link=f"{ARXIV}2412.19437",
        says="1.8x tokens per second; the second token stands in 85 to 90 % of cases",
        differs="trained with the target for one token ahead, and used for up to four",
    ),
    Claim(
        families=("mtp_reused",),
        paper="FastMTP, Cai et al.",
        link=f"{ARXIV}2509.18362",
        says="2.03x on average",
        differs="the target's own module trained further for minutes; the whole vocabulary",
    ),
)
"""In the order of FAMILIES. Combinations (`lookup_first`, `lookup_first_eagle`) are of no paper."""
ORDER = ("medusa", "hydra", "eagle", "eagle3")
"""As published, from slow to fast."""
