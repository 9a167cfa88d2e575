// The token function (see sampler.py) for rows of fp32 logits on a CPU.
//
// Choices are those of sampler.sample_eager. It is faster because only tokens that can still win get their
// noise: -log(u) bounds Gumbel noise from above, and a bound on -log(u) is read off the float's bits. The
// few that survive are scored exactly as the definition says. All cuts are lower limits on the score, so
// the kept set is one comparison.
//
// Plain loops over small blocks, written to be vectorised by the compiler.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace {

// The hash of noise.py.
constexpr uint64_t kWeyl = 0x9E3779B97F4A7C15u;
constexpr uint64_t kMultiplier1 = 0xBF58476D1CE4E5B9u;
constexpr uint64_t kMultiplier2 = 0x94D049BB133111EBu;

constexpr int64_t kBlock = 64;
constexpr float kNever = -std::numeric_limits<float>::infinity();
// No noise is larger: g(h = 0) = 22.873858.
constexpr float kLargestNoise = 22.8739f;
// Covers the rounding of the bound below, of a sum of magnitude up to 50.
constexpr float kSlack = 1e-4f;
// exp(-50) x 2^17 tokens is below the last bit of a float64 mass of at least 1.
constexpr float kNoMass = -50.0f;

struct Row {
    uint64_t key;
    float temperature;
    int64_t top_k;
    double top_p;
    float log_min_p;
};

inline uint64_t mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * kMultiplier1;
    z = (z ^ (z >> 27)) * kMultiplier2;
    return z ^ (z >> 31);
}

inline uint64_t row_key(uint64_t seed, uint64_t position, uint64_t stream_tag) {
    return mix64(mix64(mix64(seed + kWeyl) ^ stream_tag) + (position + 1) * kWeyl);
}

