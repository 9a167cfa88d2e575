// What rows attend to, block by block, found beside their attention; specdec/attention/observation.py says what
// it is for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "simd.h"

namespace dh {

// Where observed rows add what they attend to. A step in which nothing is observed has no masses.
struct Observation {
  float* masses;        // [observed rows, num_heads, width]; null: nothing is observed
  const int32_t* rows;  // of each row of the step, its number among the observed ones; -1: it is not observed
  int32_t num_heads;
  int32_t width;  // blocks, a multiple of kLanes
  int32_t skips_windows;
  int32_t unused;
};

// The size of blocks that is looked at with few operations: that of the configuration's default.
constexpr int kUsualBlock = 16;

// Blocks of a sequence as one row has seen them: sums of weights relative to a maximum of scores, which differ
// from block to block, because the running maximum of an online softmax grows.
class BlockSums {
 public:
  // Makes room for blocks [first, last) of each of `num_rows` rows, and forgets what was there.
  void begin(int num_rows, int first, int last) {
    first_ = first;
    width_ = (last - first + kLanes - 1) / kLanes * kLanes;
    const size_t size = size_t(num_rows) * width_;
    maxima_.assign(size, -std::numeric_limits<float>::infinity());
    totals_.assign(size, 0.0f);
  }

  // Adds weights of keys [key, key + count) of row r, relative to `maximum`; up to the next multiple of kLanes what
  // stands behind them is zero.
  void add(int r, int key, int count, int block_size, float maximum, const float* weights) {
    if (block_size == kUsualBlock && key % kUsualBlock == 0) {
      for (int t = 0; t < count; t += 4 * kUsualBlock)
        put_sums(r, (key + t) / kUsualBlock, std::min(count - t, 4 * kUsualBlock), maximum, weights + t);
      return;
    }
    if (block_size % kLanes == 0 && key % kLanes == 0) {
      for (int t = 0; t < count; t += kLanes) add_sum(r, (key + t) / block_size, maximum, reduce_add(loadv(weights + t)));
      return;
    }
    for (int t = 0; t < count;) {
      const int block = (key + t) / block_size, end = std::min(count, (block + 1) * block_size - key);
      float sum = 0.0f;
      for (; t < end; ++t) sum += weights[t];
      add_sum(r, block, maximum, sum);
    }
  }

  // Adds the masses of row r to `out`, `width` blocks from the first one, once its maximum and total are known.
  void hand_over(int r, float maximum, float total, float* out, int width) const {
    if (!(total > 0.0f)) return;  // nothing was visible, or it is no number
    const float scale = 1.0f / total;
    const float* maxima = maxima_.data() + size_t(r) * width_;
    const float* totals = totals_.data() + size_t(r) * width_;
    float* target = out + first_;
    for (int block = 0; block < width_; block += kLanes) {
      const f32v mass = loadv(totals + block) * expv(loadv(maxima + block) - maximum) * scale;
      if (first_ + block + kLanes <= width)
        storev(target + block, loadv(target + block) + mass);
      else
        for (int lane = 0; first_ + block + lane < width; ++lane) target[block + lane] += mass[lane];
    }
  }

 private:
  // Of blocks that are seen once, up to four: there is nothing to add to.
  void put_sums(int r, int block, int count, float maximum, const float* weights) {
    f32v of_block[4] = {};
    for (int t = 0; t < count; t += kLanes) of_block[t / kUsualBlock] += loadv(weights + t);
    const f32v sums = reduce_add(of_block[0], of_block[1], of_block[2], of_block[3]);
    const size_t first = size_t(r) * width_ + block - first_;
    const int num_blocks = (count + kUsualBlock - 1) / kUsualBlock;
    std::memcpy(totals_.data() + first, &sums, num_blocks * sizeof(float));
    std::fill_n(maxima_.data() + first, num_blocks, maximum);
  }

  void add_sum(int r, int block, float maximum, float sum) {
    if (!(sum > 0.0f)) return;
    float& known_maximum = maxima_[size_t(r) * width_ + block - first_];
    float& total = totals_[size_t(r) * width_ + block - first_];
    if (maximum > known_maximum) {
      // Mostly nothing was known before: what is as small as exp(-inf) takes some processors hundreds of cycles.
      if (total > 0.0f) total *= expv(splat(known_maximum - maximum))[0];
      known_maximum = maximum;
    } else if (maximum < known_maximum) {
      sum *= expv(splat(maximum - known_maximum))[0];
    }
    total += sum;
  }

  std::vector<float> maxima_, totals_;
  int first_ = 0;
  int width_ = 0;
};

}  // namespace dh