inline float noise(uint32_t hash_bits) {
    const double u = (hash_bits + 0.5) * 0x1p-32;
    return static_cast<float>(-std::log(-std::log1p(-u)));
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Largest logit; NaN when any logit is NaN.
float peak_of(const float* logits, int64_t size) {
    float lanes[kBlock];
    uint32_t nan_lanes[kBlock] = {};
    std::fill(lanes, lanes + kBlock, kNever);
    int64_t i = 0;
    for (; i + kBlock <= size; i += kBlock) {
        for (int64_t j = 0; j < kBlock; ++j) {
            const float x = logits[i + j];
            lanes[j] = x > lanes[j] ? x : lanes[j];
            nan_lanes[j] |= (bits_of(x) & 0x7FFFFFFFu) > 0x7F800000u;
        }
    }
    for (; i < size; ++i) {
        lanes[0] = std::max(lanes[0], logits[i]);
        nan_lanes[0] |= std::isnan(logits[i]);
    }
    if (std::any_of(nan_lanes, nan_lanes + kBlock, [](uint32_t is_nan) { return is_nan != 0; })) {
        return std::numeric_limits<float>::quiet_NaN();
    }
    return *std::max_element(lanes, lanes + kBlock);
}

// First token at the peak.
int64_t first_at(const float* logits, int64_t size, float peak) {
    int64_t i = 0;
    for (; i + kBlock <= size; i += kBlock) {
        uint32_t found = 0;
        for (int64_t j = 0; j < kBlock; ++j) found |= logits[i + j] == peak;
        if (found) break;
    }
    while (logits[i] != peak) ++i;
    return i;
}

// ---- cuts: each is a lower limit on the score ----------------------------------------------------

// Scores fall into bins by the bits of -score, so that a bin is 1/32 of an octave wide and bins run from
// the most likely tokens to the least likely.
constexpr uint32_t kBinShift = 18;
constexpr uint32_t kFirstBin = 115u << 5;  // everything above -2^-12
constexpr uint32_t kLastBin = 136u << 5;   // everything below -2^9, -inf too
constexpr uint32_t kNumBins = kLastBin - kFirstBin + 1;

inline uint32_t bin_of(float score) {
    const uint32_t bin = (bits_of(score) & 0x7FFFFFFFu) >> kBinShift;
    return std::min(std::max(bin, kFirstBin), kLastBin) - kFirstBin;
}

std::vector<float> scores_in_bin(const float* scores, int64_t padded, uint32_t bin) {
    std::vector<float> found;
    for (int64_t i = 0; i < padded; ++i) {
        if (bin_of(scores[i]) == bin) found.push_back(scores[i]);
    }
    return found;
}

// `scores` is padded with -inf to whole blocks, here and below.
float top_k_limit(const float* scores, int64_t padded, int64_t top_k) {
    std::array<int32_t, kNumBins> counts{};
    for (int64_t begin = 0; begin < padded; begin += kBlock) {
        uint32_t bins[kBlock];
        for (int64_t j = 0; j < kBlock; ++j) bins[j] = bin_of(scores[begin + j]);
        for (int64_t j = 0; j < kBlock; ++j) ++counts[bins[j]];
    }
    uint32_t bin = 0;
    int64_t wanted = top_k;
    while (counts[bin] < wanted) wanted -= counts[bin++];
    std::vector<float> candidates = scores_in_bin(scores, padded, bin);
    std::nth_element(candidates.begin(), candidates.begin() + (wanted - 1), candidates.end(), std::greater<>());
    return candidates[wanted - 1];
}

// exp(x) for x in [-50, 0] to about one unit in the last place, in operations that vectorise.
inline double exp_of(double x) {
    constexpr double kRound = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
    const double shifted = x * 1.4426950408889634 + kRound;
    uint64_t exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    const double n = shifted - kRound;
    const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;  // ln2 in two parts
    double series = 1.0 / 6227020800.0;  // Taylor to r^13 / 13!, |r| <= ln2 / 2
    series = series * r + 1.0 / 479001600.0;
    series = series * r + 1.0 / 39916800.0;
    series = series * r + 1.0 / 3628800.0;
    series = series * r + 1.0 / 362880.0;
    series = series * r + 1.0 / 40320.0;
    series = series * r + 1.0 / 5040.0;
    series = series * r + 1.0 / 720.0;
    series = series * r + 1.0 / 120.0;
    series = series * r + 1.0 / 24.0;
    series = series * r + 1.0 / 6.0;
    series = series * r + 0.5;
    series = series * r + 1.0;
    series = series * r + 1.0;
    uint64_t bits;
    std::memcpy(&bits, &series, sizeof bits);
    bits += exponent << 52;
    std::memcpy(&series, &bits, sizeof bits);
    return series;
}

float top_p_limit(const float* scores, int64_t padded, double top_p, float limit) {
    std::array<double, kNumBins + 1> masses{};  // the last one takes what a cut before has dropped
    const float least = std::max(limit, kNoMass);
    for (int64_t begin = 0; begin < padded; begin += kBlock) {
        uint32_t bins[kBlock];
        double block_masses[kBlock];
        for (int64_t j = 0; j < kBlock; ++j) {
            bins[j] = scores[begin + j] >= least ? bin_of(scores[begin + j]) : kNumBins;
        }
        for (int64_t j = 0; j < kBlock; ++j) block_masses[j] = exp_of(std::max(scores[begin + j], least));
        for (int64_t j = 0; j < kBlock; ++j) masses[bins[j]] += block_masses[j];
    }
    double total = 0.0;
    for (uint32_t b = 0; b < kNumBins; ++b) total += masses[b];
    const double wanted = top_p * total;
    double taken = 0.0;
    uint32_t bin = 0;
    while (bin + 1 < kNumBins && taken + masses[bin] < wanted) taken += masses[bin++];
    std::vector<float> candidates = scores_in_bin(scores, padded, bin);
    std::sort(candidates.begin(), candidates.end(), std::greater<>());
    float last = 0.0f;
    for (float score : candidates) {
        if (score < least) break;
        last = score;
        taken += exp_of(score);
        if (taken >= wanted) break;
    }
    return last;
}

// ---- choice ---------------------------------------------------------------------------------------

struct Choice {
    float score;
    int64_t token;

    // Less than this wins nothing.
    float bar() const { return score; }

    void offer(float candidate, int64_t candidate_token) {
        if (candidate > score || (candidate == score && candidate_token < token)) {
            score = candidate;
            token = candidate_token;
        }
    }
};

// The best few of what is offered in the order of tokens: the best first, equal ones by rising token.
struct Ranking {
    Choice* best;
    int64_t room;
    int64_t count = 0;

    float bar() const { return count < room ? kNever : best[count - 1].score; }

    void offer(float candidate, int64_t candidate_token) {
        if (count == room && !(candidate > best[count - 1].score)) return;
        int64_t place = count < room ? count++ : count - 1;
        for (; place > 0 && best[place - 1].score < candidate; --place) best[place] = best[place - 1];
        best[place] = {candidate, candidate_token};
    }
};

// Tokens begin .. begin + kBlock - 1. `Bids` is a Choice or a Ranking.
template <typename Bids>
void offer_block(const float* scores, int64_t begin, uint64_t key, float limit, Bids& bids) {
    const float least = std::max(limit, bids.bar() - kLargestNoise - kSlack);
    uint32_t any = 0;
    for (int64_t j = 0; j < kBlock; ++j) any |= scores[begin + j] >= least;
    if (!any) return;
    uint32_t hashes[kBlock];
    const uint64_t first = key + static_cast<uint64_t>(begin + 1) * kWeyl;
    for (int64_t j = 0; j < kBlock; ++j) {
        hashes[j] = static_cast<uint32_t>(mix64(first + static_cast<uint64_t>(j) * kWeyl) >> 32);
    }
    // With f = h + 0.5 = 2^e (1 + m): log2 f >= e + m, which is the float's bits read as a number; then
    // g = -log(-log1p(-u)) <= -log(u) = ln2 (32 - log2 f).
    float bounds[kBlock];
    any = 0;
    for (int64_t j = 0; j < kBlock; ++j) {
        const float f = static_cast<float>(hashes[j]) + 0.5f;
        const float log2_f = static_cast<float>(static_cast<int32_t>(bits_of(f)) - (127 << 23)) * 0x1p-23f;
        bounds[j] = scores[begin + j] + (0.69314718f * (32.0f - log2_f) + kSlack);
        any |= bounds[j] >= bids.bar();
    }
    if (!any) return;
    for (int64_t j = 0; j < kBlock; ++j) {
        const float score = scores[begin + j];
        if (bounds[j] >= bids.bar() && score >= limit) {
            bids.offer(score + noise(hashes[j]), begin + j);
        }
    }
}

// What no cut leaves out has at least this score.
float limit_of(const float* scores, int64_t size, int64_t padded, const Row& row) {
    float limit = std::numeric_limits<float>::lowest();
    if (row.top_k < size) limit = std::max(limit, top_k_limit(scores, padded, row.top_k));
    if (row.top_p < 1.0) limit = top_p_limit(scores, padded, row.top_p, limit);
    return std::max(limit, row.log_min_p);
}

// Scores of temperature `temperature`, padded with -inf to whole blocks; valid until the thread's next call.
float* scores_of(const float* logits, int64_t size, int64_t padded, float peak, float temperature) {
    thread_local std::vector<float> buffer;
    buffer.resize(padded);
    float* scores = buffer.data();
    for (int64_t i = 0; i < size; ++i) scores[i] = (logits[i] - peak) / temperature;
    std::fill(scores + size, scores + padded, kNever);
    return scores;
}

int64_t sample_row(const float* logits, int64_t size, float peak, int64_t peak_token, const Row& row) {
    const int64_t padded = (size + kBlock - 1) / kBlock * kBlock;
    const float* scores = scores_of(logits, size, padded, peak, row.temperature);
    const float limit = limit_of(scores, size, padded, row);
    // The peak's own score is 0 and it survives every cut: a good first bid.
    Choice choice{noise(static_cast<uint32_t>(mix64(row.key + (peak_token + 1) * kWeyl) >> 32)), peak_token};
    for (int64_t begin = 0; begin < padded; begin += kBlock) offer_block(scores, begin, row.key, limit, choice);
    return choice.token;
}

// Token of one row; -1 where its logits are not finite. row.key is used above temperature 0 only.
int64_t choose(const float* logits, int64_t size, const Row& row) {
    const float peak = peak_of(logits, size);
    if (!std::isfinite(peak)) return -1;
    const int64_t peak_token = first_at(logits, size, peak);
    return row.temperature == 0.0f ? peak_token : sample_row(logits, size, peak, peak_token, row);
}

void offer_all(const float* scores, int64_t padded, const Row& row, float limit, bool has_noise, Ranking& ranking) {
    for (int64_t begin = 0; begin < padded; begin += kBlock) {
        if (has_noise) {
            offer_block(scores, begin, row.key, limit, ranking);
            continue;
        }
        const float least = std::max(limit, ranking.bar());
        for (int64_t i = begin; i < begin + kBlock; ++i) {
            if (scores[i] >= least) ranking.offer(scores[i], i);
        }
    }
}

// The best tokens of one row, as sampler.ranked_tokens; returns how many there are.
int64_t rank_row(const float* logits, int64_t size, const Row& row, bool with_noise, Choice* best, int64_t room) {
    const float peak = peak_of(logits, size);
    if (!std::isfinite(peak) || room == 0) return 0;
    const bool is_greedy = row.temperature == 0.0f;
    const bool has_noise = with_noise && !is_greedy;
    const int64_t padded = (size + kBlock - 1) / kBlock * kBlock;
    float* scores = scores_of(logits, size, padded, peak, is_greedy ? 1.0f : row.temperature);
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    const float limit = is_greedy ? kLowest : limit_of(scores, size, padded, row);
    Ranking kept{best, room};
    offer_all(scores, padded, row, limit, has_noise, kept);
    if (kept.count == room || limit == kLowest) return kept.count;
    // What was cut comes behind.
    for (int64_t i = 0; i < size; ++i) scores[i] = scores[i] >= limit ? kNever : scores[i];
    Ranking cut{best + kept.count, room - kept.count};
    offer_all(scores, padded, row, kLowest, has_noise, cut);
    return kept.count + cut.count;
}

// Log of how likely each of a row's ranked tokens is thought to stand: its probability before any cut; with
// noise, by how far its noisy score is above those of the others.
void rate(const float* logits, int64_t size, const Row& row, bool with_noise, const Choice* best, int64_t count,
          float* log_confidences) {
    if (count == 0) return;
    const bool is_greedy = row.temperature == 0.0f;
    const int64_t padded = (size + kBlock - 1) / kBlock * kBlock;
    const float* scores = scores_of(logits, size, padded, peak_of(logits, size), is_greedy ? 1.0f : row.temperature);
    double lanes[kBlock] = {};
    for (int64_t begin = 0; begin < padded; begin += kBlock) {
        for (int64_t j = 0; j < kBlock; ++j) lanes[j] += exp_of(std::max(scores[begin + j], kNoMass));
    }
    double mass = 0.0;
    for (double lane : lanes) mass += lane;
    const float log_mass = static_cast<float>(std::log(mass));
    for (int64_t i = 0; i < count; ++i) log_confidences[i] = scores[best[i].token] - log_mass;
    if (!with_noise || is_greedy) return;
    float top = kNever;
    for (int64_t i = 0; i < count; ++i) {
        log_confidences[i] += noise(static_cast<uint32_t>(mix64(row.key + (best[i].token + 1) * kWeyl) >> 32));
        top = std::max(top, log_confidences[i]);
    }
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) sum += std::exp(static_cast<double>(log_confidences[i] - top));
    const float log_sum = top + static_cast<float>(std::log(sum));
    for (int64_t i = 0; i < count; ++i) log_confidences[i] -= log_sum;
}

// What a request asks for; native.py packs it.
struct Parameters {
    uint64_t seed;
    int64_t top_k;
    double temperature;
    double top_p;
    double log_min_p;
};

Row row_of(const Parameters& of, int64_t position, uint64_t stream_tag) {
    return {row_key(of.seed, position, stream_tag), static_cast<float>(of.temperature), of.top_k, of.top_p,
            static_cast<float>(of.log_min_p)};
}

constexpr uint64_t kDraftStream = 0x082EFA98EC4E6C89;  // STREAM_TAGS["draft"] of noise.py
constexpr uint64_t kNumMadeUp = 256;                   // NUM_TOKENS of made_up_tokens.py

struct ChooserParameters {
    const Parameters* sequences;
    int64_t vocab_size;  // tokens from here on are never chosen
    uint64_t stream_tag;
};

struct RankerParameters {
    ChooserParameters chooser;
    int64_t with_noise;
    int64_t num;             // tokens per row
    int64_t* token_ids;      // [rows][num], -1 where there are no more
    float* log_confidences;  // [rows][num]; null: nobody asks
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// integers: [3][num_rows] seed, position, top_k; reals: [3][num_rows] temperature, top_p, log of min_p.
void drafthouse_sample_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                            const int64_t* integers, const double* reals, uint64_t stream_tag, int32_t num_threads,
                            int64_t* token_ids, uint8_t* finite) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (int64_t r = 0; r < num_rows; ++r) {
        const Parameters of = {static_cast<uint64_t>(integers[r]), integers[2 * num_rows + r], reals[r],
                               reals[num_rows + r], reals[2 * num_rows + r]};
        const int64_t token_id =
            choose(logits + r * row_stride, vocab_size, row_of(of, integers[num_rows + r], stream_tag));
        finite[r] = token_id >= 0;
        token_ids[r] = std::max<int64_t>(token_id, 0);
    }
}

// As drafthouse_sample_rows; token_ids: [num_rows][num], -1 where there are no more.
void drafthouse_rank_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                          const int64_t* integers, const double* reals, uint64_t stream_tag, int32_t with_noise,
                          int64_t num, int32_t num_threads, int64_t* token_ids) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (int64_t r = 0; r < num_rows; ++r) {
        const Parameters of = {static_cast<uint64_t>(integers[r]), integers[2 * num_rows + r], reals[r],
                               reals[num_rows + r], reals[2 * num_rows + r]};
        std::vector<Choice> best(num);
        const int64_t count = rank_row(logits + r * row_stride, vocab_size, row_of(of, integers[num_rows + r], stream_tag),
                                       with_noise != 0, best.data(), num);
        for (int64_t i = 0; i < num; ++i) token_ids[r * num + i] = i < count ? best[i].token : -1;
    }
}

// As dh::Chooser of specdec/model/csrc/layout.h.
void drafthouse_choose(const void* parameters, const float* logits, int64_t row_stride, int64_t first, int64_t last,
                       const int32_t* sequences, const int64_t* positions, int64_t* token_ids) {
    const auto& with = *static_cast<const ChooserParameters*>(parameters);
    for (int64_t r = first; r < last; ++r) {
        const Row row = row_of(with.sequences[sequences[r]], positions[r], with.stream_tag);
        token_ids[r] = choose(logits + r * row_stride, with.vocab_size, row);
    }
}

// As drafthouse_choose, for whoever wants several tokens of a row; the best of them stands for the choice.
void drafthouse_rank(const void* parameters, const float* logits, int64_t row_stride, int64_t first, int64_t last,
                     const int32_t* sequences, const int64_t* positions, int64_t* token_ids) {
    const auto& with = *static_cast<const RankerParameters*>(parameters);
    thread_local std::vector<Choice> best;
    best.resize(with.num);
    for (int64_t r = first; r < last; ++r) {
        const Row row = row_of(with.chooser.sequences[sequences[r]], positions[r], with.chooser.stream_tag);
        const float* its = logits + r * row_stride;
        const int64_t size = with.chooser.vocab_size;
        const int64_t count = rank_row(its, size, row, with.with_noise != 0, best.data(), with.num);
        for (int64_t i = 0; i < with.num; ++i) with.token_ids[r * with.num + i] = i < count ? best[i].token : -1;
        if (with.log_confidences != nullptr)
            rate(its, size, row, with.with_noise != 0, best.data(), count, with.log_confidences + r * with.num);
        token_ids[r] = count > 0 ? best[0].token : -1;
    }
}

// As drafthouse_choose, for measurements: at the same cost, but what comes out is made up (sampling/made_up.py).
void drafthouse_choose_made_up(const void* parameters, const float* logits, int64_t row_stride, int64_t first,
                               int64_t last, const int32_t* sequences, const int64_t* positions, int64_t* token_ids) {
    drafthouse_choose(parameters, logits, row_stride, first, last, sequences, positions, token_ids);
    const auto& with = *static_cast<const ChooserParameters*>(parameters);
    for (int64_t r = first; r < last; ++r) {
        if (token_ids[r] < 0) continue;
        token_ids[r] = row_key(with.sequences[sequences[r]].seed, positions[r], kDraftStream) % kNumMadeUp;
    }
}
}
#pragma GCC visibility pop
